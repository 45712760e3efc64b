"""Times the first token on an accelerator with random weights of a real model's shape, and measures the machine.

    python -m benchmarks.measure_gpu /dev/shm/llama --tokenizer FOLDER --output gpu.json
    python -m benchmarks.measure_gpu tiny --device cpu --shape tiny --tokens 64 --chunks 2 --disk-mib 64
    python -m benchmarks.measure_gpu --table gpu.json              # the tables of docs/performance.md

One call prepares, measures and prints everything in under eight minutes. Parts: `machine` (copies, products), `model`
(made and loaded), `ttft` (ten different lengths: one warm-up and one timed run each), `profile` (launches, the device's
busy time, peak memory), `disk` (readers by threads, pieces and checksums), `auto` (as `ttft`, where passages are
computed that take longer to load), `packed` (as `ttft`, in four bits), `kernels` (ways to do one operation), `long`
(16k and 32k tokens), `small` (SmolLM2's shape) and `decode`. A part that fails is reported and does not stop the
others, and the JSON is written after each. Speed does not depend on the weights; quality is not measured.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module, metadata
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, markdown_table, packed_loop, read_json, to_json
from benchmarks.filler import sentences
from ragblend.kvstore import system
from ragblend.kvstore.checksum import crc32
from ragblend.measuring.variants import Variant, label

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "smollm2": {  # of 360M
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
WINDOW = 65536
FULL, REUSE, SHIFT = Variant("full"), Variant("reuse"), Variant("probe-shift", 0.15)
VARIANTS = (FULL, REUSE, Variant("cacheblend", 0.15), Variant("probe-shift", 0.05), SHIFT)
CACHES = {"device": "on the device", "memory": "pinned memory", "warm": "warm disk", "cold": "cold disk"}
STEP_TOKENS, LENGTHS = 5, 10  # lengths of chunks: ten, five tokens apart
LISTED_CALLS = 10  # kernels and host calls that a profile names
MIB = 1 << 20
TIER_BYTES = 12 << 30


@dataclass
class GpuBench:
    """The command's options, and the engine that they describe. until: the clock's time when a part must end."""

    folder: Path
    tokenizer: Path | None
    shape: str
    device: str
    tokens: int
    chunks: int
    disk_mib: int
    until: float = float("inf")

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.until

    @cached_property
    def source(self) -> str:
        return " ".join(islice(sentences(random.Random(0)), 6000))

    @property
    def lengths(self) -> list[int]:
        """Tokens of a chunk, by round."""
        first = max(8, self.tokens - STEP_TOKENS * (LENGTHS - 2) // 2)
        return [first + STEP_TOKENS * number for number in range(LENGTHS)]

    @property
    def caches(self) -> tuple[str, ...]:
        return tuple(CACHES) if self.device != "cpu" else ("memory", "warm", "cold")

    @contextmanager
    def engine(self, codec: str = "raw", shape: str | None = None, load: str = "all") -> Iterator[Any]:
        """The model's engine. With another shape it is that of another model, and is closed after the block."""
        from ragblend import Engine

        folder = self.folder if shape is None else self.folder.with_name(f"{self.folder.name}-{shape}")
        make_model(folder, shape or self.shape, self.tokenizer, self.device)
        home = Path(os.environ.get("TMPDIR", "/tmp")) / f"{folder.name}-home"
        budgets = {"memory_budget_bytes": TIER_BYTES, "device_budget_bytes": TIER_BYTES}
        engine = Engine.open(str(folder), home=home, device=self.device, kv_codec=codec, load=load, **budgets)
        # Random weights in 32 layers give larger errors than the self-test allows. Here only times are measured.
        if not engine.gate.passed:
            print(f"the gate would refuse this model: {engine.gate.reason}", flush=True)
            vars(engine.runtime)["gate"] = replace(engine.gate, passed=True)
        engine.runtime.decode_selector.needs_measurement = (
            False  # measuring would occupy the device between two runs
        )
        try:
            yield engine
        finally:
            if shape is not None:
                engine.close()


