"""Corrections: what a policy adds to stored KV that is not computed again, from what changed where it was."""

from functools import partial

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoder import Decoder
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.rope import turn_
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.evidence import Change


class Correction:
    """Asks the policy in each layer, and turns what it answers to where each row stands.

    rows (R,): all rows that are being computed, in one go; those of them that were stored are what it learns from.
    done (T,) bool: rows that are to stay as they are.
    """

    def __init__(
        self,
        decoder: Decoder,
        plan: Plan,
        policy: Policy,
        cache: FusedCache,
        rows: Tensor,
        done: Tensor | None = None,
    ) -> None:
        self._decoder, self._plan, self._policy, self._cache = decoder, plan, policy, cache
        self._at = (plan.kinds[rows] == Kind.REUSABLE).nonzero().squeeze(1)
        self._rows = rows[self._at]
        open_rows = plan.candidates if done is None else plan.candidates & ~done
        where = open_rows.nonzero().squeeze(1)
        self._start, self._stop = (int(where[0]), int(where[-1]) + 1) if where.numel() else (0, 0)
        self._gets = self._exceptions(open_rows)
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}

    def apply(self, layer: int, new_keys: Tensor, new_values: Tensor) -> None:
        """Correct one layer's stored KV in the cache; new_* (H, R, D) are about to be written over it."""
        if self._start == self._stop:
            return
        start, stop = self._start, self._stop
        keys, values = self._cache.span(layer, 0, self._plan.tokens)
        moved = new_keys.index_select(1, self._at).float() - keys.index_select(1, self._rows).float()
        changed = new_values.index_select(1, self._at).float() - values.index_select(1, self._rows).float()
        still = partial(self._turned, layer, sign=-1)
        run = slice(start, stop)
        change = Change(
            layer,
            self._rows,
            still(moved, self._rows),
            changed,
            start,
            stop,
            still(keys[:, run], run),
            values[:, run].float(),
            still,
        )
        shift = self._policy.correct(self._plan, change)
        if shift is not None:
            moved = self._turned(layer, shift.keys, run)
            # Whole runs are added to, the rows that will be written over included: that is faster than picking rows.
            changed = shift.values
            if self._gets is not None:
                moved, changed = moved.masked_fill_(~self._gets, 0), changed.masked_fill(~self._gets, 0)
            keys[:, run] += moved
            values[:, run] += changed

    def _exceptions(self, open_rows: Tensor) -> Tensor | None:
        """(n, 1) bool: rows of the run that may be changed; None if the others are all written over anyway."""
        gets = (open_rows | self._plan.always)[self._start : self._stop, None]
        return None if bool(gets.all()) else gets

    def _turned(self, layer: int, keys: Tensor, positions: Tensor | slice, sign: int = 1) -> Tensor:
        """Keys (H, n, D) turned from position 0 to theirs (sign 1) or back (-1): float32, a tensor of its own."""
        cos, sin = self._table(layer)
        turned = keys.to(torch.float32, copy=True)
        turn_(turned, cos[positions], sign * sin[positions], self._decoder.rope(layer))
        return turned

    def _table(self, layer: int) -> tuple[Tensor, Tensor]:
        """cos and sin, (T, R/2) float32, of every position in layers of that type."""
        kind = self._decoder.layer_types[layer]
        if kind not in self._tables:
            inv_freq = self._decoder.ropes[kind]
            positions = torch.arange(self._plan.tokens, device=inv_freq.device, dtype=inv_freq.dtype)
            angles = positions[:, None] * inv_freq
            self._tables[kind] = angles.cos(), angles.sin()
        return self._tables[kind]
