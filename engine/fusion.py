"""The one layer loop: compute the chosen rows against the fused KV (CacheBlend §4.2, §5).

Every method runs through `fused_prefill`; `full` is the policy that keeps every row. A policy may have some rows run
first, through the KV as it was stored, to collect what they attend to (a probe, design section 5), in the same loop.
"""

import threading
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ragblend.engine.attention import Collect, Collector
from ragblend.engine.cache import Append, FusedCache, LayerLeft, NewKV, Scatter
from ragblend.engine.correction import Correction
from ragblend.engine.decoder import Decoder, RowBlock
from ragblend.engine.loader import LayerLoader
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.evidence import COLLECTED_ROWS, Attention, Evidence, Probed
from ragblend.engine.trace import Recorder
from ragblend.kvstore.errors import Cancelled, UsageError

# More rows than this pass through a layer in several blocks. That changes nothing they compute (a row sees only what is
# before it, and blocks are in order), and keeps activations small beside the KV.
BLOCK_ROWS = 1024


@dataclass
class Spent:
    """What the loop did: layer-rows that were computed.

    layer_rows: all; stored_layer_rows: of stored tokens; again_layer_rows: of fresh tokens, in the probe, that were
    computed again after it. recomputed: stored tokens computed through the last layer. probe_rows: of the probe.
    rows: (R,) those that the last layer computed.
    """

    layer_rows: float = 0.0
    stored_layer_rows: float = 0.0
    again_layer_rows: float = 0.0
    recomputed: int = 0
    probe_rows: int = 0
    rows: Tensor | None = None


@dataclass(frozen=True)
class Work:
    """Rows (R,) before a layer, hidden (1, R, hidden), and the blocks in which they pass.

    stored: how many of the rows are of stored tokens; correction: what they bring about.
    """

    rows: Tensor
    hidden: Tensor
    blocks: list[RowBlock]
    stored: int
    correction: Correction | None = None


@dataclass(frozen=True)
class Settled:
    """What a probe has computed for good: all rows before position `tokens`; of these, rows (R,) with hidden
    (1, R, hidden) have still to pass `layer` and those behind it.
    """

    tokens: int = 0
    layer: int = -1
    rows: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True)
class Run:
    """One request on its way: what every step of the loop needs."""

    decoder: Decoder
    plan: Plan
    policy: Policy
    cache: FusedCache
    loader: LayerLoader
    recorder: Recorder
    cancel: threading.Event | None
    spent: Spent = field(default_factory=Spent)

    def check_cancelled(self) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled("the prefill was cancelled")


@torch.inference_mode()
def fused_prefill(
    decoder: Decoder,
    plan: Plan,
    policy: Policy,
    cache: FusedCache,
    loader: LayerLoader,
    recorder: Recorder,
    cancel: threading.Event | None = None,
) -> tuple[Tensor, Spent]:
    """Fill the cache for the whole prompt and return the last row's logits, (vocab,) float32.

    The loader must have been started for the same cache. Raises Cancelled between layers, LostChunk from the loader.
    """
    run = Run(decoder, plan, policy, cache, loader, recorder, cancel)
    try:
        probed, settled = _probe(run)
        with recorder.device_part("select", "device"):
            rows = _all_needed(
                run, torch.arange(plan.tokens, device=decoder.device), policy.rows(plan, probed)
            )
        with recorder.device_part("prepare", "device"):
            work = _embedded(run, rows[rows >= settled.tokens] if settled.tokens else rows)
        for layer in range(plan.layers):
            run.check_cancelled()
            work = _layer(run, layer, _joined(run, work, settled) if layer == settled.layer else work)
        run.spent.recomputed += work.stored
        run.spent.rows = work.rows
        with recorder.device_part("head", "device"):
            return decoder.head(work.hidden[:, -1:])[0], run.spent
    finally:
        cache.step = Append()


