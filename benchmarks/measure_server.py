"""Measures the server's timing side channel, and its stability under load: figures of docs/server.md.

    python -m benchmarks.measure_server timing --home /tmp/server
    python -m benchmarks.measure_server soak --home /tmp/server

timing: one key has stored half of the passages; another key asks about all of them, then the first one does. How well
does the time of an answer reveal which half it is about? AUC 0.5: not at all; 1 or 0: always. The second key must learn
nothing.
soak: streams of many keys at once, a third of them cancelled, beside a client that never reads. Prompts alternate
between full prefill, exact paths and fusing. Answers of the first two kinds are compared with the same key's answers
without other load. Each passage is in two keys' prompts, and a key's first prompt must reuse nothing. Memory, threads
and open files are compared early and late in the run, and while idle after the first minute and after the run.
"""

import asyncio
import contextlib
import itertools
import json
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil  # type: ignore[import-untyped]
import typer

from benchmarks.common import Model, auc, read_json, run_server
from benchmarks.common import run as run_script
from benchmarks.filler import Notes, names
from ragblend.app.serve.keys import Client, Keys
from ragblend.app.services import AppServices
from ragblend.engine.decoding.implementations import DecodeComparison
from ragblend.engine.prompts.tokenizing import PASSAGES_HEADING, SEPARATOR, SYSTEM_MESSAGE

WAIT_S = 600.0
BLOCK, SENTENCES = 8, 6  # passages that are asked about together, half of them stored; sentences of a passage
TOKENS = 24  # of a stream's answer
REPEATS_TO_LEARN = 3  # prompts with a passage, after which the server knows the passage
CANCEL_ONE_IN = 3  # of so many streams one is cancelled
WARM_UP_S = 60.0  # all streams run so long before idle resources are taken for the first time
UNREAD_S = 90.0
IDLE_S = 0.3  # a pause without requests, in which the server encodes passages
QUIET_S = 20.0  # a pause in which background work ends
# The parts of the run that are compared; of ten minutes, the third and the last.
EARLY, LATE = (0.2, 0.3), (0.9, 1.0)
Json = dict[str, Any]
FULL: Json = {"method": "full", "learn_from_prompts": False}
EXACT: Json = {"method": "exact"}
FUSED: Json = {}
METHODS = (FULL, EXACT, FUSED)


@dataclass(frozen=True)
class ServerProcess:
    """`ragblend serve` as a process. keys: the API key of each client."""

    home: Path
    keys: dict[str, str]
    pid: int
    url: str
    port: int

    @cached_property
    def model(self) -> str:
        answer = httpx.get(f"{self.url}/models", headers=self.headers(next(iter(self.keys))), timeout=WAIT_S)
        return str(answer.json()["data"][0]["id"])

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}

    def body(self, text: str, **options: Any) -> Json:
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, **options}


@contextlib.contextmanager
def served(home: Path, model: str, names: Sequence[str]) -> Iterator[ServerProcess]:
    """Run `ragblend serve` over a new home, with a key for each name."""
    with AppServices.open(home, model=model) as services:
        known = Keys(services.workspaces.home.root)
        for name in names:
            services.workspaces.create(name)
        keys = {name: known.add(Client(name, (name,))) for name in names}
    options = ("--home", home, "--model", model, "--device", "cpu", "--dtype", "float32")
    with run_server("serve", *options) as (process, ready):
        yield ServerProcess(home, keys, process.pid, ready["url"], ready["port"])


