"""The connector's worker side, in the process that has the model: fuses the prompts that the scheduler side sends,
writes their KV into vLLM's blocks, encodes passages, and reports.
"""

import logging
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragblend.engine.background_work import queue_storing_arrived
from ragblend.engine.config import Report
from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.model.gate import GATE_TEXT
from ragblend.engine.node_encoder import LocalNodeEncoder
from ragblend.engine.prefill import prefill
from ragblend.engine.request import Request, keys_of
from ragblend.engine.selection import policy_named
from ragblend.integrations.vllm.finder import Ids
from ragblend.integrations.vllm.gate import run_vllm_gate
from ragblend.integrations.vllm.messages import FusionReports, PromptToFuse, StepWork
from ragblend.integrations.vllm.metrics import FusionStats
from ragblend.integrations.vllm.runtime import VllmRuntime
from ragblend.integrations.vllm.settings import ConnectorSettings
from ragblend.integrations.vllm.tensor_parallel import TensorParallelGroup, WorkersOutOfSync
from ragblend.kvstore.errors import RagBlendError, UnsupportedModelError

if TYPE_CHECKING:
    from ragblend.integrations.vllm.decoder import VllmDecoder

log = logging.getLogger("ragblend")
MAX_TAIL_BYTES = 256 << 20  # of a `TailCache`


