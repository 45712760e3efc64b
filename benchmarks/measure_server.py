"""Measures the server's timing side channel, and its stability under load: figures of docs/server.md.

    python -m benchmarks.measure_server timing --home /tmp/server
    python -m benchmarks.measure_server soak --home /tmp/server

timing: one key has stored half of the passages; another asks about all of them, then the first one does. How well does
the time of an answer reveal which half it is about? AUC 0.5: not at all; 1 or 0: always. The second key must learn
nothing.
soak: streams of many keys at once, a third of them cancelled, beside a client that never reads: prompts by full
prefill, along exact paths, and fused, alternately. Answers of the first two are compared with those that the same keys
had alone; each passage is in two keys' prompts, and a key's first one must reuse nothing; memory, threads and open
files late in the run are compared with those early in it, and idle ones after it with idle ones after the first minute.
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

from benchmarks.common import Model, auc, read_json, serving
from benchmarks.common import run as run_script
from benchmarks.filler import Notes, names
from ragblend.app.serve.keys import Client, Keys
from ragblend.app.services import AppServices
from ragblend.engine.decoding.implementations import DecodeComparison
from ragblend.engine.prompts.tokenizing import OPENING, SEPARATOR, SYSTEM

WAIT_S = 600.0
BLOCK, SENTENCES = 8, 6  # passages that are asked about together, half of them stored; sentences of one
TOKENS = 24  # of a stream's answer
MET = 3  # so often a prompt with a passage is sent, so that the passage is known
LEFT = 3  # of so many streams one is left
WARM_S = 60.0  # of all streams, before what is at rest is looked at for the first time
UNREAD_S = 90.0
IDLE_S = 0.3  # in which passages are encoded: not while somebody asks
SETTLED_S = 20.0
EARLY, LATE = (0.2, 0.3), (0.9, 1.0)  # of the run, compared: minute three and the last of ten
Json = dict[str, Any]
FULL: Json = {"method": "full", "learn_from_prompts": False}
EXACT: Json = {"method": "exact"}
FUSED: Json = {}
WAYS = (FULL, EXACT, FUSED)


@dataclass(frozen=True)
class ServerProcess:
    """`ragblend serve` as a process. keys: of each client."""

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
        said = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": said, **options}


@contextlib.contextmanager
def served(home: Path, model: str, names: Sequence[str]) -> Iterator[ServerProcess]:
    """Run `ragblend serve` over a new home, with a key for each name."""
    with AppServices.open(home, model=model) as services:
        known = Keys(services.workspaces.home.root)
        for name in names:
            services.workspaces.create(name)
        keys = {name: known.add(Client(name, (name,))) for name in names}
    options = ("--home", home, "--model", model, "--device", "cpu", "--dtype", "float32")
    with serving("serve", *options) as (process, ready):
        yield ServerProcess(home, keys, process.pid, ready["url"], ready["port"])


def timing(home: Path, model: str, requests: int) -> Json:
    """Medians in ms and AUC, for the key without any of the passages, and for the key that has half of them."""
    texts = Notes(random.Random(0))
    took: dict[tuple[str, bool], list[float]] = {}
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
            while True:  # met twice, known; then encoded when nobody asks
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
                        took.setdefault((name, passage in stored), []).append(spent)
        for client in clients.values():
            client.close()
    return {
        name: {
            "requests": len(took[name, True]) + len(took[name, False]),
            "ms where the first key has it": round(statistics.median(took[name, True]), 1),
            "ms where it has not": round(statistics.median(took[name, False]), 1),
            "auc": round(auc(took[name, False], took[name, True]), 3),
        }
        for name in clients
    }


class Soak:
    """Many keys ask at once, each with texts of its own, and answers are checked."""

    def __init__(self, server: ServerProcess, users: Sequence[str]) -> None:
        self.server, self.users, self.texts = server, users, Notes(random.Random(0))
        self.counts = dict.fromkeys(("whole", "left", "wrong", "failed"), 0)
        shared = [self.texts.passage(SENTENCES) for _ in users]  # each stands in two keys' prompts
        self.passages = {name: (shared[at], shared[at - 1]) for at, name in enumerate(users)}
        self.said: dict[
            tuple[str, bool, bool], str
        ] = {}  # by key, whether the second passage is first, and is FULL
        # Tokens of each prompt; of the fused ones (True), and of those along exact paths
        self.reused: dict[tuple[str, bool], list[int]] = {
            (name, way): [] for name in users for way in (True, False)
        }

    async def run(self, seconds: float) -> tuple[list[Json], list[Json]]:
        """Samples of the server process every second after the first minute; and idle ones before and after."""
        process = psutil.Process(self.server.pid)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=WAIT_S, limits=limits) as client:
            while not is_settled(self.server.home):
                await self._asked(client, self.users[0], self.texts.question(), FULL)
                await asyncio.sleep(SETTLED_S)
            for name in self.users:  # its passages are learnt: each is tokens of its own from then on
                for _ in range(MET):
                    await self._asked(client, name, self._noted(name, self.texts.draw))
            await asyncio.sleep(SETTLED_S)
            for name, swapped, way in itertools.product(self.users, (False, True), (FULL, EXACT)):
                said = await self._asked(client, name, self._prompt(name, swapped), way)
                self.said[name, swapped, way is FULL] = said
            at_rest, rows = list[Json](), list[Json]()
            for lasts in (WARM_S, seconds):
                rows = await self._all_talk(client, process, lasts)
                await asyncio.sleep(SETTLED_S)
                at_rest.append(taken(process))
            return rows, at_rest

    async def _all_talk(
        self, client: httpx.AsyncClient, process: psutil.Process, seconds: float
    ) -> list[Json]:
        end = time.monotonic() + seconds
        tasks = [
            asyncio.ensure_future(self._talk(client, name, end, number))
            for number, name in enumerate(self.users)
        ]
        tasks.append(asyncio.ensure_future(self._never_read(end)))
        rows = await self._watch(process, end)
        await asyncio.gather(*tasks)
        return rows

    async def _talk(self, client: httpx.AsyncClient, name: str, end: float, turn: int) -> None:
        """Alternate between the kinds of prompt, so that at any time there are as many of each."""
        draw = random.Random(f"{name} {end}")
        while time.monotonic() < end:
            turn, is_left, swapped = turn + 1, draw.random() < 1 / LEFT, draw.random() < 0.5
            left_after, way = draw.randrange(TOKENS) if is_left else None, WAYS[turn % len(WAYS)]
            text = self._noted(name, draw) if way is FUSED else self._prompt(name, swapped)
            try:
                said = await self._asked(client, name, text, way, left_after)
                right = self.said[name, swapped, way is FULL]
                is_right = way is FUSED or (right.startswith(said) if is_left else said == right)
                self.counts["left" if is_left else "whole"] += 1
                if not is_right:
                    self.counts["wrong"] += 1
                    print(f"{name}, {way}: {said!r}, not {right!r}", file=sys.stderr)
            except (httpx.HTTPError, ValueError) as error:
                print(f"{name}: {error!r}", file=sys.stderr)
                self.counts["failed"] += 1

    def _prompt(self, name: str, swapped: bool) -> str:
        """A prompt with RAGBlend's own prefix, after which there are paths."""
        passages = SEPARATOR.join(self.passages[name][:: -1 if swapped else 1])
        return f"{OPENING}{passages}\n\n{name} was seen. Who was seen? Say: {name} was seen, and where."

    def _noted(self, name: str, draw: random.Random) -> str:
        return f"{self._prompt(name, draw.random() < 0.5)} Note {draw.random()}."

    async def _asked(
        self,
        client: httpx.AsyncClient,
        name: str,
        text: str,
        way: Json = FUSED,
        left_after: int | None = None,
    ) -> str:
        """The answer, whole or its first pieces. Raises ValueError for a stream without a proper end."""
        said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        body = self.server.body(text, messages=said, max_tokens=TOKENS, stream=True, **way)
        pieces: list[str] = []
        async with client.stream(
            "POST",
            "chat/completions",
            json=body | {"stream_options": {"include_usage": True}},
            headers=self.server.headers(name),
        ) as answer:
            answer.raise_for_status()
            async for value in events(answer):
                if left_after is not None and len(pieces) > left_after:
                    return "".join(pieces)
                pieces += [choice["delta"].get("content", "") for choice in value["choices"]]
                if "kv" in value and way in (EXACT, FUSED):
                    self.reused[name, way is FUSED].append(value["kv"][0]["reused"])
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
            rows.append(taken(process) | {"at": time.monotonic() - begun})
            if len(rows) % 60 == 1:
                print(rows[-1], self.counts, file=sys.stderr)
            await asyncio.sleep(1)
        return rows


def is_settled(home: Path) -> bool:
    """Whether the decoding loop is chosen: another order of sums can give another greedy answer."""
    return any(
        DecodeComparison(kept["divergence"], tuple(kept["ratios"])).is_settled
        for kept in map(read_json, home.rglob("steps-*.json"))
    )


def taken(process: psutil.Process) -> Json:
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
            run.said[name, swapped, True] != run.said[name, swapped, False]
            for name, swapped in itertools.product(users, (False, True))
        ),
        "different answers": len(set(run.said.values())),
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
    home: Annotated[Path, typer.Option(help="A RAGBlend home that is not there yet.")],
    model: Model = "default",
    requests: int = 2000,
    streams: int = 50,
    minutes: float = 10,
) -> None:
    """Measure, and print the figures."""
    found: dict[str, Callable[[], Json]] = {
        "timing": lambda: timing(home, model, requests),
        "soak": lambda: soak(home, model, streams, minutes),
    }
    if what not in found:
        raise typer.BadParameter(f"there are {', '.join(found)}")
    print(json.dumps(found[what](), indent=1))


if __name__ == "__main__":
    run_script(main, __doc__)
