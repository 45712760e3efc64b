"""Compares each phase of a prefill with the machine's limits, and measures how times grow with the prompt's length.

    python -m benchmarks.measure_speed                     some minutes on two cores: `make bench-speed`
    python -m benchmarks.measure_speed --long 8,16,32      thousands of tokens, a random model of the same shapes
    python -m benchmarks.measure_speed --render            the documents again, from recorded figures

A phase's bound is the least time it needs: its products at the fastest rate measured here for any shape of a prefill,
or its bytes at the rate of reading memory, whichever takes longer. Writes `speed.json` beside this file, the tables of
docs/performance.md and a picture of the profile.
"""

import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from benchmarks.common import (
    DATA,
    DOCS,
    AnyHome,
    Row,
    clock_and_cpu_s,
    make_texts,
    markdown_table,
    medians,
    parse_counts,
    read_json,
    replace_marked,
    run,
    run_alternately,
)
from ragblend import Engine
from ragblend.engine.correction import Correction
from ragblend.engine.model import attention
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.results import Prefilled
from ragblend.engine.selection import shift
from ragblend.engine.trace import Recorder
from ragblend.measuring.plots import new_figure
from ragblend.measuring.prefilling import cpu_name
from ragblend.measuring.ttft import encoded_prompt

RECORDED, PAGE, PICTURE = DATA / "speed.json", DOCS / "performance.md", DOCS / "pictures" / "speed.svg"
CHUNKS, TOKENS, RATIO, REPEATS = 6, 512, 0.15, 5
LONG_LAYERS = 4  # of the random model; the cost of every layer grows alike with the prompt's length
METHODS: dict[str, Row] = {"full": {}, "reuse": {}, "probe-shift": {"ratio": RATIO}}


def median_s(once: Callable[[], object], repeats: int = 9) -> float:
    once()
    return statistics.median(clock_and_cpu_s(once)[0] for _ in range(repeats))


