"""Prefills one prompt: find its KV, plan, decide the ratio, fuse, report; or run the model's own forward.

The main path is `prefill` -> `Fusion.prefill`, the layer loop.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from ragblend.engine.config import DEFAULT_RATIO, Report, Timings, TokenCounts
from ragblend.engine.controller import Decision, DeviceProfile, Workload, chunks_to_compute, decide
from ragblend.engine.fusion import ComputeCost, Fusion, fusing
from ragblend.engine.loader import LostChunk
from ragblend.engine.nodes import TokenIds
from ragblend.engine.plan import Plan, Span, TokenKind, make_plan
from ragblend.engine.prompts.paths import computed_nodes, path_of
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.request import Request, keys_of
from ragblend.engine.results import Prefilled
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import DeviceTurn
from ragblend.engine.selection import ATTENTION_FREE, METHODS, Policy
from ragblend.engine.trace import Recorder, Trace
from ragblend.kvstore.codec import Part, Source
from ragblend.kvstore.errors import without_traceback
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.memory import held_nbytes
from ragblend.kvstore.remote import Remote, RemoteReader, Wanted
from ragblend.kvstore.tree import match

log = logging.getLogger("ragblend")
SharedReaders = Mapping[ChunkKey, RemoteReader]


def prefill(
    runtime: Runtime, request: Request, turn: DeviceTurn | None = None, answering: bool = False
) -> Prefilled:
    """Prefill the prompt in this device turn: fused if the gate allows it, else by the model's own forward.

    answering: without fusing, the model's own `generate` follows and prefills the prompt itself.
    """
    refusal = runtime.refusal(len(request.prompt.token_ids))
    if refusal is not None:
        return _prefill_unfused(runtime, request, refusal, turn, answering)
    begun = time.perf_counter()
    recorder = Recorder(runtime.transfers, begun)
    request, warning = _with_supported_policy(runtime, request)
    fusion: Fusion | None = None
    with ExitStack() as readers:
        with recorder.part("lookup"):
            shared = _open_shared(runtime, request, readers)
            plan, decision = _plan_and_decide(
                runtime, request, _find_spans(runtime, request, readers, shared)
            )
        while True:
            try:
                given = plan, request.policy, runtime.transfers, runtime.loader_threads, recorder
                with fusing(runtime.decoder, *given, request.room_tokens, turn) as fusion:
                    logits, cost = fusion.prefill()
                break
            except LostChunk as lost:  # treat it as missing and start again
                log.warning("%s; these tokens are computed instead", without_traceback(lost))
                fusion = None  # frees its cache before the next one is allocated
                others = [span for span in plan.spans if span.stored is not None and span.stored.is_lost]
                plan = plan.without([lost.span, *others])  # each would start the request again
        arrived = {key: blob for key, reader in shared.items() if (blob := reader.blob) is not None}
    runtime.transfers.synchronize()
    prefill_ms = (time.perf_counter() - begun) * 1e3
    report = _report(request, plan, decision, cost, recorder.finish(), prefill_ms, warning)
    _correct_speeds(runtime, report)
    # A session's context was fused by earlier requests.
    is_approximate = cost.recomputed < plan.candidate_tokens or any(span.held for span in plan.spans)
    sure = request.policy.sure if is_approximate else 0.0
    path = path_of(runtime, request.prompt, request.collection) if request.policy.exact else []
    # Exact KV, which may enter the knowledge tree.
    computed = computed_nodes(runtime.decoder, fusion.cache, path, plan.spans)

    def prefill_other(prompt: Prompt, turn: DeviceTurn) -> Prefilled:
        return prefill(runtime, replace(request, prompt=prompt, policy=METHODS["reuse"], session=None), turn)

    return Prefilled(request.prompt, logits, fusion.cache, report, computed, arrived, sure, prefill_other)


def _correct_speeds(runtime: Runtime, report: Report) -> None:
    """Correct the controller's speeds by what this request took."""
    decision, trace = report.decision, report.trace
    assert decision is not None and trace is not None, "it was fused"
    if len(decision.bytes_by_tier) == 1:  # the times of several tiers cannot be told apart
        ((tier, nbytes),) = decision.bytes_by_tier.items()
        runtime.speeds.record_load(tier, nbytes, trace.busy_ms("load", "copy"))
    predicted, load = decision.predicted_ttft_ms, decision.predicted_load_ms
    if predicted is not None and load is not None and load < predicted / 2:  # mostly computed
        runtime.speeds.record_compute(predicted, report.timings.prefill_ms)