def _layer(run: Run, layer: int, work: Work) -> Work:
    """Take the rows through one layer, and leave behind those that the policy does not keep."""
    policy, plan, spent, record = run.policy, run.plan, run.spent, run.recorder.device_part
    if policy.peeks(plan, layer):
        spent.stored_layer_rows += plan.attention_share * work.stored
        spent.layer_rows += plan.attention_share * work.rows.numel()
        with record("compute", "device", layer):
            evidence = _peek(run, layer, work)
        with record("select", "device", layer):
            work = _narrowed(run, work, policy.narrow(plan, evidence, layer))
    narrows = policy.narrows(plan, layer)
    with record("compute", "device", layer):
        old = _stored(run, layer, work.rows) if narrows else None
        work = replace(work, hidden=_through(run, layer, work))
    spent.stored_layer_rows += work.stored
    spent.layer_rows += work.rows.numel()
    if old is None:
        return work
    with record("select", "device", layer):
        evidence = Evidence(layer, work.rows, *run.cache.rows(layer, work.rows), *old)
        return _narrowed(run, work, policy.narrow(plan, evidence, layer + 1))


def _all_needed(run: Run, rows: Tensor, chosen: Tensor) -> Tensor:
    """What a policy has chosen of these rows. Raises UsageError where a row would be neither computed nor loaded."""
    if run.policy.times_only:
        return chosen
    left_out = torch.zeros(run.plan.tokens, dtype=torch.bool, device=rows.device)
    left_out[rows] = True
    for span in run.policy.spans(run.plan):
        left_out[span.start : span.stop] = False
    left_out[chosen] = False
    if left_out.any():
        raise UsageError(
            f"the policy {run.policy.name!r} left out {int(left_out.sum())} rows that have no stored KV; what it "
            "returns must hold them all (`needed_rows` names them, `pick_top` adds them)"
        )
    return chosen


def _embedded(run: Run, rows: Tensor, collected: int = 0, absent: Tensor | None = None) -> Work:
    """Rows (R,) before the first layer."""
    return _work(run, rows, run.decoder.embed(run.plan.token_ids[rows]), collected, absent)


def _work(run: Run, rows: Tensor, hidden: Tensor, collected: int = 0, absent: Tensor | None = None) -> Work:
    """Rows (R,) before a layer, cut into blocks, with the correction that they bring about.

    collected: how many of them, the last ones, can have their attention collected; absent (T,) bool: keys that no row
    may attend to.
    """
    decoder, plan = run.decoder, run.plan
    corrects = collected == 0 and run.policy.corrects(plan)
    # All rows in one block take attention's own causal path, which is faster than any mask. And where attention looks
    # at the whole buffers under a mask, what later blocks will write must not be there as garbage: 0 times NaN is NaN.
    # A correction must know of all changes before the first row attends to it.
    whole = rows.numel() == plan.tokens or not decoder.tiles or corrects
    parts = rows.split([rows.numel()] if whole else _block_sizes(rows.numel(), collected))
    last = len(parts) - 1
    blocks = [
        decoder.row_block(part, plan.tokens, hidden, collected if number == last else 0, absent)
        for number, part in enumerate(parts)
    ]
    stored = int((plan.kinds[rows] > Kind.MISSING).sum())
    correction = Correction(decoder, plan, run.policy, run.cache, rows) if corrects else None
    return Work(rows, hidden, blocks, stored, correction)


