"""One request, run: look up its chunks, plan, load and fuse; or read it all with the model's own forward."""

import logging
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.config import DEFAULT_RATIO, Report, Timings, TokenCounts
from ragblend.engine.controller import Decision, DeviceProfile, Workload, decide
from ragblend.engine.decoder import Decoder
from ragblend.engine.device import Lane
from ragblend.engine.fusion import fused_prefill, probe_size
from ragblend.engine.loader import LayerLoader, LostChunk
from ragblend.engine.plan import Kind, Plan, Span, make_plan
from ragblend.engine.prompt import Chunk, Literal, Prompt
from ragblend.engine.results import Prefilled
from ragblend.engine.selection import Policy, policy_named
from ragblend.engine.session import Session
from ragblend.engine.trace import Recorder, Trace
from ragblend.engine.work import Spent
from ragblend.kvstore.chunks import ChunkKey
from ragblend.kvstore.errors import Cancelled
from ragblend.kvstore.held import Held, held_nbytes
from ragblend.kvstore.reader import ChunkReader
from ragblend.kvstore.store import KVStore

log = logging.getLogger("ragblend")
BLIND_METHOD = "cacheblend"  # where a policy would have to see attention, and the model does not show it
KeyOf = Callable[
    [tuple[int, ...], tuple[int, ...], str], ChunkKey
]  # (encoding prefix, token ids, collection)


@dataclass(frozen=True)
class Request:
    """What is asked of the engine: a tokenized prompt, the policy and ratio to serve it with, and whose KV to use."""

    prompt: Prompt
    policy: Policy
    ratio: float | None  # None: what the controller finds, DEFAULT_RATIO at least
    collection: str
    seed: int = 0
    room_tokens: int = 256
    session: Session | None = None