def _with_supported_policy(runtime: Runtime, request: Request) -> tuple[Request, str | None]:
    """The request with a policy that works for this model, and a warning if it is another one."""
    name = request.policy.name
    if not request.policy.needs_attention or runtime.decoder.shows_attention:
        return request, None
    return replace(request, policy=ATTENTION_FREE), (
        f"{name} needs attention weights, which cannot be collected from this model; the prompt is served by "
        f"{ATTENTION_FREE.name}, which recomputes chunks' first tokens and an even sample, and corrects the others"
    )


def _open_shared(runtime: Runtime, request: Request, readers: ExitStack) -> SharedReaders:
    """Readers of the shared store for chunks that are not stored here, all requested at once."""
    store, geometry = runtime.store, runtime.decoder.geometry
    if store.remote is None or request.policy.exact or request.policy.name == "full":
        return {}
    keys = list(keys_of(runtime, request))
    here = {(chunk.collection, chunk.encoded_ids) for chunk, _, key in keys if store.contains(key)}
    wanted = {
        key: Wanted(key, chunk.encoded_ids, geometry, len(prefix))
        for chunk, prefix, key in keys
        if (chunk.collection, chunk.encoded_ids) not in here
    }
    found = store.remote.find(list(wanted.values()))
    for reader in found.values():
        readers.enter_context(reader)
    return found


def _find_spans(
    runtime: Runtime, request: Request, readers: ExitStack, shared: SharedReaders
) -> tuple[Span, ...]:
    """Spans of the prompt, their KV opened: the beginning held by the session or the knowledge tree, then chunks."""
    prompt, policy, spans, begin = request.prompt, request.policy, list[Span](), 0
    if request.used_session is not None:
        held = request.used_session.span(prompt, runtime.decoder)
        if held is not None:
            spans, begin = [held], held.stop
    if policy.uses_tree and not spans:
        path = [node for node, _ in path_of(runtime, prompt, request.collection)]
        for node, source in zip(
            path, match(runtime.store.open_chunk, path, runtime.decoder.geometry), strict=False
        ):
            readers.enter_context(source)
            spans.append(Span(node.start, len(node.token_ids), source, exact=True))
            begin = node.stop
    for segment, offset in zip(prompt.segments, prompt.offsets, strict=True):
        if isinstance(segment, Chunk) and segment.token_ids and offset >= begin:
            if policy.exact:
                spans.append(Span(offset, len(segment.token_ids), None))
            else:
                spans.append(_chunk_span(runtime, request, segment, offset, readers, shared))
    return tuple(spans)


def _chunk_span(
    runtime: Runtime,
    request: Request,
    chunk: Chunk,
    offset: int,
    readers: ExitStack,
    shared: SharedReaders,
) -> Span:
    """The span of a chunk. It is exact if it was encoded after the same tokens as now, and no codec rounded it."""
    prompt, tokens = request.prompt, len(chunk.token_ids or ())
    reader, prefix = _open_chunk(runtime, prompt.prefix_ids, chunk, request.collection_of(chunk), shared)
    if reader is None:
        return Span(offset, tokens, None)
    exact = reader.is_exact and prefix + chunk.encoded_ids[: chunk.skipped] == prompt.token_ids[:offset]
    if chunk.whole is not None:
        reader = Part(reader, chunk.skipped, tokens)
    readers.enter_context(reader)
    return Span(offset, tokens, reader, exact)


