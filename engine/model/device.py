"""The device: choosing it and its dtype, its memory and speed, and transfers to it that overlap with compute.

`TransferStream` hides the difference between a CPU and an accelerator. On the CPU the loader reads straight into the
fused buffers, and the computing thread rotates keys. On CUDA the loader reads into pinned memory, a separate stream
copies and rotates, and an event tells the compute stream when a layer has arrived, so the host never waits for the
copy.
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
from ragblend.kvstore.memory import MemoryTier, page_locked
from ragblend.kvstore.policy import DEFAULT_POLICY, eviction_policy_named

MAX_READERS = 8
MAX_LAYERS_AHEAD = 2  # layers that the host queues ahead, so that the device is never idle
_loading_lock, _recording_lock = threading.Lock(), threading.Lock()


@contextlib.contextmanager
def exclusive_model_loading() -> Iterator[None]:
    """Context for loading a model by transformers: one at a time, without its progress bars.

    transformers patches itself process-wide while loading: a model loaded together with the embedder lacked its tied
    head.
    """
    # Imports transformers as the engine does: if two threads import it at once, one of them fails.
    import_module("ragblend.engine.cache")
    from transformers import logging

    with _loading_lock:
        before = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)


def pick_device(name: str | None) -> torch.device:
    """The named device, or the best one present. Raises UsageError if it is absent."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not name:
        name = next(kind for kind in ("cuda", "mps", "cpu") if present[kind])
    kind = name.split(":")[0]
    if kind not in present:
        raise UsageError(f"device {name!r} is unknown; pass cpu, cuda or mps")
    if not present[kind]:
        raise UsageError(f"device {name!r} was requested, but torch finds none here; pass --device cpu")
    return torch.device(name)


def pick_dtype(device: torch.device, name: str | None) -> str:
    """The named dtype, or the narrowest one that the device multiplies at full speed."""
    if name is not None:
        return name
    if device.type == "cuda":
        with torch.cuda.device(device):  # the call asks the current device
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if native else "float16"
    if device.type == "mps":
        return "bfloat16"
    return "bfloat16" if _cpu_multiplies_bfloat16() else "float32"


