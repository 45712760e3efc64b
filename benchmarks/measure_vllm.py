"""Compares fused prefill inside vLLM with vLLM without the connector (times) and with the built-in engine (answers).

    python -m benchmarks.measure_vllm speed --home HOME --data musique.json
    python -m benchmarks.measure_vllm agree --home HOME --data musique.json --limit 60
    python -m benchmarks.measure_vllm agree --home HOME --limit 60 --dtype float32    questions about generated figures
    python -m benchmarks.measure_vllm salts --home HOME --limit 1000

Run it in an environment with vLLM (`make test-vllm` makes one). Both servers have the same model, dtype, cores and
options, with prefix caching, and get the same prompts over HTTP alternately; options after `--` go to both. The server
that is not in use is stopped, since an idle server's threads spin. vLLM reserves a core in a server with a connector,
unless VLLM_CPU_NUM_OF_RESERVED_CPU is set, as here. The built-in engine encodes the passages first; `agree` also
compares with its answers.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ANSWER_TOKENS = 32
WITHOUT_SECOND_LOOK = (
    "probe-shift:sure=0"  # without the second look at figures, which vLLM's own endpoint does not take
)
SALTED_SENTENCES = 30  # of a passage, by `salts`
WARM_UP_PROMPTS = 2  # they start threads and kernels, and do not count
SERVER_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# Ends a process group, with its stopped processes, when the script's input is closed: when the measuring process ends.
END_GROUP = """read _; kill -s TERM -- -$1; kill -s CONT -- -$1
for _ in 1 2 3 4 5 6 7 8 9; do sleep 2; kill -s 0 -- -$1 || exit; done; kill -s KILL -- -$1"""


def main() -> int:
    """Run the chosen command, print the results, write the JSON."""
    own, _, passed = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("what", choices=("speed", "agree", "salts"))
    option("--home", type=Path, required=True, help="a RAGBlend home; the model is converted there")
    option("--model", default="default", help="as in `ragblend --model`")
    option("--data", type=Path, help="questions as `ragblend bench quality` reads; `agree` has its own")
    option("--passages", type=int, default=6, help="passages in a prompt")
    option("--tokens", type=int, default=512, help="tokens of a passage; longer ones are cut")
    option("--limit", type=int, default=20, help="how many prompts")
    option(
        "--ratios", type=float, nargs="+", default=[0.15], help="ratios of the method; `agree` uses the first"
    )
    option("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of both engines")
    option("--json", type=Path, help="the JSON file to write")
    options = parser.parse_args(own.split())
    if options.data is None and options.what == "speed":
        parser.error("--data: `speed` needs questions")
    # `agree` times nothing, and spinning threads beside busy ones would make it ten times slower.
    if options.what == "agree":
        os.environ["GOMP_SPINCOUNT"] = SERVER_ENVIRONMENT["GOMP_SPINCOUNT"] = "0"
    if options.what == "speed" and options.limit <= WARM_UP_PROMPTS:
        parser.error(f"--limit: the first {WARM_UP_PROMPTS} prompts warm up; ask for more")
    engine, questions = engine_and_questions(options)
    runs = {"speed": speed, "agree": agree, "salts": salts}
    found = runs[options.what](options, engine, questions, passed.split())
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def engine_and_questions(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The built-in engine, on the GPU if there is one, and the questions."""
    from ragblend import Engine
    from ragblend.measuring.data import load
    from ragblend.measuring.figure_questions import QUESTIONS_A_SET, figure_questions

    engine = Engine.open(options.model, options.home, dtype=options.dtype)
    if options.data is not None:
        return engine, list(load(options.data).questions)[: options.limit]
    made = figure_questions(-(-options.limit // QUESTIONS_A_SET), orders=1)
    return engine, made[: options.limit]


def store_passages(engine: Any, passages: list[tuple[int, ...]]) -> None:
    """Store KV of passages, given as token ids, under node ids of their own, as ingest does."""
    nodes, keys = engine._nodes, engine._nodes.keys_of(passages, engine.runtime.canonical_prefix)
    names = [f"measured-{key.digest[:16]}" for key in keys]
    nodes.enter(names, passages, keys)
    nodes.encode(passages, keys, engine.runtime.canonical_prefix, None, names)


def passage_ids(engine: Any, text: str, tokens: int | None) -> tuple[int, ...]:
    return tuple(engine.runtime.tokenizing.passage_ids(text)[:tokens])


def prompt_of(engine: Any, passages: list[tuple[int, ...]], question: str) -> Any:
    from ragblend import Chunk

    return engine.tokenize(engine.chat_prompt(None, [Chunk(token_ids=ids) for ids in passages], question))


@dataclass(frozen=True)
class VllmServer:
    """A server in a process group that is stopped except while it is in use."""

    url: str
    group: int

    @contextlib.contextmanager
    def awake(self) -> Iterator[str]:
        """Let the server run within the block; yields its address."""
        os.killpg(self.group, signal.SIGCONT)
        try:
            yield self.url
        finally:
            os.killpg(self.group, signal.SIGSTOP)


@contextlib.contextmanager
def run_server(
    options: argparse.Namespace, folder: str, connected: bool, more: list[str]
) -> Iterator[VllmServer]:
    """Run a server for the block; its log is in the home."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    from benchmarks.common import environment_without_openmp

    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--dtype", options.dtype, "--port", str(port)]
    command += ["--served-model-name", "m", "--max-logprobs", "-1"]
    if connected:
        extra = {"home": str(options.home.resolve()), "ratio": options.ratios[0]}
        connector = {
            "kv_connector": "RAGBlendConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        command += ["--kv-transfer-config", json.dumps(connector)]
    log = options.home / f"vllm-{'with' if connected else 'without'}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *more],
            stdout=out,
            stderr=out,
            env=SERVER_ENVIRONMENT | environment_without_openmp(),
            start_new_session=True,
        )
    end = ["sh", "-c", END_GROUP, "sh", str(process.pid)]
    group_killer = subprocess.Popen(
        end, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    server = VllmServer(f"http://127.0.0.1:{port}", process.pid)
    try:
        with server.awake() as url:
            while not _is_up(url):
                if process.poll() is not None:
                    raise SystemExit(f"vLLM ended; see {log}")
                time.sleep(1)
        yield server
    finally:
        group_killer.communicate()
        process.wait()


def _is_up(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False


def open_answer(url: str, ids: tuple[int, ...], **more: Any) -> Any:
    """The response of the server, to be read in a `with` block."""
    body = {"model": "m", "prompt": list(ids), "temperature": 0, "max_tokens": ANSWER_TOKENS} | more
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=600)


def ask(url: str, ids: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """The first choice of the answer."""
    with open_answer(url, ids, **more) as answer:
        found: dict[str, Any] = json.load(answer)["choices"][0]
    return found


def time_answer(server: VllmServer, ids: tuple[int, ...], **more: Any) -> tuple[float, float]:
    """Milliseconds to the first token, and from each token to the next."""
    first, last = 0.0, 0.0
    with server.awake() as url:
        begun = time.perf_counter()
        with open_answer(url, ids, stream=True, ignore_eos=True, **more) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    last = time.perf_counter()
                    first = first or last
    return (first - begun) * 1e3, (last - first) * 1e3 / (ANSWER_TOKENS - 1)


def fused_requests(server: VllmServer) -> float:
    """How many requests the connector has fused so far."""
    with server.awake() as url, urllib.request.urlopen(f"{url}/metrics", timeout=30) as metrics:
        counts = re.findall(r"^vllm:ragblend_requests_total\{.*\} (\S+)$", metrics.read().decode(), re.M)
    return sum(map(float, counts))


def shuffled_prompts(
    options: argparse.Namespace, engine: Any, questions: list[Any]
) -> tuple[str, list[tuple[int, ...]]]:
    """The model's folder, and a prompt for each question with its passages in another order. Closes the engine."""
    chosen = random.Random(0)
    texts = [text for question in questions for text in question.passages]
    long = [ids for text in texts if len(ids := passage_ids(engine, text, options.tokens)) == options.tokens]
    if len(long) < 2 * options.passages:
        raise SystemExit(
            f"{options.data}: {len(long)} passages have {options.tokens} tokens, and {2 * options.passages} are "
            "needed; pass fewer --tokens, fewer --passages, or a higher --limit"
        )
    pool = chosen.sample(long, 2 * options.passages)
    store_passages(engine, pool)
    prompts = [
        prompt_of(engine, chosen.sample(pool, options.passages), question.text).token_ids
        for question in questions
    ]
    folder = str(engine.runtime.folder)
    engine.close()
    return folder, prompts


def speed(options: argparse.Namespace, engine: Any, questions: list[Any], more: list[str]) -> dict[str, Any]:
    """Passages in new orders: each prompt once to the server without the connector, and once per ratio to the other."""
    folder, prompts = shuffled_prompts(options, engine, questions)
    turn, rows = ["without", *map(str, options.ratios)], list[dict[str, tuple[float, float]]]()
    with run_server(options, folder, True, more) as ours, run_server(options, folder, False, more) as theirs:
        for number, ids in enumerate(prompts):
            row = {}
            for name in turn[:: 1 if number % 2 else -1]:
                if name == "without":
                    row[name] = time_answer(theirs, ids)
                    continue
                before = fused_requests(ours)
                row[name] = time_answer(ours, ids, kv_transfer_params={"ratio": float(name)})
                if fused_requests(ours) == before:
                    raise SystemExit(f"a prompt was not fused; {options.home / 'vllm-with.log'} says why")
            rows.append(row)
            print({name: [round(ms) for ms in found] for name, found in row.items()}, file=sys.stderr)
    rows = rows[WARM_UP_PROMPTS:]
    medians = {
        name: {
            "ttft_ms": statistics.median(row[name][0] for row in rows),
            "times_faster": statistics.median(row["without"][0] / row[name][0] for row in rows),
            "token_ms": statistics.median(row[name][1] for row in rows),
            "token_by_without": statistics.median(row[name][1] / row["without"][1] for row in rows),
        }
        for name in turn
    }
    return {"prompts": len(rows), "tokens": len(prompts[0]), "medians": medians}


def agree(options: argparse.Namespace, engine: Any, questions: list[Any], more: list[str]) -> dict[str, Any]:
    """Compare endpoint and built-in engine: first-token distributions, greedy answers, F1 against gold answers.

    Questions about figures have all their passages, uncut, and an instruction. The built-in engine decodes by the
    model's own forward, because its own loop rounds to fewer bits, which vLLM does not.
    """
    from ragblend.engine.decoding.implementations import TransformersDecode
    from ragblend.measuring.quality import question_text

    of_figures = options.data is None
    count, tokens = (None, None) if of_figures else (options.passages, options.tokens)
    built_in, prompts, choice = [], [], engine.runtime.decode_selector
    choice.current, choice.needs_measurement = TransformersDecode(engine.runtime.loaded.model), False
    for question in questions:
        passages = [passage_ids(engine, text, tokens) for text in question.passages[:count]]
        store_passages(engine, passages)
        text = question_text(question) if of_figures else question.text
        prompts.append(prompt_of(engine, passages, text))
        row = {}
        for name, method in {"full": "full", "probe-shift": WITHOUT_SECOND_LOOK}.items():
            prefilled = engine.prefill(prompts[-1], method=method, ratio=options.ratios[0])
            result = engine.decode(prefilled, max_new_tokens=ANSWER_TOKENS)
            row[name] = prefilled.logits.log_softmax(-1).tolist(), result.text
        built_in.append(row)
    folder = str(engine.runtime.folder)
    engine.close()
    by_engine: dict[str, list[Any]] = {
        f"engine {name}": [(dict(enumerate(row[name][0])), row[name][1]) for row in built_in]
        for name in built_in[0]
    }
    found: dict[str, list[Any]] = {"fused": [], "recompute": [], "vllm": []}
    gold = [question.answers for question in questions]
    figures: dict[str, Any] = {}
    parameters = {"fused": None, "recompute": {"method": "recompute"}, "vllm": {"off": True}}
    # Each prompt is sent twice. With prefix caching the second would reuse the fused blocks, and compute the last one,
    # which is not full.
    more = [*more, "--no-enable-prefix-caching"]
    with run_server(options, folder, True, more) as server, server.awake() as url:
        for prompt in prompts:
            for name, params in parameters.items():
                how: dict[str, Any] = {"kv_transfer_params": params} if params else {}
                first_token = {"max_tokens": 1, "logprobs": -1, "return_tokens_as_token_ids": True}
                [first] = ask(url, prompt.token_ids, **first_token, **how)["logprobs"]["top_logprobs"]
                by_id = {int(token.split(":")[1]): value for token, value in first.items()}
                found[name].append((by_id, ask(url, prompt.token_ids, **how)["text"]))
            figures = agreement(found | by_engine, gold, len(found["vllm"]))
            print(figures, file=sys.stderr)
            if options.json:  # written after each question, so that an interrupted run keeps its results
                options.json.write_text(json.dumps(figures, indent=1))
    return figures


def salts(options: argparse.Namespace, engine: Any, questions: list[Any], more: list[str]) -> dict[str, Any]:
    """Whether a request reveals what another client has had encoded, by its time or by the hits in its report.

    Each probe asks about a passage; before, its victim had that passage or, as often, another one encoded. Every tenth
    probe has the victim's salt, to show what there is to see. AUC 0.5: nothing is revealed; 1: always.
    """
    from benchmarks.common import auc
    from benchmarks.filler import Notes

    notes, probes = Notes(random.Random(0)), []
    for number in range(options.limit):
        probed, other = (
            passage_ids(engine, notes.passage(SALTED_SENTENCES), options.tokens) for _ in range(2)
        )
        is_encoded = notes.draw.random() < 0.5
        victims = prompt_of(engine, [probed if is_encoded else other], notes.question())
        prompt = prompt_of(engine, [probed], notes.question())
        probes.append((number % 10 == 0, is_encoded, victims, prompt))
    folder = str(engine.runtime.folder)
    engine.close()
    found = {has_salt: {True: list[Observation](), False: list[Observation]()} for has_salt in (False, True)}
    with run_server(options, folder, True, more) as server, server.awake() as url:
        for number, (has_salt, is_encoded, victims, prompt) in enumerate(probes, 1):
            _observe(url, victims, "victim", encode=True)
            seen = _observe(url, prompt, "victim" if has_salt else "probe", encode=False)
            found[has_salt][is_encoded].append(seen)
            if number % 100 == 0:
                print(f"{number} of {len(probes)}", file=sys.stderr)
    return {
        "with the victim's salt" if has_salt else "with another salt": {
            "probes": sum(map(len, seen.values())),
            "seconds where it is encoded": statistics.median(each.seconds for each in seen[True]),
            "seconds where another is": statistics.median(each.seconds for each in seen[False]),
            "auc by time": auc([e.seconds for e in seen[False]], [e.seconds for e in seen[True]]),
            "auc by hits": auc([e.hits for e in seen[True]], [e.hits for e in seen[False]]),
        }
        for has_salt, seen in found.items()
    }


@dataclass(frozen=True)
class Observation:
    """What a client sees of its request."""

    seconds: float
    hits: int


def _observe(url: str, prompt: Any, salt: str, encode: bool) -> Observation:
    params, begun = {"spans": prompt.places, "encode": encode}, time.perf_counter()
    parameters = {"max_tokens": 2, "cache_salt": salt, "kv_transfer_params": params}
    with open_answer(url, prompt.token_ids, **parameters) as answer:
        report = (json.load(answer).get("kv_transfer_params") or {}).get("ragblend") or {}
    return Observation(time.perf_counter() - begun, report.get("hits", 0))


def agreement(by_engine: dict[str, list[Any]], gold: list[Any], count: int) -> dict[str, Any]:
    """Agreement over the first `count` questions. by_engine: name -> (first token's log-probabilities, answer)."""
    from ragblend.measuring.metrics import f1

    rows = {name: found[:count] for name, found in by_engine.items()}
    pairs = [
        ("vllm", "engine full"),
        ("vllm", "recompute"),
        ("engine probe-shift", "fused"),
        ("vllm", "fused"),
        ("engine full", "engine probe-shift"),
    ]
    compared = {
        f"{name} beside {reference}": compare(rows[reference], rows[name]) for reference, name in pairs
    }
    f1s = {
        name: statistics.mean(
            f1(text, answers) for (_, text), answers in zip(found, gold[:count], strict=True)
        )
        for name, found in rows.items()
    }
    return {"questions": count, "first_token_and_answer": compared, "f1": f1s}


def compare(reference: list[Any], rows: list[Any]) -> dict[str, float]:
    """KL(reference || row) of the first token, top-1 agreement, and whether the greedy answers are equal."""
    kls = [
        sum(math.exp(p) * (p - row[i]) for i, p in one.items() if p > -20 and i in row)
        for (one, _), (row, _) in zip(reference, rows, strict=True)
    ]
    pairs = list(zip(reference, rows, strict=True))
    return {
        "kl_mean": statistics.mean(kls),
        "kl_median": statistics.median(kls),
        "top1": statistics.mean(max(a, key=a.get) == max(b, key=b.get) for (a, _), (b, _) in pairs),
        "same_answer": statistics.mean(a.strip() == b.strip() for (_, a), (_, b) in pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
