"""The layer loop: computes the chosen rows against the fused KV (CacheBlend §4.2, §5).

Every method runs through `Fusion`; `full` is the policy that keeps every row. A policy may first run some rows over the
stored KV in the same loop, to collect their attention (a probe).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from ragblend.engine.cache import Append, FusedCache, LayerStopped, NewKV, Scatter
from ragblend.engine.correction import Correction
from ragblend.engine.loader import LayerLoader, loader_class
from ragblend.engine.model.attention import AttentionCollector, CollectAttention
from ragblend.engine.model.decoder import BLOCK_ROWS, Decoder, RowBlock
from ragblend.engine.model.device import TransferStream
from ragblend.engine.plan import Plan, TokenKind
from ragblend.engine.scheduling.queue import DeviceTurn
from ragblend.engine.selection.base import COLLECTED_ROWS, Attention, Evidence, Policy, ProbeResult
from ragblend.engine.trace import Recorder
from ragblend.kvstore.errors import UsageError


@dataclass
class ComputeCost:
    """What a prefill computed. A layer-row is one row in one layer.

    layer_rows: all; stored_layer_rows: of stored tokens; repeated_layer_rows: of the probe, if the same rows were
    computed again after it. recomputed: number of stored tokens computed through the last layer. probe_rows: number of
    rows of the probe. rows (R,): positions that the last layer computed.
    """

    layer_rows: float = 0.0
    stored_layer_rows: float = 0.0
    repeated_layer_rows: float = 0.0
    recomputed: int = 0
    probe_rows: int = 0
    rows: Tensor | None = None


@dataclass(frozen=True)
class ActiveRows:
    """The rows (R,) being computed, hidden (1, R, hidden), and the blocks in which they pass a layer.

    stored: number of rows of stored tokens; correct: corrects the KV of rows that are not computed.
    """

    rows: Tensor
    hidden: Tensor
    blocks: list[RowBlock]
    stored: int
    correct: Callable[[int, Tensor, Tensor], None] | None = None


@dataclass(frozen=True)
class SettledRows:
    """The first `tokens` positions, whose KV a probe made final below `layer`.

    rows (R,), hidden (1, R, hidden): those that it ran, which join the others at `layer` (-1: it ran all layers).
    """

    tokens: int = 0
    layer: int = -1
    rows: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True)
class Fusion:
    """The layer loop of one request. loader: started for the same cache."""

    decoder: Decoder
    plan: Plan
    policy: Policy
    cache: FusedCache
    loader: LayerLoader
    recorder: Recorder
    turn: DeviceTurn | None = None
    cost: ComputeCost = field(default_factory=ComputeCost)

    @torch.inference_mode()
    def prefill(self) -> tuple[Tensor, ComputeCost]:
        """Fill the cache for the whole prompt and return the last row's logits, (vocab,) float32.

        Raises Cancelled between layers, LostChunk from the loader.
        """
        plan, policy, record = self.plan, self.policy, self.recorder.part
        try:
            probed, settled = self._probe()
            with record("select", stream="device"):
                every = torch.arange(plan.tokens, device=self.decoder.device)
                rows = self._checked_choice(every, policy.rows(plan, probed))
            with record("prepare", stream="device"):
                work = self._embedded(rows[rows >= settled.tokens] if settled.tokens else rows)
            for layer in range(plan.layers):
                self._between_layers()
                work = self._layer(layer, self._joined(work, settled) if layer == settled.layer else work)
            self.cost.recomputed += work.stored
            self.cost.rows = work.rows
            with record("head", stream="device"):
                return self.decoder.head(work.hidden[:, -1:])[0], self.cost
        finally:
            self.cache.step = Append()

    def _between_layers(self) -> None:
        self.loader.pace()
        if self.turn is not None:
            self.turn.between_layers()

    def _layer(self, layer: int, work: ActiveRows) -> ActiveRows:
        """Run the rows through one layer, and drop those that the policy does not keep."""
        policy, plan, cost, record = self.policy, self.plan, self.cost, self.recorder.part
        if policy.peeks(plan, layer):
            cost.stored_layer_rows += plan.attention_share * work.stored
            cost.layer_rows += plan.attention_share * work.rows.numel()
            with record("compute", layer, stream="device"):
                evidence = self._peek(layer, work)
            with record("select", layer, stream="device"):
                work = self._narrowed(work, policy.narrow(plan, evidence, layer))
        narrows = policy.narrows(plan, layer)
        with record("compute", layer, stream="device"):
            if narrows:
                self.loader.wait(layer)
                old = self.cache.rows(layer, work.rows)
            work = replace(work, hidden=self._hidden_after(layer, work))
        cost.stored_layer_rows += work.stored
        cost.layer_rows += work.rows.numel()
        if not narrows:
            return work
        with record("select", layer, stream="device"):
            evidence = Evidence(layer, work.rows, *self.cache.rows(layer, work.rows), *old)
            return self._narrowed(work, policy.narrow(plan, evidence, layer + 1))

    def _checked_choice(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Return the rows that a policy chose. Raises UsageError if a row would be neither computed nor loaded."""
        if self.policy.measures_time_only:
            return chosen
        left_out = torch.zeros(self.plan.tokens, dtype=torch.bool, device=rows.device)
        left_out[rows] = True
        for span in self.policy.spans(self.plan):
            left_out[span.start : span.stop] = False
        left_out[chosen] = False
        if left_out.any():
            raise UsageError(
                f"the policy {self.policy.name!r} left out {int(left_out.sum())} rows that have no stored KV; it "
                "must return them all (`needed_rows` lists them, `pick_top` adds them)"
            )
        return chosen

    def _embedded(self, rows: Tensor, collected: int = 0, hidden_keys: Tensor | None = None) -> ActiveRows:
        """Rows (R,) before the first layer."""
        return self._active_rows(rows, self.decoder.embed(self.plan.token_ids[rows]), collected, hidden_keys)

    def _active_rows(
        self, rows: Tensor, hidden: Tensor, collected: int = 0, hidden_keys: Tensor | None = None
    ) -> ActiveRows:
        """Rows (R,) before a layer, cut into blocks, with the correction that their changes cause.

        collected: the number of last rows whose attention can be collected; hidden_keys (T,) bool: keys that no row
        sees.
        """
        decoder, plan = self.decoder, self.plan
        if self.policy.exact:
            return self._exact_rows(rows, hidden)
        corrects = collected == 0 and self.policy.corrects(plan)
        # All rows in one block use attention's own causal path, which is faster than any mask. With a mask, attention
        # reads the whole buffers, so rows that later blocks will write must not be garbage: 0 times NaN is NaN. A
        # correction needs all changes before the first row attends.
        is_one_block = rows.numel() == plan.tokens or not decoder.tiles or corrects
        parts = rows.split([rows.numel()] if is_one_block else _block_sizes(rows.numel(), collected))
        last = len(parts) - 1
        blocks = [
            decoder.row_block(part, plan.tokens, hidden, collected if number == last else 0, hidden_keys)
            for number, part in enumerate(parts)
        ]
        stored = int((plan.kinds[rows] > TokenKind.NOT_LOADED).sum())
        correct = Correction(decoder, plan, self.policy, self.cache, rows).apply if corrects else None
        return ActiveRows(rows, hidden, blocks, stored, correct)

    def _exact_rows(self, rows: Tensor, hidden: Tensor) -> ActiveRows:
        """Rows (R,) in blocks that end with a chunk, or with the prompt, and see nothing after them.

        So a chunk's KV depends, bit for bit, only on the tokens up to its end, not on later ones or on stored KV.
        """
        stops = torch.tensor([*self.plan.piece_stops, self.plan.tokens], device=rows.device)
        ends = torch.searchsorted(rows, stops).tolist()
        sizes = [size for begin, end in pairwise([0, *ends]) for size in _block_sizes(end - begin, 0) if size]
        blocks, hiddens = [], hidden.split(sizes, dim=1)
        for part, its_hidden in zip(rows.split(sizes), hiddens, strict=True):
            blocks.append(self.decoder.row_block(part, int(part[-1]) + 1, its_hidden))
        return ActiveRows(rows, hidden, blocks, stored=0)

    def _hidden_after(self, layer: int, work: ActiveRows, collect: CollectAttention | None = None) -> Tensor:
        """The rows' hidden states after that layer. Raises LayerStopped if collect does."""
        outputs = []
        for block, hidden in _blocks(work):
            self.cache.step = self._step(work, block)
            outputs.append(self.decoder.run_layer(layer, hidden, block, self.cache, collect))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _peek(self, layer: int, work: ActiveRows) -> Evidence:
        """The rows' new and stored KV in that layer, which ends before its attention."""
        keys, values = [], []
        for block, hidden in _blocks(work):
            self.cache.step = self._step(work, block, peek=True)
            try:
                self.decoder.run_layer(layer, hidden, block, self.cache)
            except NewKV as new:
                keys.append(new.keys)
                values.append(new.values)
        assert len(keys) == len(work.blocks), f"layer {layer} never called the cache"
        new_kv = torch.cat(keys, dim=1), torch.cat(values, dim=1)
        return Evidence(layer, work.rows, *new_kv, *self.cache.rows(layer, work.rows))

    def _step(self, work: ActiveRows, block: RowBlock, peek: bool = False) -> Scatter:
        rows = block.rows if block.rows.numel() < self.plan.tokens else None
        return Scatter(rows, self.loader.wait, work.correct, peek, block.total_tokens, block.seen)

    def _narrowed(self, work: ActiveRows, keep: Tensor) -> ActiveRows:
        """Only the rows `keep`, ascending positions among the current ones."""
        self._checked_choice(work.rows, keep)
        if keep.numel() == work.rows.numel():
            return work
        return self._active_rows(keep, work.hidden.index_select(1, torch.searchsorted(work.rows, keep)))

    def _joined(self, work: ActiveRows, settled: SettledRows) -> ActiveRows:
        """The rows, preceded by those that a probe stopped before this layer."""
        if settled.rows is None or settled.hidden is None or not settled.rows.numel():
            return work
        rows = torch.cat([settled.rows, work.rows])
        return self._active_rows(rows, torch.cat([settled.hidden, work.hidden], dim=1))

    def _probe(self) -> tuple[ProbeResult | None, SettledRows]:
        """Run the fresh rows that the policy asks for, up to the last layer whose attention it collects."""
        policy, plan, cost = self.policy, self.plan, self.cost
        rows = policy.probe_rows(plan)
        if rows is None:
            return None, SettledRows()
        assert self.decoder.shows_attention, f"{policy.name} needs attention, which this model does not show"
        collected = min(int((rows >= plan.suffix_start).sum()), COLLECTED_ROWS)
        hidden_keys = plan.always.clone()
        hidden_keys[rows] = False
        hidden_positions = hidden_keys.nonzero().squeeze(1)
        with self.recorder.part("prepare", stream="device"):
            work = self._embedded(rows, collected, hidden_keys if hidden_positions.numel() else None)
            seen_keys = policy.probe_keys(plan)
            passing_blocks = work.blocks
            if seen_keys is not None:
                passing_blocks = self._blocks_with_keys(work, seen_keys[~hidden_keys[seen_keys]])
        layers = self._with_attention(policy.attention_layers(plan))
        stop = max(layers, default=-1) + 1
        ends_early = stop < plan.layers
        scores: dict[int, Tensor] = {}
        for layer in range(stop):
            self._between_layers()
            if hidden_positions.numel():
                self.cache.blank(layer, hidden_positions)
            last = layer == stop - 1
            with self.recorder.part("probe", layer, stream="device"):
                if layer in layers:
                    work = self._probed_layer(layer, work, scores, stops=last or seen_keys is not None)
                    cost.layer_rows += rows.numel()
                if layer not in layers or (seen_keys is not None and not last):
                    passing = replace(work, blocks=passing_blocks)
                    work = replace(work, hidden=self._hidden_after(layer, passing))
                    cost.layer_rows += rows.numel()
        cost.repeated_layer_rows = cost.layer_rows  # nothing was computed before
        cost.probe_rows = rows.numel()
        settled = SettledRows()
        if count := plan.settled_rows(rows):
            cost.repeated_layer_rows -= count * stop
            settled = SettledRows(plan.settled_tokens)
            if ends_early:  # the last layer was stopped, and is computed again for these rows
                settled = SettledRows(plan.settled_tokens, stop - 1, rows[:count], work.hidden[:, :count])
                cost.repeated_layer_rows += count
        return ProbeResult(scores, cost.repeated_layer_rows / plan.layers), settled

    def _with_attention(self, wanted: range) -> list[int]:
        """The layers among those wanted that have attention; if none has, the nearest one."""
        layers = self.decoder.attention_layers
        found = [layer for layer in layers if layer in wanted]
        if wanted and not found:
            return [min(layers, key=lambda layer: abs(layer - wanted.start))]
        return found

    def _blocks_with_keys(self, work: ActiveRows, keys: Tensor) -> list[RowBlock]:
        """The blocks, restricted to the keys at positions (S,) up to each block's end: later ones may be unwritten."""
        dtype = work.hidden.dtype
        return [self.decoder.with_keys(block, keys[keys <= block.rows[-1]], dtype) for block in work.blocks]

    def _probed_layer(
        self, layer: int, work: ActiveRows, scores: dict[int, Tensor], stops: bool
    ) -> ActiveRows:
        """Run the probe's rows through one layer, whose attention the policy turns into scores.

        stops: only the scores are needed, so the rows keep their state before the layer.
        """

        def collect(
            collector: AttentionCollector, queries: Tensor, keys: Tensor, scaling: float, weights: Tensor
        ) -> None:
            first = collector.first_key
            attention = Attention(layer, first, queries, keys, scaling, collector.mask, weights)
            found = self.policy.layer_scores(self.plan, attention)
            scores[layer] = torch.nn.functional.pad(found, (first, 0))
            if stops:
                raise LayerStopped

        try:
            return replace(work, hidden=self._hidden_after(layer, work, collect))
        except LayerStopped:
            return work