def _cpu_multiplies_bfloat16() -> bool:
    # oneDNN emulates bfloat16 on AVX2 and plain AVX-512, several times slower than float32; AMX and the
    # AVX-512 BF16 extension do it natively (2 to 4 times faster than float32).
    return any(cpu_features().get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def cpu_features() -> dict[str, Any]:
    """The processor's extensions, e.g. {"avx512_bf16": True, "amx_bf16": False}; empty with torch before 2.10."""
    capabilities: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return capabilities()


def available_bytes(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory available without swapping. control_group: the container's, which may have a lower limit."""
    import psutil  # type: ignore[import-untyped]

    found = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError, KeyError):  # no container, or its limit is "max"
        limit, used = (int((control_group / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (control_group / "memory.stat").read_text().splitlines())
        found = min(found, max(0, limit - used + int(counts["inactive_file"])))
    return found


def device_name(device: torch.device) -> str:
    """The device's name for saved measurements: a GPU's name, or a processor's capability."""
    if device.type == "cuda":
        return "-".join(torch.cuda.get_device_name(device).split())
    return str(torch.backends.cpu.get_cpu_capability()) if device.type == "cpu" else device.type


def free_bytes(device: torch.device) -> int:
    """Free memory for weights on that device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def release_cached_memory(device: torch.device) -> None:
    """Free the device memory that torch caches."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@functools.cache
def measure_rates(device: torch.device, dtype: str) -> tuple[float, float]:
    """FLOP/s in a prompt's products, and bytes/s in a single token's, measured in a fraction of a second.

    Both are halved, as attention, norms and calls take as long as the products (SmolLM2 and Qwen2.5-1.5B, 2 cores).
    """
    size, rows = 2048, 256
    weights = [torch.ones(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(8)]
    many, one = (torch.ones(count, size, device=device, dtype=DTYPES[dtype]) for count in (rows, 1))
    prompt_s = fastest_s(device, lambda: [many @ each for each in weights[:2]])
    token_s = fastest_s(device, lambda: [one @ each for each in weights])
    nbytes = sum(each.nbytes for each in weights)
    return 2 * rows * size * size * 2 / prompt_s / 2, nbytes / token_s / 2


def fastest_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the work and what it queues on the device: the fastest of four runs."""
    transfers, times = transfer_stream(device), []
    for _ in range(4):
        transfers.synchronize()
        begun = time.perf_counter()
        work()
        transfers.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)


def reader_count(device: torch.device) -> int:
    """Number of threads that read stored KV. With an accelerator there are more: the cores are free, and it accepts
    fifty gigabytes a second, while one thread reads and verifies only a few.
    """
    return 2 if device.type == "cpu" else min(MAX_READERS, max(2, (os.cpu_count() or 1) // 2))


def record_calls(device: torch.device, work: Callable[[], object]) -> Callable[[], object]:
    """A function that repeats `work` on the device over the same memory: on CUDA a graph, which is one call.

    On CUDA `work` is recorded and not run, and what it allocates lives as long as the returned function.
    """
    if device.type != "cuda":
        return work
    with torch.cuda.device(device), _recording_lock:  # another engine may be recording
        few = torch.ones(2, 2, device=device)
        few @ few  # creates this thread's library handles, which cannot be created while recording
        stream, pool, _ = _recordings(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        play: Callable[[], object] = _captured(work, stream, pool).replay
        torch.cuda.current_stream(device).wait_stream(stream)
    return play


@functools.cache
def _recordings(device: torch.device) -> tuple[Any, Any, Any]:
    """One stream for all recordings, because libraries keep a workspace for each stream; one memory pool, because
    recordings are played one at a time and keep nothing in it; and one recording that stays, because torch drops a pool
    with its last recording.
    """
    stream, few = torch.cuda.Stream(device), torch.ones(2, 2, device=device)
    pool = torch.cuda.graph_pool_handle()
    return stream, pool, _captured(lambda: few.mul_(1), stream, pool)


def _captured(work: Callable[[], object], stream: Any, pool: Any) -> Any:
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # Thread-local, as loaders continue; not by `torch.cuda.graph`, which first empties torch's cache.
        graph.capture_begin(pool, "thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # `work`'s error explains more
                _end_recording(graph, stream, pool)
            raise
        _end_recording(graph, stream, pool)
    return graph


def _end_recording(graph: Any, stream: Any, pool: Any) -> None:
    """End a recording. A failed one leaves its pool open: memory that two streams used stays allocated, and nothing can
    be recorded in it. So the pool is closed, the next recording gets a new one, and this pool's device memory is lost.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(RuntimeError, AttributeError):  # another name before torch 2.8
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        _recordings.cache_clear()
        raise


def default_budgets(device: torch.device) -> tuple[int, int]:
    """Default bytes of KV to keep in host memory and on the device.

    On the CPU none: the page cache is host memory already, and a second copy would save only the checksum. With an
    accelerator a quarter of the available host memory, pinned, and a tenth of the device's free memory.
    """
    if device.type == "cpu":
        return 0, 0
    free = available_bytes()
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return free // 4, on_device // 10


def memory_tiers(
    device: torch.device, memory_bytes: int | None, device_bytes: int | None, policy: str | None = None
) -> list[MemoryTier]:
    """The store's tiers above the disk, fastest first. Bytes: None for the default, 0 for no tier."""
    eviction_policy, defaults = eviction_policy_named(policy or DEFAULT_POLICY), default_budgets(device)
    memory = defaults[0] if memory_bytes is None else memory_bytes
    on_device = 0 if device.type == "cpu" else defaults[1] if device_bytes is None else device_bytes
    tiers = (
        MemoryTier("device", on_device, device, policy=eviction_policy),
        MemoryTier("memory", memory, pinned=device.type == "cuda", policy=eviction_policy),
    )
    return [tier for tier in tiers if tier.budget_bytes]


class TransferStream:
    """Transfers on the CPU: host memory is device memory, so nothing is staged."""

    staged = False  # whether KV has to be copied to the device
    keeps_sources = True  # whether a queued copy keeps its source alive

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Called by the computing thread after allocating the buffers, before any delivery into them."""

    def staging(self, like: Tensor) -> Tensor:
        """Host memory to copy from."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def deliver(self, copies: Callable[[], None]) -> Any:
        """Queue copies (and rotations), which overlap with compute; returns a ticket for `wait_for`."""
        copies()
        return None

    def wait_for(self, ticket: Any) -> None:
        """Make the compute stream wait for that delivery; the host does not wait."""

    def pace(self) -> None:
        """Between two layers: make the host wait until the device is at most two layers behind.

        Else a whole prompt would be queued at once, and could be neither cancelled nor interrupted.
        """

    def finish(self) -> None:
        """Order all pending deliveries before later compute; after it their sources may be freed."""

    def synchronize(self) -> None:
        """Wait until the device is idle (for clocks)."""

    def begin_clock(self) -> None:
        """Align `stamp` with the host's clock."""

    def stamp(self) -> Any:
        """A time mark after the current stream's queued work."""
        return time.perf_counter()

    def time_of(self, stamp: Any) -> float:
        """When the stream reached that mark, in seconds of `time.perf_counter`; only after `synchronize`."""
        return float(stamp)


class CudaTransfers(TransferStream):
    """Transfers on CUDA: pinned staging, a copy stream, one event per delivery."""

    staged = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._ahead: deque[Any] = deque()  # events of the compute stream between the last layers

    def staging(self, like: Tensor) -> Tensor:
        return page_locked(like.shape, like.dtype)

    def begin(self) -> None:
        self._ahead.clear()
        # The buffers' memory may have been another tensor's, still in use by queued kernels.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def deliver(self, copies: Callable[[], None]) -> Any:
        with torch.cuda.stream(self._stream):
            copies()
            return self._stream.record_event()

    def wait_for(self, ticket: Any) -> None:
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
    """Transfers on Apple's GPU: one stream, where a copy does not keep its source alive (pytorch issue 189690)."""

    staged = True
    keeps_sources = False

    def finish(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        torch.mps.synchronize()


def transfer_stream(device: torch.device) -> TransferStream:
    """The device's transfer stream."""
    return {"cuda": CudaTransfers, "mps": MpsTransfers}.get(device.type, TransferStream)(device)
