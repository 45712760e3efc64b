"""One prompt, read: find its chunks, plan, decide the ratio, fuse, count; or all of it by the model's own forward."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.config import DEFAULT_RATIO, Report, Timings, TokenCounts
from ragblend.engine.controller import Decision, Workload, decide, ttft_ms
from ragblend.engine.fusion import Fusion, Spent
from ragblend.engine.loader import LostChunk, loader_of
from ragblend.engine.model.device import free_bytes
from ragblend.engine.nodes import Nodes, TokenIds
from ragblend.engine.plan import Kind, Plan, Span, make_plan
from ragblend.engine.prompts.paths import Computed, computed_in, grow, learn, path_of
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.prompts.session import Session
from ragblend.engine.results import Prefilled
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.scheduling.queue import Turn, Worth
from ragblend.engine.selection import ATTENTION_FREE, Policy
from ragblend.engine.trace import Recorder, Trace
from ragblend.kvstore.blob import Blob
from ragblend.kvstore.codec import Part, Source
from ragblend.kvstore.errors import StoreFullError, without_frames
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.memory import held_nbytes
from ragblend.kvstore.remote import Remote, RemoteReader, Wanted
from ragblend.kvstore.tree import match

log = logging.getLogger("ragblend")
Shared = Mapping[ChunkKey, RemoteReader]


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

    @property
    def begins_with(self) -> Session | None:
        """The session whose context is used: by what fuses alone."""
        return None if self.policy.name == "full" or self.policy.exact else self.session


def prefill(
    runtime: Runtime, request: Request, turn: Turn | None = None, answering: bool = False
) -> Prefilled:
    """With the device in hand: fused where the gate allows it, by the model's own forward elsewhere.

    answering: an unfused model's own `generate` comes next and reads the prompt itself, so it is not read here.
    """
    refusal = runtime.refusal(len(request.prompt.token_ids))
    if refusal is not None:
        return _unfused(runtime, request, refusal, turn, answering)
    return _fused(runtime, request, turn)


def claim_of(runtime: Runtime, request: Request, client: str, deadline: float) -> Claim:
    """What the queue must know of a request: what of it is stored, what is computed, again or for the first time, and
    how much memory its context takes.

    Of a model that is not loaded yet nothing is known.
    """
    if not runtime.is_ready:
        return Claim(True, client, deadline=deadline)
    if runtime.queue.order.budget_bytes is None:
        runtime.queue.order.budget_bytes = free_bytes(runtime.device) // 2
    prompt, cached, held, fused = request.prompt, dict[str, int](), 0, 0
    if (session := request.begins_with) and (held := session.common_tokens(prompt.token_ids)):
        cached[f"session {id(session)}"] = held
    with runtime.use.turn():
        path = path_of(runtime, prompt, request.collection) if request.policy.uses_tree and not held else []
        nodes = list(takewhile(runtime.store.contains, (node.key for node, _ in path)))
        cached |= {node.key.digest: len(node.token_ids) for node, _ in path[: len(nodes)]}
        exact = sum(cached.values())
        behind = zip(prompt.chunks[len(nodes) :], prompt.places[len(nodes) :], strict=True)
        for chunk, (_, stop) in () if request.policy.exact else behind:
            ids, salt = chunk.encoded_ids, chunk.collection or request.collection
            keys = [runtime.key_of(each, ids, salt) for each in {prompt.prefix_ids, runtime.canonical_prefix}]
            if stop > held and (key := next(filter(runtime.store.contains, keys), None)):
                cached[key.digest] = len(ids)
                fused += len(chunk.token_ids or ())  # in each place
        runtime.store.rest()  # it may wait for long
    ratio = DEFAULT_RATIO if request.ratio is None else request.ratio
    share = ratio if request.policy.fixed_ratio is None else request.policy.fixed_ratio
    tokens = len(prompt.token_ids)
    nbytes = (tokens + request.room_tokens) * runtime.decoder.geometry.token_bytes
    new_tokens = max(1, round(tokens - exact - (1 - share) * fused))
    return Claim(True, client, cached, new_tokens, nbytes, deadline)


def follow_up(runtime: Runtime, request: Request, prefilled: Prefilled) -> None:
    """What a prompt that was read leaves to do in the background: for when its answer is out."""
    report = prefilled.report
    if report.hits:
        runtime.chores.add(runtime.store.write_uses, worth=Worth.STORE)
    if prefilled.computed:
        if not runtime.chores.awaits(grow):  # each holds a whole context in memory
            runtime.chores.add(partial(grow, runtime, request.collection, prefilled.computed))
    elif request.policy.uses_tree and not runtime.chores.awaits(learn):
        runtime.chores.add(partial(learn, runtime, request.prompt, request.collection))
    follow_arrivals(runtime, request, prefilled)
    for collection, node_ids in runtime.take_unstored().items():
        Nodes(runtime, collection).add_unstored(node_ids)
    if report.misses and request.policy.name != "full" and not request.policy.exact:
        for chunk in request.prompt.chunks:
            if chunk.token_ids:
                Nodes(runtime, chunk.collection or request.collection).add_chore(chunk)
    if report.hits and runtime.store.tiers:
        what = (request.collection, *(chunk.encoded_ids for chunk in request.prompt.chunks))
        runtime.chores.add(partial(_promote, runtime, replace(request, session=None)), what)


def _fused(runtime: Runtime, request: Request, turn: Turn | None) -> Prefilled:
    """A chunk found damaged on the way counts as missing, and the request begins again."""
    begun = time.perf_counter()
    recorder = Recorder(runtime.transfers, begun)
    warning = None
    if request.policy.needs_attention and not runtime.decoder.shows_attention:
        warning = (
            f"{request.policy.name} collects attention, which this model's layers do not show; "
            f"the prompt is served by {ATTENTION_FREE.name}: chunks' first tokens and an even sample, the rest shifted"
        )
        request = replace(request, policy=ATTENTION_FREE)
    with ExitStack() as readers:
        with recorder.part("lookup"):
            shared = _shared(runtime, request, readers)
            plan, decision = _decided(runtime, request, _find(runtime, request, readers, shared))
        while True:
            try:
                logits, cache, spent = _compute(runtime, request, plan, recorder, turn)
                break
            except LostChunk as lost:
                log.warning("%s; it is computed in place", without_frames(lost))
                others = [span for span in plan.spans if span.reader is not None and span.reader.is_lost]
                plan = plan.without([lost.span, *others])  # each would have all begin again
        arrived = {key: blob for key, reader in shared.items() if (blob := reader.blob) is not None}
    runtime.store.rest()  # an answer is decoded now, for long
    runtime.transfers.synchronize()
    prefill_ms = (time.perf_counter() - begun) * 1e3
    trace = recorder.finish()
    report = _report(request, plan, decision, spent, trace)
    timings = replace(report.timings, prefill_ms=prefill_ms, ttft_ms=prefill_ms)
    report = replace(report, warning=warning, timings=timings)
    computed = list[Computed]()
    if request.policy.exact:
        computed = computed_in(cache, path_of(runtime, request.prompt, request.collection), plan.spans)
    # What a session holds was fused before: it is not exact either.
    approximate = spent.recomputed < plan.candidate_tokens or any(span.held for span in plan.spans)
    sure = request.policy.sure if approximate else 0.0
    return Prefilled(request.prompt, logits, cache, report, computed, arrived, sure)


def _shared(runtime: Runtime, request: Request, readers: ExitStack) -> Shared:
    """What others have of the chunks that are not stored here, asked for at once."""
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


def _find(runtime: Runtime, request: Request, readers: ExitStack, shared: Shared) -> tuple[Span, ...]:
    """What the session or the knowledge tree has of the prompt's beginning, and every chunk behind that: its place, and
    its stored KV, opened.
    """
    prompt, policy, spans, begin = request.prompt, request.policy, list[Span](), 0
    prefix, everything = prompt.prefix_ids, prompt.token_ids
    if request.begins_with is not None:
        held = request.begins_with.span(prompt, runtime.decoder)
        if held is not None:
            spans, begin = [held], held.stop
    if policy.uses_tree and not spans:
        path = [node for node, _ in path_of(runtime, prompt, request.collection)]
        for node, source in zip(path, match(runtime.store, path, runtime.decoder.geometry), strict=False):
            readers.enter_context(source)
            spans.append(Span(node.start, len(node.token_ids), source, exact=True))
            begin = node.stop
    for segment, offset in zip(prompt.segments, prompt.offsets, strict=True):
        if not isinstance(segment, Chunk) or not segment.token_ids or offset < begin:
            continue
        if policy.exact:
            spans.append(Span(offset, len(segment.token_ids), None))
            continue
        collection, skipped = segment.collection or request.collection, segment.skipped
        reader, behind = _open(runtime, prefix, segment.encoded_ids, collection, shared)
        exact = reader is not None and behind + segment.encoded_ids[:skipped] == everything[:offset]
        if reader is not None:
            if segment.whole is not None:
                reader = Part(reader, skipped, len(segment.token_ids))
            readers.enter_context(reader)
        spans.append(Span(offset, len(segment.token_ids), reader, exact))
    return tuple(spans)


def _open(
    runtime: Runtime, prefix: tuple[int, ...], token_ids: tuple[int, ...], collection: str, shared: Shared
) -> tuple[Source | None, tuple[int, ...]]:
    """The chunk's KV encoded behind this prompt's prefix, or else behind the canonical one; here, or else shared."""
    store, geometry, canonical = runtime.store, runtime.decoder.geometry, runtime.canonical_prefix
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


def _decided(runtime: Runtime, request: Request, spans: tuple[Span, ...]) -> tuple[Plan, Decision]:
    """The plan at the ratio that was asked for, or that the controller chose."""
    decoder, policy = runtime.decoder, request.policy
    ids = torch.tensor(request.prompt.token_ids, device=decoder.device)
    layers = decoder.geometry.layers
    figures = runtime.tokenizing.figure_rows(request.prompt)
    plan = make_plan(ids, spans, layers, 0.0, decoder.attention_share, request.seed, figures)
    asked = request.ratio if policy.fixed_ratio is None else policy.fixed_ratio
    profile, remote = runtime.profile, runtime.store.remote
    if remote is not None:
        plan = _in_time(plan, remote)
        if profile is not None and (rate := remote.bytes_per_s) is not None:
            profile, near = profile.beside(remote.name, rate), _without_remote(plan)
            ratio = DEFAULT_RATIO if asked is None else asked
            if ttft_ms(profile, _work(policy, near), ratio) < ttft_ms(profile, _work(policy, plan), ratio):
                plan = near
    decision = decide(profile, _work(policy, plan), asked, DEFAULT_RATIO)
    # What a session holds is no reason to recompute more of the chunks that are new.
    held = sum(span.length for span in spans if span.held)
    new = plan.stored_tokens - (0 if policy.fixed_ratio is not None else held)
    return replace(plan, budget=round(decision.ratio * new)), decision


def _work(policy: Policy, plan: Plan) -> Workload:
    """What the plan has a prompt load, and compute at a ratio."""
    loaded: dict[str, int] = {}
    for span in policy.spans(plan):
        assert span.reader is not None
        loaded[span.reader.tier] = loaded.get(span.reader.tier, 0) + held_nbytes(span.reader)
    return Workload(plan.tokens, plan.layers, loaded, lambda ratio: policy.passes(plan.at(ratio)))


def _in_time(plan: Plan, remote: Remote) -> Plan:
    """Without what would not come within the time-out, at the throughput that was measured lately."""
    nbytes, late = 0, list[Span]()
    for span in _remote_spans(plan):
        assert span.reader is not None
        its_bytes = held_nbytes(span.reader)
        if remote.fits(nbytes + its_bytes):
            nbytes += its_bytes
        else:
            late.append(span)
    return plan.without(late) if late else plan


def _without_remote(plan: Plan) -> Plan:
    return plan.without(_remote_spans(plan))


def _remote_spans(plan: Plan) -> list[Span]:
    return [span for span in plan.spans if span.reader is not None and span.reader.tier == Remote.name]


def _compute(
    runtime: Runtime, request: Request, plan: Plan, recorder: Recorder, turn: Turn | None
) -> tuple[Tensor, FusedCache, Spent]:
    decoder, policy, spans = runtime.decoder, request.policy, request.policy.spans(plan)
    cache = FusedCache(decoder.geometry, plan.tokens, request.room_tokens, decoder.device)
    given = cache, decoder, runtime.transfers, runtime.readers, recorder, policy.moves_keys
    loader = loader_of(runtime.transfers)(spans, *given)
    try:
        logits, spent = Fusion(decoder, plan, policy, cache, loader, recorder, turn).prefill()
    finally:
        loader.finish()
    return logits, cache, spent


def follow_arrivals(runtime: Runtime, request: Request, prefilled: Prefilled) -> None:
    """Have what came from the shared store kept here, unless others lie in memory for that."""
    if prefilled.arrived and not runtime.chores.awaits(_keep_arrived):
        runtime.chores.add(partial(_keep_arrived, runtime, request, prefilled.arrived), worth=Worth.STORE)


def _keep_arrived(runtime: Runtime, request: Request, arrived: Mapping[ChunkKey, Blob]) -> None:
    """Store here what a prompt read from the shared store."""
    try:
        for chunk, _, key in keys_of(runtime, request):
            if key in arrived:
                Nodes(runtime, chunk.collection or request.collection).keep_blob(chunk, arrived[key])
    except StoreFullError as error:
        log.warning("what came from the shared store is not kept: %s", error)


def _promote(runtime: Runtime, request: Request) -> None:
    """Bring what was used one tier up."""
    prompt, geometry = request.prompt, runtime.fingerprint.geometry
    for node, _ in path_of(runtime, prompt, request.collection) if request.policy.uses_tree else ():
        with runtime.use.turn():
            runtime.store.promote(node.key, node.token_ids, geometry, node.start, node.parent)
    for chunk, prefix, key in () if request.policy.exact else keys_of(runtime, request):
        with runtime.use.turn():
            runtime.store.promote(key, chunk.encoded_ids, geometry, len(prefix))


def keys_of(runtime: Runtime, request: Request) -> Iterator[tuple[Chunk, TokenIds, ChunkKey]]:
    """Every chunk with each prefix that its KV may have been encoded behind, and the key of that."""
    for chunk in request.prompt.chunks:
        for prefix in {request.prompt.prefix_ids, runtime.canonical_prefix} if chunk.token_ids else ():
            collection = chunk.collection or request.collection
            yield chunk, prefix, runtime.key_of(prefix, chunk.encoded_ids, collection)


def _unfused(
    runtime: Runtime, request: Request, warning: str, turn: Turn | None, answering: bool
) -> Prefilled:
    """How a model that cannot be fused is served. Its cache is not kept: not all kinds go back to the prompt."""
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


def _report(request: Request, plan: Plan, decision: Decision, spent: Spent, trace: Trace) -> Report:
    """What was done. The ratio that was spent is of stored tokens, and of fresh ones computed twice for choosing."""
    found = [span.reader is not None for span in plan.spans if not span.held]
    spent_rows = spent.stored_layer_rows + spent.again_layer_rows
    counts = TokenCounts(
        prompt=plan.tokens,
        reused=plan.stored_tokens - spent.recomputed,
        recomputed=spent.recomputed,
        fresh=plan.always_tokens - plan.missing_tokens,
        missing=plan.missing_tokens,
    )
    parts = {f"{part}_ms": trace.total_ms(part) for part in ("load", "stall", "move", "select", "probe")}
    return Report(
        request.policy.name,
        decision.ratio if request.policy.fixed_ratio is None else None,
        counts,
        spent_rows / (plan.layers * plan.stored_tokens) if plan.stored_tokens else 0.0,
        Timings(**parts),
        hits=sum(found),
        misses=len(found) - sum(found),
        decision=decision,
        trace=trace,
        probe_rows=spent.probe_rows,
        computed_fraction=spent.layer_rows / (plan.layers * plan.tokens),
        served=_served(plan, spent),
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