def _block_sizes(rows: int, collected: int) -> list[int]:
    """Sizes of the blocks; rows whose attention is collected are all in the last one."""
    sizes = [BLOCK_ROWS] * (rows // BLOCK_ROWS) + ([rows % BLOCK_ROWS] if rows % BLOCK_ROWS else [])
    if len(sizes) > 1 and sizes[-1] < collected:
        last = sizes.pop()
        sizes[-1] += last
    return sizes or [0]


def _through(run: Run, layer: int, work: Work, collect: Collect | None = None) -> Tensor:
    """The rows' hidden states behind that layer. Raises LayerLeft where collect does."""
    moved = []
    for block, hidden in _blocks(work):
        run.cache.step = _step(run, work, block)
        moved.append(run.decoder.run_layer(layer, hidden, block, run.cache, collect))
    return moved[0] if len(moved) == 1 else torch.cat(moved, dim=1)


def _peek(run: Run, layer: int, work: Work) -> Evidence:
    """The rows' KV in that layer, which is left before its attention, beside what is stored."""
    keys, values = [], []
    for block, hidden in _blocks(work):
        run.cache.step = replace(_step(run, work, block), peek=True)
        try:
            run.decoder.run_layer(layer, hidden, block, run.cache)
        except NewKV as new:
            keys.append(new.keys)
            values.append(new.values)
    assert len(keys) == len(work.blocks), f"layer {layer} never called the cache"
    new_kv = torch.cat(keys, dim=1), torch.cat(values, dim=1)
    return Evidence(layer, work.rows, *new_kv, *run.cache.rows(layer, work.rows))


def _blocks(work: Work) -> list[tuple[RowBlock, Tensor]]:
    sizes = [block.rows.numel() for block in work.blocks]
    return list(zip(work.blocks, work.hidden.split(sizes, dim=1), strict=True))


def _step(run: Run, work: Work, block: RowBlock) -> Scatter:
    rows = block.rows if block.rows.numel() < run.plan.tokens else None
    return Scatter(rows, run.loader, work.correction)


def _stored(run: Run, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    run.loader.wait(layer)
    return run.cache.rows(layer, rows)


def _narrowed(run: Run, work: Work, keep: Tensor) -> Work:
    """The same work with only the rows `keep`, ascending positions among the current ones."""
    _all_needed(run, work.rows, keep)
    if keep.numel() == work.rows.numel():
        return work
    return _work(run, keep, work.hidden.index_select(1, torch.searchsorted(work.rows, keep)))


def _joined(run: Run, work: Work, settled: Settled) -> Work:
    """The work, with the rows that a probe left before this layer, which stand before all others."""
    if settled.rows is None or settled.hidden is None or not settled.rows.numel():
        return work
    rows = torch.cat([settled.rows, work.rows])
    return _work(run, rows, torch.cat([settled.hidden, work.hidden], dim=1))


def _probe(run: Run) -> tuple[Probed | None, Settled]:
    """The fresh rows that the policy wants to run first, up to the last layer whose attention it collects."""
    policy, plan, spent = run.policy, run.plan, run.spent
    rows = policy.probe_rows(plan)
    if rows is None:
        return None, Settled()
    assert run.decoder.shows_attention, f"{policy.name} collects attention, which this model does not show"
    collected = min(int((rows >= plan.suffix_start).sum()), COLLECTED_ROWS)
    absent = plan.always.clone()
    absent[rows] = False
    blank = absent.nonzero().squeeze(1)
    with run.recorder.device_part("prepare", "device"):
        work = _embedded(run, rows, collected, absent if blank.numel() else None)
    layers = policy.attention_layers(plan)
    ends_early = layers.stop < plan.layers
    scores: dict[int, Tensor] = {}
    for layer in range(layers.stop):
        run.check_cancelled()
        if blank.numel():
            run.cache.blank(layer, blank)
        with run.recorder.device_part("probe", "device", layer):
            leaves = ends_early and layer == layers.stop - 1
            work = (
                _probed_layer(run, layer, work, scores, leaves)
                if layer in layers
                else replace(work, hidden=_through(run, layer, work))
            )
        spent.layer_rows += rows.numel()
    spent.again_layer_rows = rows.numel() * layers.stop
    spent.probe_rows = rows.numel()
    settled = Settled()
    if count := plan.settled_by(rows):
        spent.again_layer_rows -= count * layers.stop
        settled = Settled(plan.settled_tokens)
        if ends_early:  # the last layer was left, and is computed again for those that wait
            settled = Settled(plan.settled_tokens, layers.stop - 1, rows[:count], work.hidden[:, :count])
            spent.again_layer_rows += count
    return Probed(scores, spent.again_layer_rows / plan.layers), settled


def _probed_layer(run: Run, layer: int, work: Work, scores: dict[int, Tensor], leaves: bool) -> Work:
    """Take the probe's rows through one layer, of whose attention the policy makes scores.

    leaves: nothing of the layer is wanted but these, so the rows stay before it.
    """

    def collect(collector: Collector, queries: Tensor, keys: Tensor, scaling: float, weights: Tensor) -> None:
        first = collector.first_key
        attention = Attention(layer, first, queries, keys, scaling, collector.mask, weights)
        found = run.policy.layer_scores(run.plan, attention)
        scores[layer] = torch.nn.functional.pad(found, (first, 0))
        if leaves:
            raise LayerLeft

    try:
        return replace(work, hidden=_through(run, layer, work, collect))
    except LayerLeft:
        return work