def make_model(folder: Path, shape: str, tokenizer: Path | None, device: str) -> None:
    """Save a Llama of that shape with random bfloat16 weights, unless the folder has a model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from ragblend import Engine

    if (folder / "config.json").exists():
        return
    loaded = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else Engine.open(device="cpu").tokenizer
    config = LlamaConfig(vocab_size=len(loaded), max_position_embeddings=WINDOW, **SHAPES[shape])
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    loaded.save_pretrained(folder)


def median_ms(device: str, work: Callable[[], object], repeats: int = 5) -> float:
    """Median time of the work and of what it queues on the device; the first run does not count."""
    from ragblend.engine.model.device import transfer_stream

    transfers, times = transfer_stream(torch.device(device)), []
    for _ in range(repeats + 1):
        transfers.synchronize()
        begun = time.perf_counter()
        work()
        transfers.synchronize()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[1:])


def machine(bench: GpuBench) -> Row:
    """The machine's names and its limits: bytes per second into the device and within it, and FLOP per second."""
    from ragblend.engine.model.device import device_name, transfer_stream
    from ragblend.measuring.prefilling import cpu_name

    device, size = torch.device(bench.device), bench.disk_mib * MIB
    staging = transfer_stream(device).staging
    begun = time.perf_counter()
    host = staging(torch.empty(size, dtype=torch.uint8, device="meta"))
    pinning_s = time.perf_counter() - begun
    on_device, copied = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    square = torch.randn(4096 if bench.device != "cpu" else 512, device=device).bfloat16()
    square = square.outer(square)

    def copy_in_pieces(piece: int) -> None:
        for target, part in zip(on_device.split(piece), host.split(piece), strict=True):
            target.copy_(part, non_blocking=True)

    def gb_per_s(work: Callable[[], object], nbytes: int = size) -> float:
        return nbytes / median_ms(bench.device, work) / 1e6

    found: Row = {
        "card": device_name(device),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "system": platform.release(),
        "processor": f"{cpu_name()}, {os.cpu_count()} cores",
        "pinning_gb_per_s": size / pinning_s / 1e9,
        "into_device_gb_per_s": gb_per_s(lambda: copy_in_pieces(size)),
        "into_device_4mib_gb_per_s": gb_per_s(lambda: copy_in_pieces(4 * MIB)),
        "within_device_gb_per_s": gb_per_s(lambda: copied.copy_(on_device), 2 * size),
        "products_tflops": 2 * len(square) ** 3 / median_ms(bench.device, lambda: square @ square) / 1e9,
        "launch_us": 1e3
        * median_ms(bench.device, lambda: [on_device[:4].add_(1) for _ in range(1000)])
        / 1000,
    }
    for name, command in {
        "driver": "nvidia-smi --query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current "
        "--format=csv,noheader",
        "folders": "df -hT / /tmp /dev/shm",
        "memory": "free -g",
    }.items():
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        found[name] = done.stdout.strip()
    return found


def version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


class Readers:
    """Threads that read a file into one pinned buffer; each piece is read by the next free thread."""

    def __init__(self, path: Path, size: int, device: str) -> None:
        from ragblend.engine.model.device import transfer_stream

        self.path, self.size = path, size
        staging = transfer_stream(torch.device(device)).staging
        # O_DIRECT needs memory that is aligned to pages.
        self.host = staging(torch.empty(size + 4096, dtype=torch.uint8, device="meta"))
        first = -self.host.data_ptr() % 4096
        self.view: Any = memoryview(self.host[first : first + size].numpy())  # type: ignore[arg-type]

    def gb_per_s(self, threads: int, piece: int, crc: bool, flags: int = 0, cold: bool = False) -> float:
        """Read the file once. piece: bytes; crc: also compute checksums; flags: of `os.open`; cold: drop its pages."""
        fd = os.open(self.path, os.O_RDONLY | flags)
        try:
            if cold:
                system.drop_pages(fd)
            offsets, lock, failed = iter(range(0, self.size, piece)), threading.Lock(), list[OSError]()

            def read() -> None:
                try:
                    while not failed:
                        with lock:
                            at = next(offsets, None)
                        if at is None:
                            return
                        stop = min(at + piece, self.size)
                        if system.read_into(fd, [self.view[at:stop]], at) < stop - at:
                            raise OSError("the file is too short")
                        for begin in range(at, stop, 4 * MIB) if crc else ():
                            crc32(self.view[begin : min(begin + 4 * MIB, stop)], 0)
                except OSError as error:
                    failed.append(error)

            workers = [threading.Thread(target=read) for _ in range(threads)]
            begun = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            if failed:
                raise failed[0]
            return self.size / (time.perf_counter() - begun) / 1e9
        finally:
            os.close(fd)


