"""Compares RAGBlend with other programs on a CPU: same weights, prompts and cores, each in its own environment.

    make bench-peers                                      # all of them
    python -m benchmarks.measure_peers --only llama.cpp,ragblend --rounds 5 --python vllm=/opt/vllm/bin/python

`--rounds` counts the answers of each program, those of earlier runs included; `--model` is `default` or a GGUF file.

After a short prompt to warm up, each program prefills six passages of the samples. Then every program answers once a
round, about the same passages in a new order. Decoding is greedy and ignores end tokens. Each answer's times are saved
in `asked.json` at once and not measured again, so a run can be resumed, and programs can be run one by one.
`peers.json` and `peers.png` are made from it. Another model, processor, thread count or code starts a new folder, with
its own home.

transformers is `generate`; llama.cpp is llama-cpp-python with its prompt cache, which reads the GGUF file itself, while
the others have its conversion to bfloat16; vLLM has prefix caching and its default settings, on all cores. Programs
that are not answering are stopped, because idle threads may spin. *ragblend-unguessed* decodes one token at a time: a
small model without an end token repeats itself, which favours speculative decoding more than real answers do.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ANSWER_TOKENS, PASSAGES, PASSAGE_TOKENS = 100, 6, 512
MAX_ROUNDS = 20  # a plan has at least so many, so that a longer run begins with the prompts of a shorter one
QUESTION = "Tell in detail what these passages say."
OURS = "ragblend"
PYTHONS = {
    OURS: sys.executable,
    "ragblend-unguessed": sys.executable,
    "transformers": sys.executable,
    "llama.cpp": ".venv-llamacpp/bin/python",
    "vllm": ".venv-vllm/bin/python",
}
Row = dict[str, Any]
Ask = Callable[[Row, int], list[float]]  # a prompt, and how many tokens: the seconds after which each came


def ragblend(plan: Row) -> tuple[Ask, Row]:
    """Encode the passages, and choose the decoding loop before anything is timed."""
    from ragblend import Chunk, Engine

    engine = Engine.open(plan["model"], plan["home"], device="cpu", dtype="bfloat16", collection="peers")
    assert engine.gate.passed, engine.gate.reason
    engine.runtime.end_ids = []
    names = [f"peers-{number}" for number in range(PASSAGES)]
    engine.forget(names)
    begun = time.perf_counter()
    tokens = engine.encode(plan["texts"], names).tokens
    ingest = tokens / (time.perf_counter() - begun)

    def ask(prompt: Row, count: int) -> list[float]:
        passages = [Chunk(plan["texts"][number]) for number in prompt["order"]]
        begun = time.perf_counter()
        answer = engine.generate(engine.chat_prompt(None, passages, QUESTION), max_new_tokens=count)
        ended, timings = time.perf_counter() - begun, answer.report.timings
        assert answer.prompt.token_ids == tuple(prompt["ids"]) and len(answer.token_ids) == count
        decoding = (count - 1) / timings.tokens_per_s if count > 1 else 0.0
        return [ended - decoding, ended]

    ask(plan["prompts"][0], 16)
    engine.finish_background()
    steps = engine.runtime.decode_selector.current
    if plan["name"] != OURS:
        type(steps).guessed_tokens = 0
    disk = sum(size_of(Path(plan["home"], part)) for part in ("models", "kv"))
    return ask, {"ingest_tokens": ingest, "disk": disk}


def transformers(plan: Row) -> tuple[Ask, Row]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(plan["folder"], dtype=torch.bfloat16)
    model.generation_config.pad_token_id = 0

    times: list[float] = []
    clock: Any = SimpleNamespace(put=lambda ids: times.append(time.perf_counter()), end=lambda: None)

    def ask(prompt: Row, count: int) -> list[float]:
        times.clear()
        ids, begun = torch.tensor([prompt["ids"]]), time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            streamer=clock,
        )
        return [came - begun for came in times[1:]]  # the first is the prompt

    return ask, {"disk": size_of(Path(plan["folder"]))}


def llama_cpp(plan: Row) -> tuple[Ask, Row]:
    from llama_cpp import Llama, LlamaRAMCache

    threads = len(os.sched_getaffinity(0))
    model = Llama(
        plan["gguf"],
        n_ctx=plan["window"],
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
    )
    model.set_cache(LlamaRAMCache(1 << 30))
    no_end = {str(model.token_eos()): -1e9}

    def ask(prompt: Row, count: int) -> list[float]:
        begun = time.perf_counter()
        answer = model.create_completion(
            prompt["ids"], max_tokens=count, temperature=0, stream=True, logit_bias=no_end
        )
        return [time.perf_counter() - begun for _ in answer][:count]

    return ask, {"disk": size_of(Path(plan["gguf"]))}


def vllm(plan: Row) -> tuple[Ask, Row]:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    model = LLM(
        plan["folder"],
        dtype="bfloat16",
        enable_prefix_caching=True,
        max_model_len=plan["window"],
    )
    engine, asked = model.llm_engine, 0

    def ask(prompt: Row, count: int) -> list[float]:
        nonlocal asked
        asked += 1
        wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        begun, times = time.perf_counter(), list[float]()
        engine.add_request(str(asked), {"prompt_token_ids": prompt["ids"]}, wanted)
        while engine.has_unfinished_requests():
            if engine.step():
                times.append(time.perf_counter() - begun)
        return times

    return ask, {"disk": size_of(Path(plan["folder"]))}


STARTERS = {name: ragblend if name.startswith(OURS) else transformers for name in PYTHONS}
STARTERS |= {"llama.cpp": llama_cpp, "vllm": vllm}


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(each.stat().st_size for each in [path, *path.rglob("*")] if each.is_file())


def peak_bytes() -> int:
    """The peak memory of this process and its children."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        total += int(process.joinpath("status").read_text().partition("VmHWM:")[2].split()[0]) << 10
        for children in process.glob("task/*/children"):
            waiting += map(int, children.read_text().split())
    return total