def timing(home: Path, model: str, requests: int) -> Json:
    """Medians in ms and AUC, for the key without any of the passages, and for the key that has half of them."""
    texts = Notes(random.Random(0))
    times_ms: dict[tuple[str, bool], list[float]] = {}
    with served(home, model, ("ada", "bob")) as server:
        clients = {
            name: httpx.Client(base_url=server.url, headers=server.headers(name), timeout=WAIT_S)
            for name in ("bob", "ada")
        }

        def ask(name: str, passages: Sequence[str]) -> Json:
            body = server.body("\n\n".join([*passages, texts.question()]), max_tokens=1)
            answer = clients[name].post("chat/completions", json=body)
            answer.raise_for_status()
            found: Json = answer.json()["kv"][0]
            return found

        for block in range(1 + requests // BLOCK):
            passages = [texts.passage(SENTENCES) for _ in range(BLOCK)]
            stored = passages[: BLOCK // 2]
            while True:  # a passage is known after two prompts, and encoded when there are no requests
                kv = ask("ada", texts.draw.sample(stored, len(stored)))
                if len(kv["chunks"]) == len(stored) and not kv["missing"]:
                    break
                time.sleep(IDLE_S)
            for name in clients:
                for passage in texts.draw.sample(passages, BLOCK):
                    begun = time.perf_counter()
                    ask(name, [passage])
                    if block:  # the first is for warming up
                        spent = 1e3 * (time.perf_counter() - begun)
                        times_ms.setdefault((name, passage in stored), []).append(spent)
        for client in clients.values():
            client.close()
    return {
        name: {
            "requests": len(times_ms[name, True]) + len(times_ms[name, False]),
            "ms where the first key has it": round(statistics.median(times_ms[name, True]), 1),
            "ms where it has not": round(statistics.median(times_ms[name, False]), 1),
            "auc": round(auc(times_ms[name, False], times_ms[name, True]), 3),
        }
        for name in clients
    }


class Soak:
    """Many keys ask at once, each with texts of its own, and answers are checked."""

    def __init__(self, server: ServerProcess, users: Sequence[str]) -> None:
        self.server, self.users, self.texts = server, users, Notes(random.Random(0))
        self.counts = dict.fromkeys(("whole", "left", "wrong", "failed"), 0)
        shared = [self.texts.passage(SENTENCES) for _ in users]  # each is in two keys' prompts
        self.passages = {name: (shared[at], shared[at - 1]) for at, name in enumerate(users)}
        # Answers by key, whether the passages are swapped, and whether the method is FULL (else EXACT).
        self.expected: dict[tuple[str, bool, bool], str] = {}
        # Reused tokens of each prompt, by key and whether the method is FUSED (else EXACT).
        self.reused: dict[tuple[str, bool], list[int]] = {
            (name, is_fused): [] for name in users for is_fused in (True, False)
        }

    async def run(self, seconds: float) -> tuple[list[Json], list[Json]]:
        """The server's resources in every second after the first minute, and while idle before and after these."""
        process = psutil.Process(self.server.pid)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=WAIT_S, limits=limits) as client:
            while not is_settled(self.server.home):
                await self._ask(client, self.users[0], self.texts.question(), FULL)
                await asyncio.sleep(QUIET_S)
            # The server learns the passages, and tokenizes each one separately from then on.
            for name in self.users:
                for _ in range(REPEATS_TO_LEARN):
                    await self._ask(client, name, self._varied_prompt(name, self.texts.draw))
            await asyncio.sleep(QUIET_S)
            for name, swapped, method in itertools.product(self.users, (False, True), (FULL, EXACT)):
                answer = await self._ask(client, name, self._prompt(name, swapped), method)
                self.expected[name, swapped, method is FULL] = answer
            at_rest, rows = list[Json](), list[Json]()
            for lasts in (WARM_UP_S, seconds):
                rows = await self._run_clients(client, process, lasts)
                await asyncio.sleep(QUIET_S)
                at_rest.append(resources(process))
            return rows, at_rest

    async def _run_clients(
        self, client: httpx.AsyncClient, process: psutil.Process, seconds: float
    ) -> list[Json]:
        end = time.monotonic() + seconds
        tasks = [
            asyncio.ensure_future(self._run_client(client, name, end, number))
            for number, name in enumerate(self.users)
        ]
        tasks.append(asyncio.ensure_future(self._never_read(end)))
        rows = await self._watch(process, end)
        await asyncio.gather(*tasks)
        return rows

    async def _run_client(self, client: httpx.AsyncClient, name: str, end: float, turn: int) -> None:
        """Alternate between the methods, so that at any time about as many streams use each of them."""
        draw = random.Random(f"{name} {end}")
        while time.monotonic() < end:
            turn, is_cancelled, swapped = turn + 1, draw.random() < 1 / CANCEL_ONE_IN, draw.random() < 0.5
            cancel_after = draw.randrange(TOKENS) if is_cancelled else None
            method = METHODS[turn % len(METHODS)]
            text = self._varied_prompt(name, draw) if method is FUSED else self._prompt(name, swapped)
            try:
                answer = await self._ask(client, name, text, method, cancel_after)
                right = self.expected[name, swapped, method is FULL]
                is_right = method is FUSED or (right.startswith(answer) if is_cancelled else answer == right)
                self.counts["left" if is_cancelled else "whole"] += 1
                if not is_right:
                    self.counts["wrong"] += 1
                    print(f"{name}, {method}: {answer!r}, not {right!r}", file=sys.stderr)
            except (httpx.HTTPError, ValueError) as error:
                print(f"{name}: {error!r}", file=sys.stderr)
                self.counts["failed"] += 1

    def _prompt(self, name: str, swapped: bool) -> str:
        """A prompt with RAGBlend's own prefix, so that its passages can be a path of the knowledge tree."""
        passages = SEPARATOR.join(self.passages[name][:: -1 if swapped else 1])
        return (
            f"{PASSAGES_HEADING}{passages}\n\n{name} was seen. Who was seen? Say: {name} was seen, and where."
        )

    def _varied_prompt(self, name: str, draw: random.Random) -> str:
        return f"{self._prompt(name, draw.random() < 0.5)} Note {draw.random()}."

    async def _ask(
        self,
        client: httpx.AsyncClient,
        name: str,
        text: str,
        method: Json = FUSED,
        cancel_after: int | None = None,
    ) -> str:
        """The answer, or its first pieces if it is cancelled. Raises ValueError for a stream without a proper end."""
        messages = [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": text}]
        body = self.server.body(text, messages=messages, max_tokens=TOKENS, stream=True, **method)
        pieces: list[str] = []
        async with client.stream(
            "POST",
            "chat/completions",
            json=body | {"stream_options": {"include_usage": True}},
            headers=self.server.headers(name),
        ) as answer:
            answer.raise_for_status()
            async for value in events(answer):
                if cancel_after is not None and len(pieces) > cancel_after:
                    return "".join(pieces)
                pieces += [choice["delta"].get("content", "") for choice in value["choices"]]
                if "kv" in value and method in (EXACT, FUSED):
                    self.reused[name, method is FUSED].append(value["kv"][0]["reused"])
        return "".join(pieces)

    async def _never_read(self, end: float) -> None:
        """Send a request, and never read the answer."""
        sent = json.dumps(self.server.body("Go on.", stream=True, max_tokens=1024)).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1", f"host: 127.0.0.1:{self.server.port}",
            "content-type: application/json", f"content-length: {len(sent)}",
            *(f"{name}: {value}" for name, value in self.server.headers(self.users[0]).items()),
        ]  # fmt: skip
        while time.monotonic() < end:
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", self.server.port))
                connection.sendall("\r\n".join([*lines, "", ""]).encode() + sent)
                await asyncio.sleep(UNREAD_S)

    async def _watch(self, process: psutil.Process, end: float) -> list[Json]:
        begun, rows = time.monotonic(), list[Json]()
        while time.monotonic() < end:
            rows.append(resources(process) | {"at": time.monotonic() - begun})
            if len(rows) % 60 == 1:
                print(rows[-1], self.counts, file=sys.stderr)
            await asyncio.sleep(1)
        return rows


def is_settled(home: Path) -> bool:
    """Whether the decoding loop is chosen; another one sums in another order, which can change a greedy answer."""
    return any(
        DecodeComparison(kept["divergence"], tuple(kept["ratios"])).is_settled
        for kept in map(read_json, home.rglob("steps-*.json"))
    )


def resources(process: psutil.Process) -> Json:
    """The memory, threads and open files that the process has now."""
    return {
        "rss": process.memory_info().rss,
        "threads": process.num_threads(),
        "files": process.num_fds(),
    }


async def events(answer: httpx.Response) -> AsyncIterator[Json]:
    """Yield a stream's values. Raises ValueError if it does not end with [DONE], or ends with an error."""
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            return
        if line:
            value = json.loads(line.removeprefix("data: "))
            if "error" in value:
                raise ValueError(value["error"]["message"])
            yield value
    raise ValueError("the stream was cut off")


def soak(home: Path, model: str, streams: int, minutes: float) -> Json:
    """Counts of streams, and the process's resources early and late."""
    users = names(random.Random(0), streams)
    with served(home, model, users) as server:
        run = Soak(server, users)
        rows, at_rest = asyncio.run(run.run(60 * minutes))
    return {
        **run.counts,
        "prompts": 2 * len(users),
        "answered differently by full prefill": sum(
            run.expected[name, swapped, True] != run.expected[name, swapped, False]
            for name, swapped in itertools.product(users, (False, True))
        ),
        "different answers": len(set(run.expected.values())),
        "keys that fuse their passages": sum(any(run.reused[name, True]) for name in users),
        "keys that reuse them exactly": sum(any(run.reused[name, False]) for name in users),
        "keys that reused another's": sum(run.reused[name, True][0] > 0 for name in users),
        **{name: change(rows, name) for name in ("rss", "threads", "files")},
        "at rest, before and after": at_rest,
    }


def change(rows: Sequence[Json], name: str) -> Json:
    """Means of an early part of the run and of its last part."""
    whole = rows[-1]["at"]
    early, late = (
        statistics.mean(row[name] for row in rows if begin * whole <= row["at"] <= end * whole)
        for begin, end in (EARLY, LATE)
    )
    return {"early": round(early, 1), "late": round(late, 1), "change": f"{late / early - 1:+.1%}"}


def main(
    what: Annotated[str, typer.Argument(help="timing or soak.")],
    home: Annotated[Path, typer.Option(help="A new RAGBlend home.")],
    model: Model = "default",
    requests: int = 2000,
    streams: int = 50,
    minutes: float = 10,
) -> None:
    """Measure, and print the figures."""
    measurements: dict[str, Callable[[], Json]] = {
        "timing": lambda: timing(home, model, requests),
        "soak": lambda: soak(home, model, streams, minutes),
    }
    if what not in measurements:
        raise typer.BadParameter(f"there are {', '.join(measurements)}")
    print(json.dumps(measurements[what](), indent=1))


if __name__ == "__main__":
    run_script(main, __doc__)