def model(bench: GpuBench) -> Row:
    """Make and load the model, and run its self-test (the gate)."""
    begun = time.perf_counter()
    with bench.engine() as engine:
        checks = {check.name: [check.error, check.allowed] for check in engine.gate.checks}
        seconds, reason = time.perf_counter() - begun, engine.gate.reason
        return {"seconds": seconds, "gate": checks, "refused": reason, "kernels": kernels_of(engine)}


def kernels_of(engine: Any) -> Row:
    """Which of our kernels work on this card for this model."""
    decoder = engine.runtime.decoder
    found = {codec: decoder.has_kernels("placement", codec) for codec in ("raw", "int8", "int4")}
    rows = torch.arange(2, device=decoder.device)
    view = decoder.row_block(rows, 3, decoder.embed(rows)).arguments
    return found | {
        "shift": decoder.has_kernels("shift"),
        "attention": any("scattered" in v for v in view.values()),
    }


def disk(bench: GpuBench) -> Iterator[Row]:
    """GB/s of reading a file: buffered (warm and cold) and O_DIRECT, by threads, pieces and checksums; kvikio."""
    size = bench.disk_mib * MIB
    path = Path(os.environ.get("TMPDIR", "/tmp")) / "measure-gpu.bin"
    try:
        block = os.urandom(min(size, 64 * MIB))
        begun = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        yield {"way": "writing", "gb_per_s": size / (time.perf_counter() - begun) / 1e9}
        readers = Readers(path, size, bench.device)
        readers.gb_per_s(4, 4 * MIB, crc=True)  # warms up
        for way, flags in {"warm": 0, "cold": 0, "O_DIRECT": getattr(os, "O_DIRECT", 0)}.items():
            for threads, piece, crc in product((8, 1, 4, 16), (4, 32), (False, True)):
                if bench.is_late or (way != "warm" and crc and threads != 8):
                    continue  # reading a disk takes seconds
                arguments = threads, piece * MIB, crc, flags, way == "cold"
                row: Row = {"way": way, "threads": threads, "mib": piece, "crc": crc}
                try:
                    yield row | {"gb_per_s": readers.gb_per_s(*arguments)}
                except OSError as error:
                    yield row | {"error": str(error)}
        if bench.device != "cpu":
            yield from kvikio_rows(path, size)
    finally:
        path.unlink(missing_ok=True)


def kvikio_rows(path: Path, size: int) -> Iterator[Row]:
    try:
        kvikio = import_module("kvikio")
        defaults = import_module("kvikio.defaults")
    except ImportError as error:
        yield {"way": "kvikio", "error": str(error)}
        return
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    for threads, cold in product((4, 8, 16), (False, True)):
        defaults.set("num_threads", threads)
        with kvikio.CuFile(str(path), "r") as file:
            for _ in range(2 - cold):  # the first one warms up
                if cold:
                    with path.open("rb") as handle:
                        system.drop_pages(handle.fileno())
                begun = time.perf_counter()
                file.pread(target).get()
                rate = size / (time.perf_counter() - begun) / 1e9
        row = {"way": "kvikio, cold" if cold else "kvikio, warm", "threads": threads, "gb_per_s": rate}
        yield row | {"compat": str(defaults.get("compat_mode"))}


def kernels(bench: GpuBench) -> Iterator[Row]:
    """Milliseconds of operations that may be done in several ways."""
    for unknowns in (400, 768) if bench.device != "cpu" else (128,):
        rows = torch.randn(unknowns, 2 * unknowns, device=bench.device)
        matrix = rows @ rows.T / unknowns + torch.eye(unknowns, device=bench.device)
        for name, way in inverses(matrix).items():
            yield {"what": f"{name}, {unknowns}", "ms": median_ms(bench.device, way)}
    if bench.device == "cuda":
        yield from whole_attention(8192)
        for rows_of_keys in ((60, 8300), (1280, 8300), (2560, 16600)):
            yield from attentions(*rows_of_keys)