def _open_chunk(
    runtime: Runtime, prefix: TokenIds, chunk: Chunk, collection: str, shared: SharedReaders
) -> tuple[Source | None, TokenIds]:
    """The chunk's KV, and the prefix it was encoded after: this prompt's or the canonical one; here or shared."""
    store, geometry, canonical = runtime.store, runtime.decoder.geometry, runtime.canonical_prefix
    token_ids = chunk.encoded_ids
    key = runtime.key_of(prefix, token_ids, collection)
    if prefix != canonical and store.contains(key):
        reader = store.open_chunk(key, token_ids, geometry, len(prefix))
        if reader is not None:
            return reader, prefix
    canonical_key = runtime.key_of(canonical, token_ids, collection)
    reader = store.open_chunk(canonical_key, token_ids, geometry, len(canonical))
    if reader is None and key in shared:
        return shared[key], prefix
    return reader or shared.get(canonical_key), canonical


def _plan_and_decide(runtime: Runtime, request: Request, spans: tuple[Span, ...]) -> tuple[Plan, Decision]:
    """The plan, with the requested ratio or the controller's."""
    decoder, policy = runtime.decoder, request.policy
    figures, layers = runtime.tokenizing.figure_rows(request.prompt), decoder.geometry.layers
    # On the host: the controller asks for many numbers, and each would wait for the device.
    ids = torch.tensor(request.prompt.token_ids)
    plan = make_plan(ids, spans, layers, 0.0, decoder.attention_share, request.seed, figures)
    requested = request.ratio if policy.fixed_ratio is None else policy.fixed_ratio
    profile, remote = runtime.speeds.corrected(runtime.profile), runtime.store.remote
    if profile is not None and remote is not None and (rate := remote.bytes_per_s) is not None:
        profile = profile.with_speeds({remote.name: rate})
    ratio = DEFAULT_RATIO if requested is None else requested
    plan = _without_slow_loads(plan, policy, ratio, profile if runtime.load == "auto" else None, remote)
    decision = decide(profile, _workload(policy, plan), requested, DEFAULT_RATIO)
    if plan.not_loaded_tokens:
        reason = f"computing {plan.not_loaded_tokens} tokens of stored passages is faster than loading them"
        decision = replace(decision, not_loaded=reason)
    # A session's stored tokens must not increase the recomputed share of new chunks.
    budgeted = plan.stored_tokens if policy.fixed_ratio is not None else plan.stored_tokens - plan.held_tokens
    return replace(plan, budget=round(decision.ratio * budgeted)).to(decoder.device), decision


def _workload(policy: Policy, plan: Plan) -> Workload:
    """The controller's view of the plan: stored KV to load, and the rows to compute at a ratio."""
    loaded = Counter[str]()
    for span in policy.spans(plan):
        loaded[span.source.comes_from] += held_nbytes(span.source)
    return Workload(
        plan.tokens, plan.layers, dict(loaded), lambda ratio: policy.passes(plan.with_ratio(ratio))
    )


def _without_slow_loads(
    plan: Plan, policy: Policy, ratio: float, profile: DeviceProfile | None, remote: Remote | None
) -> Plan:
    """The plan without the stored KV that would take longer to load than to compute. Without a profile, only KV is left
    out that would not come from the shared store before its timeout.

    The first to be computed instead are chunks of the slowest tier, and among them those at the front of the prompt,
    where computing is exact. Chunks from the shared store then count as missing, so that they are encoded here.
    """
    spans = [span for span in policy.spans(plan) if not span.held]
    late = _late_spans(spans, remote) if remote is not None else []
    order = [span for span in spans if span not in late]
    if profile is not None:
        speeds = {span.start: profile.tier(span.source.comes_from).bytes_per_s for span in order}
        order.sort(key=lambda span: (speeds[span.start], span.start))
    order, least = [*late, *order], len(late)

    def without(count: int) -> Plan:
        found = plan
        for is_remote in (True, False):
            given_up = [span for span in order[:count] if (span.source.tier == Remote.name) == is_remote]
            found = found.without(given_up, not_loaded=not is_remote) if given_up else found
        return found

    count = least
    if profile is not None and order:
        count = chunks_to_compute(
            profile, lambda count: _workload(policy, without(count)), ratio, least, len(order)
        )
    return without(count)