@dataclass
class Server:
    """Runs requests on one decoder, with one store. canonical_prefix: ids that chunks are encoded behind by default."""

    decoder: Decoder
    store: KVStore
    lane: Lane
    pool: ThreadPoolExecutor
    key_of: KeyOf
    canonical_prefix: tuple[int, ...]
    profile: DeviceProfile | None = None

    def prefill(self, request: Request, cancel: threading.Event | None = None) -> Prefilled:
        """Read the prompt. A chunk found damaged on the way counts as missing, and the request begins again."""
        begun = time.perf_counter()
        recorder = Recorder(self.lane, begun)
        request, warning = self._able(request)
        with ExitStack() as readers:
            with recorder.part("lookup"):
                spans, hits, misses = self._spans(request, readers)
                plan, decision = self._decided(request, spans)
            while True:
                try:
                    logits, cache, spent = self._fuse(plan, request, recorder, cancel)
                    break
                except LostChunk as lost:
                    log.warning("%s; it is computed in place", lost)
                    plan, hits, misses = plan.without(lost.span), hits - 1, misses + 1
        self.lane.synchronize()
        prefill_ms = (time.perf_counter() - begun) * 1e3
        trace = recorder.finish()
        report = Report(
            request.policy.name,
            decision.ratio if request.policy.fixed_ratio is None else None,
            _counts(plan, spent),
            _fraction(plan, spent),
            _timings(trace, prefill_ms),
            hits,
            misses,
            warning=warning,
            decision=decision,
            trace=trace,
            probe_rows=spent.probe_rows,
            computed_fraction=spent.layer_rows / (plan.layers * plan.tokens),
            served=_served(plan, spent),
        )
        return Prefilled(request.prompt, logits, cache, report)

    def _able(self, request: Request) -> tuple[Request, str | None]:
        """The request as this model can serve it, and what is otherwise than asked."""
        if self.decoder.watches or not request.policy.looks:
            return request, None
        warning = (
            f"{request.policy.name} must see what rows look at, which this model's layers do not show; "
            f"the prompt is served by {BLIND_METHOD}"
        )
        return replace(request, policy=policy_named(BLIND_METHOD)), warning

    def _decided(self, request: Request, spans: tuple[Span, ...]) -> tuple[Plan, Decision]:
        """The plan at the ratio that was asked for, or that the controller chose."""
        plan = make_plan(
            torch.tensor(request.prompt.token_ids, device=self.decoder.device),
            spans,
            self.decoder.geometry.layers,
            0.0,
            self.decoder.attention_share,
            request.seed,
        )
        fixed = request.policy.fixed_ratio
        asked = request.ratio if fixed is None else fixed
        typical = replace(plan, ratio=DEFAULT_RATIO if asked is None else asked)
        decision = decide(self.profile, self._workload(typical, request.policy), asked, DEFAULT_RATIO)
        # What a session holds is no reason to recompute more of the chunks that are new.
        held = sum(span.length for span in spans if span.held)
        share = 1 - held / plan.stored_tokens if held and fixed is None else 1.0
        return replace(plan, ratio=decision.ratio * share), decision

    def _workload(self, plan: Plan, policy: Policy) -> Workload:
        loaded: dict[str, int] = {}
        for span in policy.spans(plan):
            assert span.reader is not None
            tier = span.reader.tier
            loaded[tier] = loaded.get(tier, 0) + held_nbytes(span.reader)
        rows, probed_layers, settled, watched = probe_size(plan, policy) if self.profile else (0, 0, 0, 0.0)
        layers = range(plan.layers if self.profile else 0)  # without one nothing is predicted
        whole = next((layer + plan.attention_share for layer in layers if policy.peeks(plan, layer)), 0.0)
        always, candidates = plan.always_tokens, plan.candidate_tokens
        if policy.fixed_ratio == 1.0:  # what such a one computes is known: `full` an exact chunk as well
            always, candidates = policy.rows(plan).numel(), 0
        return Workload(
            plan.tokens,
            always,
            candidates,
            plan.stored_tokens,
            plan.layers,
            loaded,
            whole,
            rows,
            probed_layers,
            settled,
            candidates if self.profile and policy.corrects(plan) else 0,
            watched,
        )

    def _fuse(
        self, plan: Plan, request: Request, recorder: Recorder, cancel: threading.Event | None
    ) -> tuple[Tensor, FusedCache, Spent]:
        policy, geometry = request.policy, self.decoder.geometry
        cache = FusedCache(geometry, plan.tokens, request.room_tokens, self.decoder.device)
        loader = LayerLoader(
            policy.spans(plan),
            cache,
            self.decoder,
            self.lane,
            self.pool,
            recorder,
            policy.moves_keys,
        )
        try:
            logits, spent = fused_prefill(self.decoder, plan, policy, cache, loader, recorder, cancel)
        finally:
            loader.finish()
        return logits, cache, spent

    def _spans(self, request: Request, readers: ExitStack) -> tuple[tuple[Span, ...], int, int]:
        """Every chunk's place and its stored KV, opened; and how many chunks have some, and have none."""
        prompt, spans = request.prompt, []
        prefix = prompt.prefix_ids
        everything = prompt.token_ids
        held = self._held(request)
        for segment, offset in zip(prompt.segments, prompt.offsets, strict=True):
            if not isinstance(segment, Chunk) or not segment.token_ids or (held and offset < held.stop):
                continue
            collection = segment.collection or request.collection
            reader, behind = self._open(prefix, segment.token_ids, collection)
            if reader is not None:
                readers.enter_context(reader)
            exact = reader is not None and behind == everything[:offset]
            spans.append(Span(offset, len(segment.token_ids), reader, exact))
        hits = sum(span.reader is not None for span in spans)
        return (held, *spans) if held else tuple(spans), hits, len(spans) - hits

    def _held(self, request: Request) -> Span | None:
        """What the conversation has in memory of this prompt's beginning; `full` reads all the same."""
        if request.session is None or request.policy.name == "full":
            return None
        return request.session.span(request.prompt, self.decoder)

    def _open(
        self, prefix: tuple[int, ...], token_ids: tuple[int, ...], collection: str
    ) -> tuple[ChunkReader | Held | None, tuple[int, ...]]:
        """The chunk's KV encoded behind this prompt's prefix, or else behind the canonical one."""
        key = self.key_of(prefix, token_ids, collection)
        if prefix != self.canonical_prefix and self.store.contains(key):
            reader = self.store.open_chunk(key, token_ids)
            if reader is not None:
                return reader, prefix
        key = self.key_of(self.canonical_prefix, token_ids, collection)
        return self.store.open_chunk(key, token_ids), self.canonical_prefix