def whole_attention(tokens: int) -> Iterator[Row]:
    """Causal attention of a whole prompt by torch's kernels, each of which may prepare something for a new length."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    every = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    lengths = tokens, tokens + 17, tokens + 34
    for (name, chosen), length in product(
        {"any": every, "flash": every[:1], "cuDNN": every[1:2]}.items(), lengths
    ):
        query = torch.randn(1, 32, length, 128, device="cuda").bfloat16()
        key, value = (torch.randn(1, 8, length, 128, device="cuda").bfloat16() for _ in "kv")
        given: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
        attend = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, **given)
        row: Row = {"what": f"causal attention of {length}, {name}"}
        torch.cuda.synchronize()
        try:
            with sdpa_kernel(chosen):
                begun = time.perf_counter()
                attend()
                torch.cuda.synchronize()
                row["first_ms"] = 1e3 * (time.perf_counter() - begun)
                yield row | {"ms": median_ms("cuda", attend)}
        except RuntimeError as error:  # no such kernel for these heads
            yield row | {"error": repr(error)[:200]}


def attentions(count: int, tokens: int) -> Iterator[Row]:
    """Attention of `count` scattered rows, 32 heads in groups of 4: torch's with a mask, then our kernel by blocks."""
    from ragblend.engine.kernels import rows_attention

    rows = torch.randperm(tokens, device="cuda")[:count].sort().values
    query = torch.randn(32, count, 128, device="cuda").bfloat16()
    key, value = (torch.randn(8, tokens, 128, device="cuda").bfloat16() for _ in "kv")
    mask = (torch.arange(tokens, device="cuda")[None] <= rows[:, None])[None, None]

    def by_torch() -> torch.Tensor:
        keys, values = (each.repeat_interleave(4, 0)[None] for each in (key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query[None], keys, values, mask)[0].transpose(0, 1)

    what = f"attention of {count} rows, {tokens} keys"
    yield {"what": f"{what}, torch", "ms": median_ms("cuda", by_torch)}
    expected, chosen = by_torch().float(), rows_attention.blocks_of(count, 128, True)
    others = [
        (16, 64, 4, 3),
        (64, 64, 4, 3),
        (64, 32, 4, 4),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 32, 8, 4),
    ]
    for blocks in dict.fromkeys([chosen, *others]):
        try:
            found = rows_attention.attend(query, key, value, rows, None, None, blocks).float()
            ms = median_ms(
                "cuda", partial(rows_attention.attend, query, key, value, rows, None, None, blocks)
            )
            yield {"what": f"{what}, {blocks}", "ms": ms, "error": float((found - expected).abs().max())}
        except Exception as error:  # whatever Triton raises for blocks that are too large for the card
            yield {"what": f"{what}, {blocks}", "error": repr(error)[:200]}