class HardwareSpeed:
    """Measured limits. bytes_per_s: reading memory; peak: FLOP/s in the model's dtype; float32: the shift's system."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        config, dtype = engine.runtime.model_config, engine.runtime.decoder.geometry.torch_dtype
        memory = torch.ones(64_000_000)
        self.bytes_per_s = memory.nbytes / median_s(memory.sum)
        group, size = config.num_attention_heads // config.num_key_value_heads, config.hidden_size
        tile = group * attention.TILE_ROWS
        head = size // config.num_attention_heads
        chosen = int(RATIO * tokens)
        shapes = (
            (tokens, size, config.intermediate_size),  # weights, all rows
            (chosen, size, config.intermediate_size),  # weights, chosen rows
            (tile, head, 2048),  # queries by keys
            (tile, 2048, head),  # scores by values
            (TOKENS, 2 * config.num_key_value_heads * head, chosen),  # the shift
        )
        self.peak = max(_rate(shape, dtype) for shape in shapes)
        self.float32 = _rate((chosen, chosen, chosen), torch.float32)

    def bound_ms(self, flop: float = 0.0, nbytes: float = 0.0, float32: float = 0.0) -> float:
        return 1e3 * max(flop / self.peak + float32 / self.float32, nbytes / self.bytes_per_s)


def _rate(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    rows, inner, columns = shape
    a, b = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    return 2 * rows * inner * columns / median_s(lambda: a @ b)


class Phases:
    """Seconds of the computing thread by phase; a nested phase's seconds count for that phase only."""

    def __init__(self) -> None:
        self.seconds, self._open, self._since = defaultdict[str, float](float), list[str](), 0.0

    def begin(self, name: str) -> None:
        self._add_elapsed()
        self._open.append(f"probe: {name}" if "probe" in self._open and name != "move" else name)

    def end(self) -> None:
        self._add_elapsed()
        self._open.pop()

    def _add_elapsed(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed


@contextlib.contextmanager
def record_phases(engine: Engine) -> Iterator[Phases]:
    """Record the phases of prefills within the block."""
    from transformers import AttentionInterface

    phases, hooks, part = Phases(), [], Recorder.part
    owner = threading.get_ident()

    @contextlib.contextmanager
    def recorded(self: Recorder, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        mine = threading.get_ident() == owner
        with part(self, name, *args, **kwargs), phases.part(name) if mine else contextlib.nullcontext():
            yield

    for layer in engine.runtime.decoder.layers:
        linears = {
            f"self_attn.{name}": each
            for name, each in layer.self_attn.named_children()
            if hasattr(each, "weight")
        }
        for name, module in {**linears, "mlp": layer.mlp}.items():
            phase = "MLP" if name == "mlp" else "projections"
            hooks.append(module.register_forward_pre_hook(lambda *_, phase=phase: phases.begin(phase)))
            hooks.append(module.register_forward_hook(lambda *_: phases.end()))
    AttentionInterface.register(attention.OWN_ATTENTION, phases.around(attention.rows_attention, "attention"))
    try:
        with (
            mock.patch.object(Recorder, "part", recorded),
            mock.patch.object(Correction, "apply", phases.around(Correction.apply, "shift")),
        ):
            yield phases
    finally:
        attention.register()
        for hook in hooks:
            hook.remove()


def phases_ms(engine: Engine, prompt: Prompt, repeats: int, **how: Any) -> tuple[Row, Prefilled]:
    """Median ms by phase of a warmed-up prefill, with `all` and with the `rest` that is in no phase."""
    engine.prefill(prompt, **how)
    rounds = []
    for _ in range(repeats):
        with record_phases(engine) as phases:
            begun = time.perf_counter()
            prefilled = engine.prefill(prompt, **how)
            took = time.perf_counter() - begun
        found = dict(phases.seconds)
        rounds.append({**found, "all": took, "rest": took - sum(found.values())})
    names = dict.fromkeys(name for each in rounds for name in each)
    return {
        name: 1e3 * statistics.median(each.get(name, 0.0) for each in rounds) for name in names
    }, prefilled


def whole_ms(engine: Engine, prompt: Prompt, repeats: int, warm: int = 0) -> dict[str, float]:
    """Medians of whole prefills, run alternately. No phases are recorded, since each call of that costs time."""
    ways = {
        m: partial(clock_and_cpu_s, partial(engine.prefill, prompt, method=m, **how))
        for m, how in METHODS.items()
    }
    return {method: 1e3 * medians(found)[0] for method, found in run_alternately(ways, repeats, warm).items()}


def bounds_ms(engine: Engine, machine: HardwareSpeed, prefilled: Prefilled) -> Row:
    """The least time of each phase of that prefill."""
    decoder, report = engine.runtime.decoder, prefilled.report
    geometry, config, layer = decoder.geometry, engine.runtime.model_config, decoder.layers[0]
    linears = {
        name: sum(p.numel() for p in getattr(layer, name).parameters()) for name in ("self_attn", "mlp")
    }
    layers, tokens, stored = (
        geometry.layers,
        report.tokens.prompt,
        report.tokens.reused + report.tokens.recomputed,
    )
    scores = 4 * config.num_attention_heads * geometry.key_size * layers

    def layer_bounds(rows: list[int], prefix: str) -> Row:
        found = {}
        for phase, name in (("projections", "self_attn"), ("MLP", "mlp")):
            count = linears[name] * layers
            found[prefix + phase] = machine.bound_ms(
                2 * len(rows) * count, count * geometry.torch_dtype.itemsize
            )
        read = tokens * geometry.token_bytes
        return found | {prefix + "attention": machine.bound_ms(scores * sum(row + 1 for row in rows), read)}

    rows = [row for row, letter in enumerate(report.served) if letter != "r"]
    found = layer_bounds(rows, "")
    head = engine.runtime.loaded.model.lm_head.weight.nbytes
    found["head"] = machine.bound_ms(nbytes=head)
    if stored and report.hits:
        nbytes = stored * geometry.token_bytes
        found |= {"load": machine.bound_ms(nbytes=2 * nbytes), "move": machine.bound_ms(nbytes=nbytes)}
    if report.probe_rows:
        fresh = [row for row, letter in enumerate(report.served) if letter == "f"]
        found |= layer_bounds(fresh[-report.probe_rows :], "probe: ")
        chosen, width = (
            report.tokens.recomputed,
            geometry.kv_heads * (geometry.key_size + geometry.value_size),
        )
        moved = sum(span[1] - span[0] for span in prefilled.prompt.places[1:])
        fitted = min(chosen, shift.MAX_FITTED_ROWS)
        # Every layer predicts the changes. Similarities, which take as much, and the system are shared by layers.
        predict_flop = 2 * (moved + fitted) * fitted * width
        systems = layers / shift.SHARED_LAYERS
        found["shift"] = machine.bound_ms((layers + systems) * predict_flop, float32=systems * 2 * fitted**3)
    return found


def machine_name(engine: Engine) -> str:
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {engine.dtype}"


def measure_phases(engine: Engine) -> Row:
    """The machine, the phases of three methods, and whole times."""
    with encoded_prompt(engine, make_texts(engine, CHUNKS, TOKENS)) as subject:
        prompt = subject.prompt
        machine = HardwareSpeed(engine, len(prompt.token_ids))
        methods = []
        for method, how in METHODS.items():
            found, prefilled = phases_ms(engine, prompt, REPEATS, method=method, **how)
            bounds = bounds_ms(engine, machine, prefilled)
            rows = [{"phase": name, "ms": ms, "bound_ms": bounds.get(name)} for name, ms in found.items()]
            methods.append({"method": method, "phases": rows})
        return {
            "machine": machine_name(engine),
            "model": engine.model_name,
            "tokens": len(prompt.token_ids),
            "methods": methods,
            "whole_ms": whole_ms(engine, prompt, 2 * REPEATS + 1),
        }


def time_by_length(engine: Engine, thousands: list[int]) -> list[Row]:
    """Milliseconds of whole prefills by prompt length; the engine's window must fit the longest."""
    rows = []
    for length in thousands:
        with encoded_prompt(engine, make_texts(engine, 1000 * length // TOKENS - 1, TOKENS)) as subject:
            rows.append(
                {"tokens": len(subject.prompt.token_ids), **whole_ms(engine, subject.prompt, 1, warm=1)}
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


@contextlib.contextmanager
def random_model(longest: int, home: Path | None) -> Iterator[Engine]:
    """The default model's shapes in LONG_LAYERS layers of random weights, its window stretched by YaRN."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = Engine.open(home=home)
    source.gate  # noqa: B018 - converts the model, so that its folder exists
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(**source.runtime.model_config.to_dict())
        config.num_hidden_layers, window = LONG_LAYERS, config.max_position_embeddings
        config.max_position_embeddings = longest
        factor = longest / window
        config.rope_parameters = config.rope_parameters | {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": window
        }  # fmt: skip
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        source.tokenizer.model_max_length = longest
        source.tokenizer.save_pretrained(folder)
        yield Engine.open(folder, home=Path(folder) / "home")


def render_tables(recorded: Row) -> str:
    """The generated part of docs/performance.md."""
    now, parts = recorded["phases"], list[str]()
    parts.append(
        f"{now['model']}, {CHUNKS} passages of {TOKENS} tokens, {now['tokens']:,} tokens in all, on {now['machine']}."
    )
    times = now["whole_ms"]
    took, least = times["probe-shift"], times["reuse"] + RATIO * times["full"]
    listed = ", ".join(f"`{method}` {ms:,.0f}" for method, ms in times.items())
    parts.append(
        f"Medians of {2 * REPEATS + 1}: {listed} ms. The least possible would be `reuse`'s time plus {RATIO:.0%} of "
        f"`full`'s; `probe-shift` at {RATIO:.0%} takes {took / least:.2f} times that."
    )
    if grown := recorded.get("long"):
        names = ["tokens", *METHODS]
        parts += [
            f"Longer prompts, in ms: a random model with {LONG_LAYERS} layers of these shapes on {grown['machine']}.",
            markdown_table(
                names, [[f"{row[name]:,.0f}" for name in names] for row in grown["rows"]]
            ).rstrip(),
        ]
    return "\n\n".join(parts) + "\n"


def draw_picture(recorded: Row) -> None:
    """Plot bars of each method's phases beside their bounds."""
    methods = recorded["phases"]["methods"]
    figure = new_figure(9, 3.2)
    axes, names = figure.subplots(), list[str]()
    for place, each in enumerate(methods):
        left = 0.0
        for row in sorted(each["phases"], key=lambda row: -row["ms"]):
            if row["phase"] == "all" or row["ms"] < 0.5:
                continue
            names += [] if row["phase"] in names else [row["phase"]]
            color = f"C{names.index(row['phase']) % 10}"
            axes.barh(place, row["ms"], 0.7, left, color=color, alpha=0.45, label=row["phase"])
            axes.barh(place, min(row["ms"], row["bound_ms"] or 0), 0.35, left, color=color)
            left += row["ms"]
    axes.set_yticks(range(len(methods)), [each["method"] for each in methods])
    axes.set_xlabel("ms; dark: what the machine needs at least")
    handles, labels = axes.get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=7)
    figure.savefig(PICTURE, metadata={"Date": None})


def render_page(recorded: Row) -> str:
    """docs/performance.md with the recorded tables."""
    return replace_marked(PAGE.read_text(encoding="utf-8"), lambda: render_tables(recorded))


def main(
    home: AnyHome = None,
    long: Annotated[
        str,
        typer.Option(help="Lengths in thousands of tokens: measures how time grows instead of the phases."),
    ] = "",
    render: Annotated[bool, typer.Option("--render", help="Nothing is measured.")] = False,
) -> None:
    """Measure, record, and write the document and its picture."""
    recorded: Row = read_json(RECORDED)
    if long:
        with random_model(1024 * max(parse_counts(long)) + TOKENS, home) as engine:
            recorded["long"] = {
                "machine": machine_name(engine),
                "rows": time_by_length(engine, parse_counts(long)),
            }
    elif not render:
        recorded["phases"] = measure_phases(Engine.open(home=home))
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render_page(recorded), encoding="utf-8")
    draw_picture(recorded)
    print(render_tables(recorded))


if __name__ == "__main__":
    run(main, __doc__)
