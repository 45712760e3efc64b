"""The worker's side: fuse prompts, write their KV into vLLM's blocks, encode passages, and say what was done."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from ragblend.engine.background_work import queue_storing_arrived
from ragblend.engine.config import Report
from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.model.gate import TEXT
from ragblend.engine.nodes import Nodes
from ragblend.engine.prefill import prefill
from ragblend.engine.request import Request, keys_of
from ragblend.engine.selection import policy_named
from ragblend.integrations.vllm.finder import Ids
from ragblend.integrations.vllm.gate import judged
from ragblend.integrations.vllm.messages import Fused, Order, Orders
from ragblend.integrations.vllm.metrics import FusedStats
from ragblend.integrations.vllm.planning import prompt_of
from ragblend.integrations.vllm.runtime import VllmRuntime
from ragblend.integrations.vllm.team import OutOfStep, Team
from ragblend.kvstore.errors import RagBlendError, UnsupportedModelError

if TYPE_CHECKING:
    from ragblend.integrations.vllm.decoder import VllmDecoder

log = logging.getLogger("ragblend")


class WorkerSide:
    """can_tell: whether vLLM takes that a load has failed: not with several groups of blocks. longest: tokens of a
    prompt that is computed in full here where fusing failed; a longer one vLLM reads in pieces, as it does not wait for
    its workers without end.

    refusal: why nothing is fused; None if it is. The scheduler is told it before the first request.
    """

    def __init__(self, runtime: VllmRuntime, can_tell: bool, longest: int = sys.maxsize) -> None:
        self._runtime, self._can_tell, self._longest = runtime, can_tell, longest
        self._decoder: VllmDecoder | None = None
        self._leads = True
        self.refusal: str | None = "the worker has not begun"
        self._encoder: ChunkEncoder | None = None
        self._failed: set[int] = set()
        self._reports, self._stats = Fused(), FusedStats()

    def begin(self, make: "Callable[[str], VllmDecoder]", team: Team) -> None:
        """With model and cache there: make the decoder and judge it. All workers of a team begin at once."""
        begun = time.perf_counter()
        made: list[VllmDecoder] = []
        self._leads = team.leads
        self.refusal = team.agreed(_reason(lambda: made.append(make(self._runtime.dtype))))
        if self.refusal is None:
            self.refusal = team.agreed(_reason(lambda: self._judge(made[0])))
        if self.refusal is None:
            self._decoder = made[0]
            log.info("RAGBlend fuses prompts here; the gate took %.1f s", time.perf_counter() - begun)
        else:
            log.warning("RAGBlend fuses nothing here, and all prompts are vLLM's own: %s", self.refusal)

    def _judge(self, decoder: "VllmDecoder") -> None:
        """Put the gate's questions to the model. Raises UnsupportedModelError."""
        with _by_hand(), self._led(decoder) as leads:
            if not leads:
                return
            runtime = self._runtime
            verdict = judged(decoder, runtime.tokenizing.passage_ids(TEXT))
            if not verdict.passed:
                raise UnsupportedModelError(str(verdict.reason))
            runtime.adopt(decoder, verdict)
            _ = runtime.store, runtime.readers, runtime.canonical_prefix

    @contextmanager
    def _led(self, decoder: "VllmDecoder") -> Iterator[bool]:
        """Whether this worker leads: else it has followed the one that does, until that one left this."""
        if self._leads:
            try:
                yield True
            except OutOfStep:
                log.critical("RAGBlend's workers are out of step, and the engine ends", exc_info=True)
                raise
            except BaseException:
                decoder.has_done()
                raise
            decoder.has_done()
        else:
            decoder.follow()
            yield False

    def close(self) -> None:
        self._decoder = self._encoder = None
        self._runtime.close()

    def work(self, orders: Orders) -> None:
        """Before the step's forward. In most steps there is nothing to do."""
        decoder = self._decoder
        if decoder is None:  # they were on their way when that was said
            for order in orders.prompts if self._leads else ():
                self._serve(order)
        elif orders.prompts or orders.encode is not None:
            with _by_hand(), self._led(decoder) as leads:
                for order in orders.prompts if leads else ():
                    self._serve(order)
                if orders.encode is not None and leads:
                    self._encode(*orders.encode, is_idle=True)

    def _serve(self, order: Order) -> None:
        try:
            self._fuse(order, order.plan.wish.method)
            return
        except Exception as error:
            log.warning(
                "request %s could not be fused (%s: %s), and is computed", order.request_id,
                type(error).__name__, error, exc_info=not isinstance(error, RagBlendError),
            )  # fmt: skip
            said = f"{type(error).__name__}: {error}"
        self._give_up(order, said)  # not inside: an error holds all that the first try had in memory

    def _give_up(self, order: Order, said: str) -> None:
        """Compute all rows here, so that nobody can have used blocks that nothing was written to; else have vLLM do it.

        Where vLLM cannot be told in time the answer is worth nothing, which is said, and nothing more is fused.
        """
        self._stats.add(failures=1)
        self._report(order, {"error": said})
        failed: Exception | None = None
        try:
            if order.stop <= self._longest:
                self._fuse(order, "full")
                return
        except Exception as again:
            failed = again
        if self._can_tell:
            size = self._decoder.paged.block_sizes[0] if self._decoder is not None else None
            first = 0 if size is None else order.start // size
            self._failed |= set(order.blocks[0][first:]) - {0}
            return
        self.refusal = self._reports.refusal = f"a prompt could not even be computed in full ({failed})"
        log.error(
            "the answer to request %s is wrong, and nothing is fused from now on",
            order.request_id,
            exc_info=failed,
        )
        if self._decoder is not None:  # what other requests left there is nobody's business
            with suppress(Exception):
                self._decoder.write(self._decoder.nothing(order.stop), order.start, order.stop, order.blocks)

    def _fuse(self, order: Order, method: str) -> None:
        if self._decoder is None:
            raise RagBlendError(str(self.refusal))
        wish, policy = order.plan.wish, policy_named(method)
        for match in order.plan.encoded:
            self._encode(match.whole, wish.collection, match.node_id)
        prompt = prompt_of(order.token_ids, order.plan.matches, wish.collection)
        request = Request(prompt, policy, wish.ratio, wish.collection, room_tokens=0)
        begun = time.perf_counter()
        prefilled = prefill(self._runtime, request)
        assert prefilled.cache is not None, "the gate was passed"
        fused = time.perf_counter()
        cache = prefilled.cache
        self._decoder.write(
            lambda layer: cache.span(layer, 0, order.stop), order.start, order.stop, order.blocks
        )
        written = time.perf_counter()
        self._note(order, prefilled.report, fused - begun, written - fused)
        self._runtime.background.add(self._runtime.store.save_uses)
        # What has a node can be deleted again.
        known = {key for chunk, _, key in keys_of(self._runtime, request) if chunk.node_id is not None}
        arrived = {key: blob for key, blob in prefilled.arrived.items() if key in known}
        queue_storing_arrived(self._runtime, request, replace(prefilled, arrived=arrived))

    def _note(self, order: Order, report: Report, fused_s: float, write_s: float) -> None:
        tokens = report.tokens
        said: dict[str, Any] = {
            "method": report.method,
            "ratio": report.ratio,
            "prompt_tokens": tokens.prompt,
            "reused_tokens": tokens.reused,
            "recomputed_tokens": tokens.recomputed,
            "missing_tokens": tokens.missing,
            "hits": report.hits,
            "misses": report.misses,
            "recomputed_fraction": round(report.recomputed_fraction, 4),
            "computed_fraction": round(report.computed_fraction, 4),
            "fused_ms": round(fused_s * 1e3, 1),
            "load_ms": round(report.timings.load_ms, 1),
            "stall_ms": round(report.timings.stall_ms, 1),
            "write_ms": round(write_s * 1e3, 1),
        }
        if order.plan.wish.label is not None:  # who names himself asks for all of it
            said["served"] = [[letter, len(list(run))] for letter, run in groupby(report.served)]
        self._report(order, said)
        self._stats.add(
            requests=1,
            tokens_prompt=tokens.prompt,
            tokens_reused=tokens.reused,
            tokens_recomputed=tokens.recomputed,
            tokens_missing=tokens.missing,
            fused_seconds=fused_s,
            load_seconds=report.timings.load_ms / 1e3,
            write_seconds=write_s,
        )
        log.info(
            "request %s: %s of %s tokens from the store at new places, %s computed again, %s%s; %.0f ms, %.0f to write",
            order.request_id, f"{tokens.reused + tokens.recomputed:,}", f"{tokens.prompt:,}", f"{tokens.recomputed:,}",
            report.method, "" if report.ratio is None else f" {report.ratio:.2f}", fused_s * 1e3, write_s * 1e3,
        )  # fmt: skip

    def _report(self, order: Order, said: dict[str, Any]) -> None:
        """What went wrong first is not hidden by what was done about it."""
        first = self._reports.prompts.setdefault(order.request_id, said)
        if order.plan.wish.label is not None:
            self._reports.told[order.plan.wish.label] = first

    def _encode(self, passage: Ids, collection: str, node_id: str | None, is_idle: bool = False) -> None:
        """Store a passage's KV, encoded alone behind the canonical prefix, unless its node was deleted meanwhile.

        is_idle: others may have it by now, and be waited for; a prompt's were asked for when it came.
        """
        runtime, prefix = self._runtime, self._runtime.canonical_prefix
        try:
            runtime.check_length(len(prefix) + len(passage), "a passage behind its prefix")
            key = runtime.key_of(prefix, passage, collection)
            nodes = Nodes(runtime, collection)
            if not nodes.claim(node_id, passage, key) or runtime.store.contains(key):
                return
            if is_idle and nodes.fetched(key, passage, prefix, node_id):
                return
            if self._encoder is None:
                self._encoder = ChunkEncoder(runtime.decoder, prefix)
            self._stats.add(encoded=int(nodes.keep(key, self._encoder.encode(passage), node_id)))
        except Exception as error:
            log.warning("a passage of %d tokens could not be encoded: %s", len(passage), error)

    # --- what vLLM takes after each step

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def take_reports(self) -> Fused | None:
        reports, self._reports = self._reports, Fused()
        return reports if reports.prompts or reports.refusal else None

    def take_stats(self) -> FusedStats | None:
        stats, self._stats = self._stats, FusedStats()
        return None if stats.is_empty() else replace(stats)


def _reason(begin: Callable[[], None]) -> str | None:
    """Why that fails; None if it does not."""
    try:
        begin()
    except RagBlendError as error:
        return str(error)
    except Exception as error:
        log.warning("RAGBlend could not begin", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _by_hand() -> Iterator[None]:
    """How vLLM's modules are called here, one by one and with any number of rows.

    Not compiled: each norm would be, by itself and anew for some of the shapes, which takes seconds in the midst of
    requests. In no inference mode: the buffers are filled by the loader's threads, which are in none.
    """
    with torch.compiler.set_stance("force_eager"), torch.inference_mode(False):
        yield