def inverses(system: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to invert the shift's system, by name, and a product of its size to compare with."""
    from ragblend.engine.selection import shift

    identity = torch.eye(len(system), device=system.device)

    def factor() -> torch.Tensor:
        return torch.linalg.cholesky_ex(system)[0]

    return {
        "product": lambda: system @ system,
        "cholesky": factor,
        "cholesky and inverse": lambda: torch.cholesky_inverse(factor()),
        "cholesky and solve": lambda: torch.cholesky_solve(identity, factor()),
        "inverse by products": lambda: shift.inverse_by_products(system),
        "inv_ex": lambda: torch.linalg.inv_ex(system),
    }


def place_chunks(engine: Any, subject: Any, cache: str) -> None:
    """Put the stored chunks into that tier. Faster tiers get no space, since promoting chunks would take seconds."""
    from ragblend.measuring import ttft

    engine.finish_background()
    used_tiers = {"device": ("device", "memory"), "memory": ("memory",)}.get(cache, ())
    for tier in engine.store.tiers:
        tier.budget_bytes = TIER_BYTES if tier.name in used_tiers else 0
    ttft.place_chunks(engine, subject, cache)


def ttft_rows(
    bench: GpuBench,
    engine: Any,
    lengths: Sequence[int],
    chunks: int,
    caches: Sequence[str],
    variants: Sequence[Variant] = VARIANTS,
) -> list[Row]:
    """A row per cache and variant, with medians over the lengths; the variants run alternately.

    first_ms: the time of the warm-up run.
    """
    from ragblend.measuring import ttft
    from ragblend.measuring.prefilling import timed_prefill

    runs_by_case: dict[tuple[str, Variant], list[tuple[float, Any]]] = {}
    first: dict[Variant, list[float]] = {}
    for turn, tokens in enumerate(lengths):
        if bench.is_late and turn:
            break
        with ttft.encoded_prompt(engine, ttft.cut_texts(engine, bench.source, chunks, tokens)) as subject:
            place_chunks(engine, subject, caches[0])
            for variant in variants:
                first.setdefault(variant, []).append(timed_prefill(engine, subject.prompt, variant).ttft_ms)
            for cache in caches:
                place_chunks(engine, subject, cache)
                for number in range(len(variants)):  # each length begins with another variant
                    variant = variants[(turn + number) % len(variants)]
                    if cache == "cold":
                        place_chunks(engine, subject, cache)
                    engine.finish_background()
                    timed = timed_prefill(engine, subject.prompt, variant)
                    runs_by_case.setdefault((cache, variant), []).append((timed.ttft_ms, timed.report))
    rows = []
    order = {cache: number for number, cache in enumerate(caches)}
    for (cache, variant), runs in sorted(
        runs_by_case.items(), key=lambda each: (order[each[0][0]], variants.index(each[0][1]))
    ):
        times = [ms for ms, _ in runs]
        full = [ms for ms, _ in runs_by_case[cache, FULL]]
        rows.append(
            {
                "method": variant.method,
                "ratio": variant.ratio,
                "cache": cache,
                "chunks": chunks,
                "lengths": len(times),
                "ttft_ms": statistics.median(times),
                "speedup": statistics.median(a / b for a, b in zip(full, times, strict=True)),
                "each_ms": [round(ms, 1) for ms in times],
                "first_ms": statistics.median(first[variant]),
                "load_busy_ms": statistics.median(report.trace.busy_ms("load") for _, report in runs),
                "not_loaded": statistics.median(report.tokens.not_loaded for _, report in runs),
                "where_ms": ttft.part_medians_ms([(ms, report.timings) for ms, report in runs]),
            }
        )
        print(" ", {name: rounded(value) for name, value in rows[-1].items()}, flush=True)
    return rows


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, 2) if isinstance(value, float) else value


def ttft_part(bench: GpuBench) -> list[Row]:
    with bench.engine() as engine:
        return ttft_rows(bench, engine, bench.lengths, bench.chunks, bench.caches)


def packed(bench: GpuBench) -> list[Row]:
    """As `ttft`, with KV in four bits, at three lengths."""
    with bench.engine("int4") as engine:
        return ttft_rows(bench, engine, bench.lengths[::4], bench.chunks, bench.caches)


def auto(bench: GpuBench) -> list[Row]:
    """As `ttft`, but passages that would take longer to load are computed; layers are timed after the first answer."""
    with bench.engine(load="auto") as engine:
        return ttft_rows(
            bench, engine, bench.lengths[::3], bench.chunks, ("warm", "cold"), (FULL, REUSE, SHIFT)
        )


def long(bench: GpuBench) -> list[Row]:
    """Two and four times as many chunks, at two lengths."""
    with bench.engine() as engine:
        return [
            row
            for times in (2, 4)
            for row in ttft_rows(
                bench,
                engine,
                [length - 2 * STEP_TOKENS for length in bench.lengths[:2]],
                times * bench.chunks,
                ("memory", "warm"),
                (FULL, REUSE, SHIFT),
            )
        ]


def small(bench: GpuBench) -> list[Row]:
    with bench.engine(shape="smollm2" if bench.shape != "tiny" else "tiny") as engine:
        return ttft_rows(bench, engine, bench.lengths[::4], bench.chunks, ("memory", "warm", "cold"))