def _late_spans(spans: Sequence[Span], remote: Remote) -> list[Span]:
    """The spans whose KV would not come from the shared store before its timeout, at the last measured throughput."""
    nbytes, late = 0, list[Span]()
    for span in spans:
        its_bytes = held_nbytes(span.source) if span.source.tier == Remote.name else 0
        if its_bytes and not remote.fits(nbytes + its_bytes):
            late.append(span)
        else:
            nbytes += its_bytes
    return late


def _prefill_unfused(
    runtime: Runtime, request: Request, warning: str, turn: DeviceTurn | None, answering: bool
) -> Prefilled:
    """Full prefill of a model that cannot be fused. Its cache is dropped, because not every kind can be truncated to
    the prompt.
    """
    tokens = len(request.prompt.token_ids)
    counts, served = TokenCounts(prompt=tokens, fresh=tokens), "f" * tokens
    report = Report("full", None, counts, warning=warning, served=served)
    if answering:
        return Prefilled(request.prompt, torch.empty(0), None, report)
    begun = time.perf_counter()
    if turn is not None:
        turn.between_layers()
    model = runtime.loaded.model
    with torch.inference_mode():
        ids = torch.tensor([request.prompt.token_ids], device=model.device)
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    elapsed = (time.perf_counter() - begun) * 1e3
    report = replace(report, timings=Timings(prefill_ms=elapsed, ttft_ms=elapsed))
    return Prefilled(request.prompt, logits, None, report)


def _report(
    request: Request,
    plan: Plan,
    decision: Decision,
    cost: ComputeCost,
    trace: Trace,
    prefill_ms: float,
    warning: str | None,
) -> Report:
    """The report. Fresh tokens' rows that are computed twice because of a probe count as recomputed."""
    found = [span.stored is not None or span.not_loaded for span in plan.spans if not span.held]
    recomputed = (
        cost.stored_layer_rows + cost.repeated_layer_rows
    ) / plan.layers  # rows, averaged over layers
    counts = TokenCounts(
        prompt=plan.tokens,
        reused=plan.stored_tokens - cost.recomputed,
        recomputed=cost.recomputed,
        fresh=plan.always_tokens - plan.missing_tokens - plan.not_loaded_tokens,
        missing=plan.missing_tokens,
        not_loaded=plan.not_loaded_tokens,
    )
    parts = {f"{part}_ms": trace.total_ms(part) for part in ("load", "stall", "move", "select", "probe")}
    ratio = _share(recomputed, plan.stored_tokens - plan.held_tokens)
    return Report(
        request.policy.name,
        ratio if request.policy.fixed_ratio is None else None,
        counts,
        _share(recomputed, plan.stored_tokens),
        Timings(**parts, prefill_ms=prefill_ms, ttft_ms=prefill_ms),
        hits=sum(found),
        misses=len(found) - sum(found),
        warning=warning,
        decision=decision,
        trace=trace,
        probe_rows=cost.probe_rows,
        computed_fraction=cost.layer_rows / (plan.layers * plan.tokens),
        served=_served_letters(plan, cost),
    )


def _share(recomputed: float, stored_tokens: int) -> float:
    return round(recomputed / stored_tokens, 6) if stored_tokens else 0.0


def _served_letters(plan: Plan, cost: ComputeCost) -> str:
    """How each token was served, as one letter each."""
    kinds = plan.kinds.cpu()
    letters = torch.full(kinds.shape, ord("r"), dtype=torch.uint8)
    if cost.rows is not None:
        letters[cost.rows.cpu()] = ord("c")
    letters[kinds == TokenKind.FRESH] = ord("f")
    letters[kinds == TokenKind.MISSING] = ord("m")
    letters[kinds == TokenKind.NOT_LOADED] = ord("n")
    return bytes(letters.tolist()).decode("ascii")
