"""The device seam: which device, which dtype, and how bytes get there beside the compute.

`TransferStream` is what differs between a CPU and an accelerator. On the CPU the loader reads straight into the fused
buffers and keys are moved by the computing thread. On CUDA the loader reads into pinned memory, a stream of its own
copies and moves, and an event tells the compute stream when a layer is there, so the host never waits for the copy.
"""

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragblend.kvstore.chunks import DTYPES
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.memory import MemoryTier
from ragblend.kvstore.policy import DEFAULT_POLICY, policy_named

MAX_READERS = 8
MAX_LAYERS_AHEAD = 2  # that a host queues: the device always has one to go on with
_loading, _recording = threading.Lock(), threading.Lock()


@contextlib.contextmanager
def exclusive_model_loading(shows_bars: bool = False) -> Iterator[None]:
    """While transformers loads a model: no other one meanwhile, and no "Loading weights" among our own messages.

    It patches itself for the whole process while it loads: of a model that was loaded beside the embedder the tied head
    was missing.
    """
    # As the engine imports transformers: where two threads do it at once one of them fails.
    import_module("ragblend.engine.cache")
    from transformers import logging

    with _loading:
        if shows_bars:
            yield
            return
        before = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)


def pick_device(name: str | None) -> torch.device:
    """The device of that name, or the best one present. Raises UsageError if it is absent."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not name:
        name = next(kind for kind in ("cuda", "mps", "cpu") if present[kind])
    kind = name.split(":")[0]
    if kind not in present:
        raise UsageError(f"device {name!r} is unknown; pass cpu, cuda or mps")
    if not present[kind]:
        raise UsageError(f"device {name!r} was asked for, and torch sees none here; pass --device cpu")
    return torch.device(name)


def pick_dtype(device: torch.device, name: str | None) -> str:
    """The dtype asked for, or the narrowest one in which the device multiplies at full speed."""
    if name is not None:
        return name
    if device.type == "cuda":
        with torch.cuda.device(device):  # which is the one that is asked
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if native else "float16"
    if device.type == "mps":
        return "bfloat16"
    return "bfloat16" if _cpu_multiplies_bfloat16() else "float32"


def _cpu_multiplies_bfloat16() -> bool:
    # oneDNN emulates bfloat16 on AVX2 and plain AVX-512, several times slower than float32; AMX and the
    # AVX-512 BF16 extension do it natively (2 to 4 times faster than float32).
    # `get_capabilities` names both, e.g. {"avx512_bf16": True, "amx_bf16": False, ...}; torch before 2.10 lacks it.
    capabilities: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    features = capabilities()
    return any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def available_bytes(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory that can be had without swapping; where the system does not tell, half of what there is.

    control_group: a container's own, which may have been given less than there is.
    """
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        # Not SC_AVPHYS_PAGES: it leaves out the page cache, most of what is there to be had.
        found = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError, KeyError):  # no container's, or its limit is "max"
        limit, used = (int((control_group / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (control_group / "memory.stat").read_text().splitlines())
        found = min(found, max(0, limit - used + int(counts["inactive_file"])))
    return found


def device_name(device: torch.device) -> str:
    """What is measured once for: a card's name, or what a processor can do."""
    if device.type == "cuda":
        return "-".join(torch.cuda.get_device_name(device).split())
    return str(torch.backends.cpu.get_cpu_capability()) if device.type == "cpu" else device.type


def free_bytes(device: torch.device) -> int:
    """Memory that weights may take on that device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def release_cached_memory(device: torch.device) -> None:
    """Give back what torch keeps of a device's memory for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@functools.cache
def measure_rates(device: torch.device, dtype: str) -> tuple[float, float]:
    """FLOP/s of a prompt's products and bytes/s of a single token's, measured in a fraction of a second.

    Attention, norms and the calls between them take as long again (SmolLM2 and Qwen2.5-1.5B, 2 cores), hence halved.
    """
    size, rows = 2048, 256
    weights = [torch.ones(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(8)]
    many, one = (torch.ones(count, size, device=device, dtype=DTYPES[dtype]) for count in (rows, 1))
    reading = _fastest_s(device, lambda: [many @ each for each in weights[:2]])
    writing = _fastest_s(device, lambda: [one @ each for each in weights])
    nbytes = sum(each.nbytes for each in weights)
    return 2 * rows * size * size * 2 / reading / 2, nbytes / writing / 2


def _fastest_s(device: torch.device, work: Callable[[], object], repeats: int = 4) -> float:
    transfers, times = transfer_stream(device), []
    for _ in range(repeats):
        transfers.synchronize()
        begun = time.perf_counter()
        work()
        transfers.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)


def reads_at_once(device: torch.device) -> int:
    """How many threads read stored KV: on a CPU its cores are the compute's; before an accelerator they are free, and
    one reads and checks a few gigabytes a second, of which it could take fifty.
    """
    return 2 if device.type == "cpu" else min(MAX_READERS, max(2, (os.cpu_count() or 1) // 2))


def record_calls(device: torch.device, work: Callable[[], object]) -> Callable[[], object]:
    """What has the device do again what `work` has it do, with the same memory; where it can in one call (CUDA graphs).

    Nothing is done yet on CUDA, and everything that `work` makes is there as long as what is returned.
    """
    if device.type != "cuda":
        return work
    with torch.cuda.device(device), _recording:  # another engine may be at it
        few = torch.ones(2, 2, device=device)
        few @ few  # makes this thread's handles, which cannot be made below
        stream, pool, _ = _recordings(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        play: Callable[[], object] = _captured(work, stream, pool).replay
        torch.cuda.current_stream(device).wait_stream(stream)
    return play


@functools.cache
def _recordings(device: torch.device) -> tuple[Any, Any, Any]:
    """The stream that all recordings are made in, since libraries keep workspaces for each; the pool of memory that
    they share, as they are played one at a time and keep nothing there; and one that stays: torch forgets a pool with
    the last of them.
    """
    stream, few = torch.cuda.Stream(device), torch.ones(2, 2, device=device)
    pool = torch.cuda.graph_pool_handle()
    return stream, pool, _captured(lambda: few.mul_(1), stream, pool)


def _captured(work: Callable[[], object], stream: Any, pool: Any) -> Any:
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # Of this thread alone: loaders go on. And not by `torch.cuda.graph`, which first empties torch's cache.
        graph.capture_begin(pool, "thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # which says that it failed, and not why
                _end(graph, stream, pool)
            raise
        _end(graph, stream, pool)
    return graph


def _end(graph: Any, stream: Any, pool: Any) -> None:
    """End a recording. One that failed leaves its pool open to torch: nothing more can be recorded there, and what two
    streams used stays held. The second ends here; the first has no end for the host's memory, so the next recording has
    another pool, and what this one holds of the device's is lost.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(RuntimeError, AttributeError):  # it is called otherwise before torch 2.8
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        _recordings.cache_clear()
        raise


def default_budgets(device: torch.device) -> tuple[int, int]:
    """Bytes of KV to keep in host memory and on the device, where nobody said.

    On the CPU none: the kernel's page cache is host memory already, and a second copy gains the checksum alone. Before
    an accelerator a quarter of the memory that is free, pinned, and a tenth of the device's.
    """
    if device.type == "cpu":
        return 0, 0
    free = available_bytes()
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return free // 4, on_device // 10


def memory_tiers(
    device: torch.device, memory_bytes: int | None, device_bytes: int | None, policy: str | None = None
) -> list[MemoryTier]:
    """The tiers above the disk, the fastest first; None is the default, 0 is none."""
    row, defaults = policy_named(policy or DEFAULT_POLICY), default_budgets(device)
    memory = defaults[0] if memory_bytes is None else memory_bytes
    on_device = 0 if device.type == "cpu" else defaults[1] if device_bytes is None else device_bytes
    tiers = (
        MemoryTier("device", on_device, device, policy=row),
        MemoryTier("memory", memory, pinned=device.type == "cuda", policy=row),
    )
    return [tier for tier in tiers if tier.budget_bytes]


class TransferStream:
    """The CPU: host memory is device memory, so nothing is staged."""

    staged = False  # whether KV has to be copied to the device
    keeps_reads = True  # whether a copy that is queued keeps what it reads

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Called by the computing thread when the buffers have been made, before any delivery into them."""

    def staging(self, like: Tensor) -> Tensor:
        """Memory of the host that is copied from."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def deliver(self, copies: Callable[[], None]) -> Any:
        """Queue copies (and moves) beside the compute; returns a ticket for `arrive`."""
        copies()
        return None

    def arrive(self, ticket: Any) -> None:
        """Make the computing stream wait for that delivery; the host does not wait."""

    def pace(self) -> None:
        """Between two layers: have the host wait until the device is at most two of them behind.

        Else all of a prompt would be queued at once, and neither a cancellation nor another's turn could come between.
        """

    def finish(self) -> None:
        """Order whatever is still being delivered before all later compute; after it, what it is read from may go."""

    def synchronize(self) -> None:
        """Wait until the device has done all it was given (for clocks)."""

    def begin_clock(self) -> None:
        """Have `stamp` and the host's clock start from one moment."""

    def stamp(self) -> Any:
        """A mark behind what the current stream was given so far."""
        return time.perf_counter()

    def time_of(self, stamp: Any) -> float:
        """When the stream came to that mark, in seconds of `time.perf_counter`; only after `synchronize`."""
        return float(stamp)


class CudaTransfers(TransferStream):
    """CUDA: pinned staging, a copy stream, one event a delivery."""

    staged = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._ahead: deque[Any] = deque()  # where the compute stream was between the last layers

    def staging(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def begin(self) -> None:
        self._ahead.clear()
        # The buffers' memory may have been another tensor's a moment ago, still in use by kernels on the way.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def deliver(self, copies: Callable[[], None]) -> Any:
        with torch.cuda.stream(self._stream):
            copies()
            return self._stream.record_event()

    def arrive(self, ticket: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def pace(self) -> None:
        self._ahead.append(torch.cuda.current_stream(self.device).record_event())
        if len(self._ahead) > MAX_LAYERS_AHEAD:
            self._ahead.popleft().synchronize()

    def finish(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def begin_clock(self) -> None:
        self._zero = self.stamp()
        self._zero_s = time.perf_counter()

    def stamp(self) -> Any:
        stamp = torch.cuda.Event(enable_timing=True)
        stamp.record(torch.cuda.current_stream(self.device))
        return stamp

    def time_of(self, stamp: Any) -> float:
        return self._zero_s + float(self._zero.elapsed_time(stamp)) / 1e3


class MpsTransfers(TransferStream):
    """Apple's GPU: one stream, in which a copy does not keep alive what it reads (pytorch issue 189690)."""

    staged = True
    keeps_reads = False

    def finish(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        torch.mps.synchronize()


def transfer_stream(device: torch.device) -> TransferStream:
    """That of the device."""
    return {"cuda": CudaTransfers, "mps": MpsTransfers}.get(device.type, TransferStream)(device)