def overhead_ms(server: Server, repeats: int = 5) -> float:
    """What the smallest of requests takes beside its layers: planning before them, reporting behind them."""
    request = Request(Prompt([Literal(token_ids=(0,))]), policy_named("full"), None, "")
    times = []
    for _ in range(repeats):
        report = server.prefill(request).report
        assert report.trace is not None
        layers = sum(report.trace.total_ms(part) for part in ("prepare", "select", "compute", "head"))
        times.append(max(0.0, report.timings.prefill_ms - layers))
    return statistics.median(times)


def prefill_natively(
    model: Any, request: Request, warning: str, cancel: threading.Event | None = None
) -> Prefilled:
    """Full prefill by the model's own forward: how a model that cannot be fused is served.

    Its cache is not kept: it may be of any kind, and not all kinds can be taken back to the prompt.
    """
    begun = time.perf_counter()
    if cancel is not None and cancel.is_set():
        raise Cancelled("the prefill was cancelled")
    ids = torch.tensor([request.prompt.token_ids], device=model.device)
    with torch.inference_mode():
        out = model(ids, use_cache=False, logits_to_keep=1)
    elapsed = (time.perf_counter() - begun) * 1e3
    report = _native_report(request, Timings(prefill_ms=elapsed, ttft_ms=elapsed), warning)
    return Prefilled(request.prompt, out.logits[0, -1].float(), None, report)


def left_to_generate(request: Request, warning: str) -> Prefilled:
    """A prompt that `generate` will read by itself: no logits yet, (0,), and no cache."""
    return Prefilled(request.prompt, torch.empty(0), None, _native_report(request, Timings(), warning))


def _native_report(request: Request, timings: Timings, warning: str) -> Report:
    tokens = len(request.prompt.token_ids)
    counts = TokenCounts(prompt=tokens, fresh=tokens)
    return Report("full", None, counts, 0.0, timings, warning=warning, served="f" * tokens)


def _counts(plan: Plan, spent: Spent) -> TokenCounts:
    recomputed = spent.recomputed
    return TokenCounts(
        prompt=plan.tokens,
        reused=plan.stored_tokens - recomputed,
        recomputed=recomputed,
        fresh=plan.always_tokens - plan.missing_tokens,
        missing=plan.missing_tokens,
    )


def _served(plan: Plan, spent: Spent) -> str:
    """How each token was served, a letter each."""
    kinds = plan.kinds.cpu()
    letters = torch.full(kinds.shape, ord("r"), dtype=torch.uint8)
    if spent.rows is not None:
        letters[spent.rows.cpu()] = ord("c")
    letters[kinds == Kind.FRESH] = ord("f")
    letters[kinds == Kind.MISSING] = ord("m")
    return bytes(letters.tolist()).decode("ascii")


def _fraction(plan: Plan, spent: Spent) -> float:
    """What was computed of stored tokens, or twice of fresh ones, for choosing."""
    spent_rows = spent.stored_layer_rows + spent.again_layer_rows
    return spent_rows / (plan.layers * plan.stored_tokens) if plan.stored_tokens else 0.0


def _timings(trace: Trace, prefill_ms: float) -> Timings:
    return Timings(
        load_ms=trace.total_ms("load"),
        stall_ms=trace.total_ms("stall"),
        move_ms=trace.total_ms("move"),
        select_ms=trace.total_ms("select"),
        probe_ms=trace.total_ms("probe"),
        prefill_ms=prefill_ms,
        ttft_ms=prefill_ms,
    )