class TailCache:
    """The KV of the last tokens of fused prompts, which do not fill a block: vLLM's prefix cache has only full blocks.

    With it, a repeated question gets all of its fused KV again, and so the same answer. A prompt's key is the salt of
    its blocks (`PromptToFuse`).
    """

    def __init__(self, most_bytes: int = MAX_TAIL_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._rows: OrderedDict[str, tuple[int, Tensor]] = OrderedDict()

    def put(self, salt: str, start: int, rows: Tensor) -> None:
        """Store rows (L, 2, H, T, D) from position `start` on; evicts the least recently used prompts."""
        if (old := self._rows.pop(salt, None)) is not None:
            self._bytes -= old[1].nbytes
        self._rows[salt] = start, rows
        self._bytes += rows.nbytes
        while self._bytes > self._most_bytes:
            self._bytes -= self._rows.popitem(last=False)[1][1].nbytes

    def rows(self, salt: str, start: int) -> Tensor | None:
        """The rows from position `start` on; None if some of them are not stored."""
        first, rows = self._rows.get(salt, (sys.maxsize, None))
        if rows is None or start < first:
            return None
        self._rows.move_to_end(salt)
        return rows[:, :, :, start - first :]


class ConnectorWorker:
    """Does the work of each step on the model of vLLM's worker.

    If fusing a prompt of at most `step_tokens` fails, it is computed in full here; vLLM computes a longer one in
    pieces, because it waits for workers only for a limited time. fuses_ahead: whether prompts are fused a step before
    vLLM computes their last token, so that vLLM itself can compute one that failed. refusal: why nothing is fused, None
    if prompts are; the scheduler gets it before the first request. Of a tensor-parallel group only the first worker
    leads; the others run the leader's operations on their shards.
    """

    def __init__(self, runtime: VllmRuntime, settings: ConnectorSettings, fuses_ahead: bool = False) -> None:
        self._runtime, self._settings, self._fuses_ahead = runtime, settings, fuses_ahead
        self._step_tokens = settings.step_tokens
        self._decoder: VllmDecoder | None = None
        self._leads = True
        self.refusal: str | None = "the worker has not started"
        self._encoder: ChunkEncoder | None = None
        self._seconds_per_token = 0.0  # of the last encoded passage
        self._tails = TailCache()
        self._failed_blocks: set[int] = set()
        self._loaded, self._failed_loads = (
            set[str](),
            set[str](),
        )  # requests whose load has ended, and has failed
        self._reports, self._stats = FusionReports(), FusionStats()

    def start(self, make: "Callable[[str], VllmDecoder]", group: TensorParallelGroup) -> None:
        """Create the decoder and run the gate; the model and vLLM's KV cache must exist.

        All workers of a group start together, and agree on one refusal. make(dtype): creates the decoder.
        """
        started = time.perf_counter()
        decoders: list[VllmDecoder] = []
        self._leads = group.leads
        self.refusal = group.agree(_failure_of(lambda: decoders.append(make(self._runtime.dtype))))
        if self.refusal is None:
            self.refusal = group.agree(_failure_of(lambda: self._run_gate(decoders[0])))
        if self.refusal is None:
            self._decoder = decoders[0]
            log.info("RAGBlend fuses prompts here; the gate took %.1f s", time.perf_counter() - started)
        else:
            log.warning("RAGBlend fuses nothing here, and vLLM computes all prompts itself: %s", self.refusal)

    def _run_gate(self, decoder: "VllmDecoder") -> None:
        """Test the model, and give it to the runtime if it passes. Raises UnsupportedModelError if not."""
        with _uncompiled_modules(), self._lead_or_follow(decoder) as leads:
            if not leads:
                return
            runtime = self._runtime
            verdict = run_vllm_gate(decoder, runtime.tokenizing.passage_ids(GATE_TEXT))
            if not verdict.passed:
                raise UnsupportedModelError(str(verdict.reason))
            runtime.adopt(decoder, verdict)
            # These properties are slow on first use, so they are used now, not by the first request.
            _ = runtime.store, runtime.loader_threads, runtime.canonical_prefix
            runtime.background.add(self._read_ahead)

    def _read_ahead(self) -> None:
        """Read the most requested passages into the page cache, before the first prompt."""
        store = self._runtime.store
        for key in store.most_requested(self._settings.warm):
            store.read_ahead(key)

    @contextmanager
    def _lead_or_follow(self, decoder: "VllmDecoder") -> Iterator[bool]:
        """Yield whether this worker leads. A follower first runs all operations of the leader's block."""
        if not self._leads:
            decoder.follow()
            yield False
            return
        try:
            yield True
        except WorkersOutOfSync:
            log.critical("RAGBlend's workers are out of sync, and the engine ends", exc_info=True)
            raise
        except BaseException:
            decoder.finish()
            raise
        decoder.finish()

    def close(self) -> None:
        self._decoder = self._encoder = None
        self._runtime.close()

    def run(self, work: StepWork) -> None:
        """Do a step's work, before vLLM's forward pass. In most steps there is none."""
        decoder = self._decoder
        if decoder is None:  # the prompts were scheduled before the refusal arrived: `_serve` reports it
            for prompt in work.prompts if self._leads else ():
                self._serve(prompt)
        elif work.prompts or work.encode is not None:
            with _uncompiled_modules(), self._lead_or_follow(decoder) as leads:
                for prompt in work.prompts if leads else ():
                    self._serve(prompt)
                if work.encode is not None and leads:
                    self._encode(*work.encode, is_idle=True)
        if self._fuses_ahead:
            self._loaded |= {prompt.request_id for prompt in work.prompts}

    def _serve(self, prompt: PromptToFuse) -> None:
        """Write a prompt's KV, its last rows from the tail cache or all by fusing; recover from any error."""
        try:
            if not self._restore(prompt):
                self._fuse(prompt, prompt.plan.options.method)
            return
        except Exception as error:
            log.warning(
                "request %s could not be fused (%s: %s) and is computed in full", prompt.request_id,
                type(error).__name__, error, exc_info=not isinstance(error, RagBlendError),
            )  # fmt: skip
            message = f"{type(error).__name__}: {error}"
        self._recover(
            prompt, message
        )  # outside the handler, because the error's traceback keeps tensors alive

    def _recover(self, prompt: PromptToFuse, message: str) -> None:
        """Let vLLM compute the prompt, by reporting its load or its blocks as failed.

        If its last token is computed in this step, try to compute all rows here first, so that no request uses
        unwritten blocks.
        """
        self._stats.add(failures=1)
        self._report(prompt, {"error": message})
        if self._fuses_ahead:
            self._failed_loads.add(prompt.request_id)
            return
        with suppress(Exception):
            if prompt.stop <= self._step_tokens:
                self._fuse(prompt, "full")
                return
        # Of the first KV cache group: with several groups vLLM raises, but then computing here was tried before.
        size = self._decoder.paged.block_sizes[0] if self._decoder is not None else None
        first = 0 if size is None else prompt.start // size
        self._failed_blocks |= set(prompt.blocks[0][first:]) - {
            0
        }  # 0: the null block, outside of a sliding window

    def _restore(self, prompt: PromptToFuse) -> bool:
        """Write the last rows of a repeated question, whose blocks vLLM's prefix cache has; False for another one."""
        decoder, rows = self._decoder, self._tails.rows(prompt.salt, prompt.start)
        if decoder is None or rows is None:
            return False

        def layer_rows(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = rows[layer].to(decoder.device)
            return keys, values

        decoder.write(layer_rows, prompt.start, prompt.stop, prompt.blocks)
        options = prompt.plan.options
        details = {"method": options.method, "ratio": options.ratio, "cached_tokens": prompt.stop}
        self._report(prompt, details)
        self._stats.add(repeated=1)
        return True

    def _fuse(self, prompt: PromptToFuse, method: str) -> None:
        """Prefill the prompt by that method, write its KV into the blocks, keep its tail, and report."""
        if self._decoder is None:
            raise RagBlendError(str(self.refusal))
        options, plan, stop = prompt.plan.options, prompt.plan, prompt.stop
        for match in plan.to_encode:
            self._encode(match.whole, options.collection, options.space, match.node_id)
        segments = plan.prompt(prompt.token_ids)
        request = Request(segments, policy_named(method), options.ratio, options.collection, room_tokens=0)
        started = time.perf_counter()
        prefilled = prefill(self._runtime, request)
        assert prefilled.cache is not None, "the gate was passed"
        fused = time.perf_counter()
        cache, start = prefilled.cache, prompt.start
        self._decoder.write(lambda layer: cache.span(layer, start, stop), start, stop, prompt.blocks)
        if method == options.method:  # not a recovery
            block_tokens = math.lcm(*self._decoder.paged.block_sizes)
            tail, layers = stop // block_tokens * block_tokens, range(self._decoder.geometry.layers)
            rows = torch.stack([torch.stack(cache.span(layer, tail, stop)) for layer in layers])
            self._tails.put(prompt.salt, tail, rows.cpu())
        self._count(prompt, prefilled.report, fused - started, time.perf_counter() - fused)
        self._runtime.background.add(self._runtime.store.save_ledger)
        # Only KV of a node is stored, because other KV could not be deleted.
        with_node = {key for chunk, _, key in keys_of(self._runtime, request) if chunk.node_id is not None}
        arrived = {key: blob for key, blob in prefilled.arrived.items() if key in with_node}
        queue_storing_arrived(self._runtime, request, replace(prefilled, arrived=arrived))

    def _count(self, prompt: PromptToFuse, report: Report, fused_s: float, write_s: float) -> None:
        """Report, count and log a fused prompt. fused_s, write_s: seconds to fuse it, and to write its KV."""
        tokens = report.tokens
        counts = {name: getattr(tokens, name) for name in ("prompt", "reused", "recomputed", "missing")}
        details: dict[str, Any] = {
            "method": report.method,
            "ratio": report.ratio,
            **{f"{name}_tokens": count for name, count in counts.items()},
            "hits": report.hits,
            "misses": report.misses,
            "recomputed_fraction": round(report.recomputed_fraction, 4),
            "computed_fraction": round(report.computed_fraction, 4),
            "fused_ms": round(fused_s * 1e3, 1),
            "load_ms": round(report.timings.load_ms, 1),
            "stall_ms": round(report.timings.stall_ms, 1),
            "write_ms": round(write_s * 1e3, 1),
        }
        if prompt.plan.options.label is not None:
            details["served"] = [[letter, len(list(run))] for letter, run in groupby(report.served)]
        self._report(prompt, details)
        self._stats.add(
            requests=1,
            **{f"tokens_{name}": count for name, count in counts.items()},
            fused_seconds=fused_s,
            load_seconds=report.timings.load_ms / 1e3,
            write_seconds=write_s,
        )
        log.info(
            "request %s: %s of %s tokens from the store, %s recomputed, %s%s; fused in %.0f ms, written in %.0f ms",
            prompt.request_id, f"{tokens.reused + tokens.recomputed:,}", f"{tokens.prompt:,}", f"{tokens.recomputed:,}",
            report.method, "" if report.ratio is None else f" {report.ratio:.2f}", fused_s * 1e3, write_s * 1e3,
        )  # fmt: skip

    def _report(self, prompt: PromptToFuse, details: dict[str, Any]) -> None:
        """Add a prompt's report for the scheduler. Its first one counts, so that a recovery does not hide an error."""
        first = self._reports.prompts.setdefault(prompt.request_id, details)
        if prompt.plan.options.label is not None:
            self._reports.by_label[prompt.plan.options.label] = first

    def _encode(
        self, passage: Ids, collection: str, space: str, node_id: str | None, is_idle: bool = False
    ) -> None:
        """Store a passage's KV, encoded alone after the canonical prefix, unless its node has been deleted.

        passage: its token ids. space: where its KV is stored: the collection, or the part of it that only requests with
        one salt find. is_idle: no prompt waits for it, so the shared store is tried first (for a prompt's passages the
        scheduler has looked there), and a passage that would take too long is not encoded.
        """
        runtime, prefix = self._runtime, self._runtime.canonical_prefix
        try:
            runtime.check_length(len(prefix) + len(passage), "a passage with its prefix")
            key = runtime.key_of(prefix, passage, space)
            nodes = LocalNodeEncoder(runtime, collection)
            if not nodes.claim(node_id, passage, key) or runtime.store.contains(key):
                return
            if is_idle and nodes.copy_from_shared(key, passage, prefix, node_id):
                return
            limit = self._settings.encode_seconds
            if is_idle and limit is not None and self._seconds_per_token * len(passage) > limit:
                log.warning(
                    "a passage of %d tokens is not encoded, because it would take more than %g s",
                    len(passage),
                    limit,
                )
                return
            if self._encoder is None:
                self._encoder = ChunkEncoder(runtime.decoder, prefix)
            started = time.perf_counter()
            encoded = self._encoder.encode(passage)
            self._seconds_per_token = (time.perf_counter() - started) / len(passage)
            self._stats.add(encoded=int(nodes.store(key, encoded, node_id)))
        except Exception as error:
            log.warning("a passage of %d tokens could not be encoded: %s", len(passage), error)

    # --- called by vLLM after each step

    def take_failed_blocks(self) -> set[int]:
        """Ids of blocks without valid KV, which vLLM must compute."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Ids of the requests that were fused a step ahead, and of those among them that vLLM must compute."""
        loads = self._loaded, self._failed_loads
        self._loaded, self._failed_loads = set(), set()
        return loads

    def take_reports(self) -> FusionReports | None:
        reports, self._reports = self._reports, FusionReports()
        return reports if reports.prompts else None

    def take_stats(self) -> FusionStats | None:
        stats, self._stats = self._stats, FusionStats()
        return None if stats.is_empty() else replace(stats)


def _failure_of(step: Callable[[], None]) -> str | None:
    """Run a step of the start; returns why it failed, or None."""
    try:
        step()
    except RagBlendError as error:
        return str(error)
    except Exception as error:
        log.warning("RAGBlend could not start", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _uncompiled_modules() -> Iterator[None]:
    """Context for calling vLLM's modules one by one, uncompiled and out of inference mode, with any number of rows.

    Compiling each norm, and some again for new shapes, would take seconds between requests. Buffers must not be
    inference tensors, because the loader's threads fill them, which are not in inference mode.
    """
    with torch.compiler.set_stance("force_eager"), torch.inference_mode(False):
        yield