def answer_prompts(name: str, plan_file: str) -> None:
    """Run in the program's own environment: reads a prompt's number per line, prints its times per line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' prints go to stderr
    plan = json.loads(Path(plan_file).read_text()) | {"name": name}
    ask, about = STARTERS[name](plan)
    if not name.startswith(OURS):  # ours has warmed up already
        ask({"ids": plan["warm"]}, 2)
    first = ask(plan["prompts"][0], 2)
    about.setdefault("ingest_tokens", len(plan["prompts"][0]["ids"]) / first[0])
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        times = ask(plan["prompts"][int(line)], ANSWER_TOKENS)
        found = {"ttft_ms": times[0] * 1e3, "last_ms": times[-1] * 1e3, "peak": peak_bytes()}
        print(json.dumps(about | found), file=out, flush=True)


@contextlib.contextmanager
def start_program(name: str, python: str, plan_file: Path) -> Any:
    """Start a process of that program, which prefills the passages before the first answer."""
    log = (plan_file.parent / f"{name}.log").open("wb")
    command = [python, __file__, "--work", name, str(plan_file)]
    if name.startswith(OURS):
        command[1:2] = ["-m", "benchmarks.measure_peers"]
    from benchmarks.common import environment_without_openmp
    from ragblend.engine.openmp import SPIN_COUNT

    # The setting that RAGBlend would choose on an idle machine; while it answers, no other program runs.
    own = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPIN_COUNT} if name.startswith(OURS) else {}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment_without_openmp(**own),
        process_group=0,  # in this session, at whose end the kernel ends stopped processes
    )

    def read() -> str:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise SystemExit(f"{name} ended; see {log.name}")
        os.killpg(process.pid, signal.SIGSTOP)
        return line

    def ask(number: int) -> Row:
        assert process.stdin is not None
        os.killpg(process.pid, signal.SIGCONT)
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        found: Row = json.loads(read())
        return found

    with log, process:
        try:
            read()  # wait until it is ready: only one program computes at a time
            yield ask
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def make_plan(home: Path, model: str, rounds: int) -> tuple[Row, Row]:
    """The plan (six passages of the samples, a warm-up prompt and a prompt per round), and the machine's description.

    The converted model stays in the home.
    """
    from ragblend import Chunk, Engine
    from ragblend.app.quality.sources import sample_text
    from ragblend.engine.model.checkpoints import find_model
    from ragblend.measuring.prefilling import environment

    engine = Engine.open(model, home, device="cpu", dtype="bfloat16", collection="peers")
    ids = engine.runtime.tokenizing.passage_ids(sample_text())
    cuts = [ids[number * PASSAGE_TOKENS :][:PASSAGE_TOKENS] for number in range(PASSAGES)]
    assert len(ids) >= PASSAGES * PASSAGE_TOKENS + 64, "the samples are too short"
    texts = [engine.tokenizer.decode(cut) for cut in cuts]
    draw, orders = random.Random(0), [list(range(PASSAGES))]
    while len(orders) <= rounds:
        order = draw.sample(orders[0], PASSAGES)
        orders += [order] if order not in orders else []
    prompts = []
    for order in orders:
        prompt = engine.chat_prompt(None, [Chunk(texts[number]) for number in order], QUESTION)
        prompts.append({"order": order, "ids": list(engine.tokenize(prompt).token_ids)})
    assert engine.gate.passed
    plan: Row = {
        "model": model,
        "home": str(home),
        "folder": str(engine.runtime.folder),
        "gguf": str(find_model(model)),
        "texts": texts,
        "prompts": prompts,
        "warm": ids[PASSAGES * PASSAGE_TOKENS :][:64],
        "window": max(len(prompt["ids"]) for prompt in prompts) + ANSWER_TOKENS + 16,
    }
    machine = environment(engine)
    engine.close()
    return plan, machine


def folder_of(model: str, pythons: Mapping[str, str], output: Path) -> Path:
    """The folder for results, named by all that they depend on. Raises UsageError for an unknown model."""
    from ragblend.engine.model.checkpoints import find_model
    from ragblend.measuring.prefilling import settings_digest

    file = find_model(model)
    settings = {
        "model": [str(file), file.stat().st_size, file.stat().st_mtime_ns],
        "pythons": dict(pythons),
        "measured": Path(__file__).read_text(),
    }
    return output / f"peers-{settings_digest(settings)}"


def report(asked: dict[str, list[Row]], machine: Row, output: Path) -> list[Row]:
    """Write the medians by program as JSON and as a picture."""
    rows = [_summary(name, asked[name]) for name in PYTHONS if asked.get(name)]
    settings = {"passages": PASSAGES, "passage_tokens": PASSAGE_TOKENS, "answer_tokens": ANSWER_TOKENS}
    everything = {"environment": machine, "settings": settings, "rows": rows}
    (output / "peers.json").write_text(json.dumps(everything, indent=1) + "\n")
    _draw(rows, output / "peers.png")
    return rows


def _summary(name: str, answers: list[Row]) -> Row:
    medians = {
        key: statistics.median(row[key] for row in answers) for key in ("ttft_ms", "last_ms", "ingest_tokens")
    }
    token_ms = statistics.median((row["last_ms"] - row["ttft_ms"]) / (ANSWER_TOKENS - 1) for row in answers)
    return {
        "case": name,
        "answers": len(answers),
        **medians,
        "tokens_per_s": 1e3 / token_ms,
        "peak_mb": max(row["peak"] for row in answers) / 1e6,
        "disk_mb": answers[0]["disk"] / 1e6,
    }


def _draw(rows: list[Row], path: Path) -> None:
    from ragblend.measuring.plots import new_figure

    figure = new_figure(8.0, 0.5 * len(rows) + 1.2)
    axes, names = figure.subplots(), [row["case"] for row in rows]
    first = [row["ttft_ms"] / 1e3 for row in rows]
    others = [(row["last_ms"] - row["ttft_ms"]) / 1e3 for row in rows]
    axes.barh(names, first, color="#1f77b4", label="to the first token")
    axes.barh(names, others, left=first, color="#c7c7c7", label=f"to token {ANSWER_TOKENS}")
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main(
    model: str = "default",
    only: str = ",".join(PYTHONS),
    rounds: int = 5,
    output: Path = Path("bench-results"),
    python: list[str] | None = None,
) -> None:
    """Let all programs alternately answer the rounds that they have not answered yet, and report."""
    pythons = PYTHONS | dict(each.split("=", 1) for each in python or ())
    names = only.split(",")
    if unknown := set(names) - PYTHONS.keys():
        raise SystemExit(f"--only: {', '.join(sorted(unknown))} is unknown; there are {', '.join(PYTHONS)}")
    folder = folder_of(model, pythons, output)
    folder.mkdir(parents=True, exist_ok=True)
    plan, machine = make_plan(folder / "home", model, max(MAX_ROUNDS, rounds))
    plan_file, asked_file = folder / "plan.json", folder / "asked.json"
    plan_file.write_text(json.dumps(plan))
    asked: dict[str, list[Row]] = json.loads(asked_file.read_text()) if asked_file.exists() else {}
    for name in [each for each in names if not Path(pythons[each]).exists()]:
        print(f"{name} is left out: there is no {pythons[name]}", file=sys.stderr)
        names.remove(name)
    wanted = [name for name in names if len(asked.get(name, ())) < rounds]
    with contextlib.ExitStack() as stack:
        asks = {name: stack.enter_context(start_program(name, pythons[name], plan_file)) for name in wanted}
        for number in range(rounds):
            for name in wanted:
                if len(asked.setdefault(name, [])) == number:
                    asked[name].append(asks[name](number + 1))
                    asked_file.write_text(json.dumps(asked, indent=1))
                    print(
                        number,
                        name,
                        {key: round(asked[name][-1][key]) for key in ("ttft_ms", "last_ms")},
                        flush=True,
                    )
    rows = report(asked, machine, output)
    for row in rows:
        print({key: value if isinstance(value, str) else round(value, 1) for key, value in row.items()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        answer_prompts(*sys.argv[2:4])
    else:
        from benchmarks.common import run

        run(main, __doc__)