def profile(bench: GpuBench) -> Iterator[Row]:
    """A row per method, loading from pinned memory: launches, busy time, peak memory, the most expensive calls."""
    from ragblend.measuring import ttft

    on_card = bench.device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_card else []
    with (
        bench.engine() as engine,
        ttft.encoded_prompt(
            engine, ttft.cut_texts(engine, bench.source, bench.chunks, bench.lengths[4])
        ) as subject,
    ):
        place_chunks(engine, subject, "memory")
        decoder = engine.runtime.decoder
        without_kernels = [(REUSE, False), (SHIFT, False)] if on_card else []
        for variant, uses_kernels in [*((each, True) for each in VARIANTS), *without_kernels]:
            decoder.kernels = on_card and uses_kernels
            engine.prefill(subject.prompt, **variant.arguments)
            row: Row = {"method": variant.method, "ratio": variant.ratio, "triton": decoder.kernels}
            if on_card:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            prefilled = engine.prefill(subject.prompt, **variant.arguments)
            if on_card:
                row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / MIB
            del prefilled
            with torch.profiler.profile(activities=activities) as profiler:
                engine.prefill(subject.prompt, **variant.arguments)
            yield row | profile_row(profiler)
        decoder.kernels = on_card


def profile_row(profiler: Any) -> Row:
    averages = profiler.key_averages()
    launches = {each.key: each.count for each in averages if "Launch" in each.key}
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            spans[event.name.startswith("Mem")].append((event.time_range.start, event.time_range.end))
    kernels = sorted(averages, key=lambda each: -each.self_device_time_total)[:LISTED_CALLS]
    calls = sorted(averages, key=lambda each: -each.self_cpu_time_total)[:LISTED_CALLS]
    return {
        "launches": sum(launches.values()),
        "waits": sum(each.count for each in averages if "Synchronize" in each.key),
        "kernels_ms": union_us(spans[False]) / 1e3,
        "copies_ms": union_us(spans[True]) / 1e3,
        "kernels": [[each.key[:90], each.count, each.self_device_time_total / 1e3] for each in kernels],
        "host_calls": [[each.key[:60], each.count, each.self_cpu_time_total / 1e3] for each in calls],
    }