@contextmanager
def fusing(
    decoder: Decoder,
    plan: Plan,
    policy: Policy,
    transfers: TransferStream,
    pool: ThreadPoolExecutor,
    recorder: Recorder,
    room_tokens: int = 0,
    turn: DeviceTurn | None = None,
) -> Iterator[Fusion]:
    """Context manager: the layer loop with a new cache, and a loader that stops at the end."""
    cache = FusedCache(decoder.geometry, plan.tokens, room_tokens, decoder.device)
    given = cache, decoder, transfers, pool, recorder, policy.moves_keys
    loader = loader_class(transfers)(policy.spans(plan), *given)
    try:
        yield Fusion(decoder, plan, policy, cache, loader, recorder, turn)
    finally:
        loader.finish()


def _block_sizes(rows: int, collected: int) -> list[int]:
    """Sizes of the blocks; rows whose attention is collected are all in the last one."""
    sizes = [BLOCK_ROWS] * (rows // BLOCK_ROWS) + ([rows % BLOCK_ROWS] if rows % BLOCK_ROWS else [])
    if len(sizes) > 1 and sizes[-1] < collected:
        last = sizes.pop()
        sizes[-1] += last
    return sizes or [0]


def _blocks(work: ActiveRows) -> list[tuple[RowBlock, Tensor]]:
    sizes = [block.rows.numel() for block in work.blocks]
    return list(zip(work.blocks, work.hidden.split(sizes, dim=1), strict=True))