def union_us(spans: list[tuple[float, float]]) -> float:
    """The time in which at least one of the spans was open."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def decode(bench: GpuBench) -> Iterator[Row]:
    from benchmarks import measure_decode
    from ragblend.engine.decoding.implementations import DecodeImplementation, TransformersDecode

    with bench.engine() as engine:
        rows, _ = packed_loop(engine)
        ways: dict[str, DecodeImplementation] = {
            "model": TransformersDecode(engine.runtime.loaded.model),
            "rows": rows,
        }
        for line in measure_decode.by_context(engine, ways, rows, [500, bench.chunks * bench.tokens], []):
            yield {"line": line}


# By name, the most important first; with the seconds after which a part starts no new measurement.
PARTS: dict[str, tuple[Callable[[GpuBench], Any], int]] = {
    "machine": (machine, 30),
    "model": (model, 120),
    "ttft": (ttft_part, 170),
    "profile": (profile, 40),
    "disk": (disk, 40),
    "auto": (auto, 40),
    "packed": (packed, 40),
    "kernels": (kernels, 30),
    "long": (long, 40),
    "small": (small, 30),
    "decode": (decode, 30),
}


def tables(found: Row) -> str:
    """The Markdown of docs/performance.md."""
    machine = found.get("machine", {})
    names = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton") if machine.get(name))
    text = f"{machine.get('card')}; {names}; {machine.get('processor')}.\n"
    for part in ("ttft", "auto", "packed", "long", "small"):
        rows = found.get(part, [])
        for chunks in sorted({row["chunks"] for row in rows}):
            text += f"\n{part}, {chunks} chunks:\n\n" + _times_table(
                [r for r in rows if r["chunks"] == chunks]
            )
    if rows := found.get("profile", []):
        columns = ("", "Triton", "launches", "waits", "kernels, ms", "copies, ms", "peak memory, MiB")
        text += "\n" + markdown_table(
            columns,
            (
                (
                    label(row["method"], row["ratio"]),
                    "yes" if row["triton"] else "no",
                    f"{row['launches']:,}",
                    str(row["waits"]),
                    f"{row['kernels_ms']:.0f}",
                    f"{row['copies_ms']:.0f}",
                    f"{row.get('peak_mib', 0):,.0f}",
                )
                for row in rows
            ),
        )
    if rows := found.get("disk", []):
        head = ("", "threads", "pieces, MiB", "checksum", "GB/s")
        named = ("way", "threads", "mib", "crc")
        text += "\n" + markdown_table(
            head,
            (
                (*(str(row.get(name, "")) for name in named), f"{row['gb_per_s']:.1f}")
                for row in rows
                if "gb_per_s" in row
            ),
        )
    return text


def _times_table(rows: list[Row]) -> str:
    caches = [cache for cache in CACHES if any(row["cache"] == cache for row in rows)]
    by = {(row["method"], row["ratio"], row["cache"]): row for row in rows}
    lines = []
    for method, ratio in dict.fromkeys((row["method"], row["ratio"]) for row in rows):
        each = [by[method, ratio, cache] for cache in caches]
        cells = (
            f"{row['ttft_ms']:.0f}" + (f" ({row['speedup']:.1f} times)" if method != "full" else "")
            for row in each
        )
        lines.append((label(method, ratio), *cells))
    return markdown_table(("ms", *(CACHES[cache] for cache in caches)), lines)


def measured(bench: GpuBench, parts: Sequence[str], output: Path | None, limit_s: float) -> Row:
    """Run the parts; none begins after the limit. If one fails, the rows that it has yielded are kept."""
    deadline = time.monotonic() + limit_s
    shown = ("shape", "device", "tokens", "chunks", "disk_mib")
    found: Row = {"command": {name: getattr(bench, name) for name in shown}, "seconds": {}}
    for name in parts:
        part, part_s = PARTS[name]
        begun = time.monotonic()
        bench.until = min(begun + part_s, deadline)
        try:
            if bench.is_late:
                raise TimeoutError("the time limit is reached")
            result = part(bench)
            if isinstance(result, Iterator):
                rows = found[name] = []
                for row in result:
                    rows.append(row)
                    print(" ", rounded(row), flush=True)
            else:
                found[name] = result
        except Exception:
            found.setdefault("failed", {})[name] = traceback.format_exc()[-2000:]
            print(f"{name} failed: {found['failed'][name]}", flush=True)
        found["seconds"][name] = round(time.monotonic() - begun, 1)
        print(f"{name}: {found['seconds'][name]} s", flush=True)
        if output is not None:
            output.write_text(to_json(json.loads(json.dumps(rounded(found), default=str)), 1))
    return found


def main() -> None:
    """Measure and print. Uses argparse, because typer may not be installed on a machine with a GPU and no network."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    option = parser.add_argument
    option("folder", type=Path, nargs="?", help="the model's folder; made if it is absent")
    option("--tokenizer", type=Path, help="a tokenizer's folder; else the bundled one")
    option("--device", default="cuda")
    option("--shape", default="llama-3-8b", choices=SHAPES)
    option("--parts", default=",".join(PARTS), help="the parts to run, separated by commas")
    option("--tokens", type=int, default=1024, help="about how many tokens a chunk has")
    option("--chunks", type=int, default=8)
    option("--disk-mib", type=int, default=1024, help="size of the file that is read")
    option("--limit-s", type=float, default=450, help="no part begins after so many seconds")
    option("--output", type=Path, help="the JSON file")
    option("--table", type=Path, help="only print this JSON file's tables")
    given = vars(parser.parse_args())
    parts, limit_s = given.pop("parts").split(","), given.pop("limit_s")
    output, table = given.pop("output"), given.pop("table")
    if table is not None:
        print(tables(read_json(table)), end="")
        return
    if unknown := sorted(set(parts) - PARTS.keys()):
        parser.error(f"there are no parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if given["folder"] is None:
        shared = Path("/dev/shm")
        fits = shared.is_dir() and shutil.disk_usage(shared).free > 40 << 30
        given["folder"] = (shared if fits else Path(".")) / f"{given['shape']}-random"
    found = measured(GpuBench(**given), parts, output, limit_s)
    print(tables(found))
    if "failed" in found:
        raise SystemExit(f"failed: {', '.join(found['failed'])}")


if __name__ == "__main__":
    main()
