"""Corrections: what a policy adds to stored KV that is not computed again, from what changed where it was."""

from functools import partial

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoder import Decoder
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.rope import turned
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
        always = plan.always[self._start : self._stop].nonzero().squeeze(1)
        self._unwritten = always + self._start  # in the run, and computed in any case
        self._known: dict[str, object] = {}
        self._tables: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = {}

    def apply(self, layer: int, new_keys: Tensor, new_values: Tensor) -> None:
        """Correct one layer's stored KV in the cache; new_* (H, R, D) are about to be written over it."""
        if self._start == self._stop:
            return
        start, stop, run = self._start, self._stop, slice(self._start, self._stop)
        # They hold what was in memory before, unless a probe has computed them; a product of the whole run takes
        # NaN over into a neighbour: oneDNN reads an odd row of bfloat16 together with the first number behind it.
        if self._unwritten.numel():
            self._cache.blank(layer, self._unwritten)
        keys, values = self._cache.span(layer, 0, self._plan.tokens)
        moved = new_keys.index_select(1, self._at).float() - keys.index_select(1, self._rows).float()
        changed = new_values.index_select(1, self._at).float() - values.index_select(1, self._rows).float()
        still = partial(self._turned, layer, sign=-1)
        change = Change(
            layer=layer,
            rows=self._rows,
            keys=still(moved, self._rows),
            values=changed,
            start=start,
            stop=stop,
            stored_keys=still(_handy(keys[:, run]), run),
            stored_values=_handy(values[:, run]),
            still=still,
            known=self._known,
        )
        shift = self._policy.correct(self._plan, change)
        if shift is not None:
            moved, changed = self._turned(layer, shift.keys, run), shift.values
            # Whole runs are added to, the rows that will be written over included: that is faster than picking rows.
            if self._gets is not None:
                moved, changed = moved.masked_fill_(~self._gets, 0), changed.masked_fill(~self._gets, 0)
            keys[:, run].add_(moved)
            values[:, run].add_(changed)

    def _exceptions(self, open_rows: Tensor) -> Tensor | None:
        """(n, 1) bool: rows of the run that may be changed; None if the others are all written over anyway."""
        gets = (open_rows | self._plan.always)[self._start : self._stop, None]
        return None if bool(gets.all()) else gets

    def _turned(self, layer: int, keys: Tensor, positions: Tensor | slice, sign: int = 1) -> Tensor:
        """Keys (H, n, D) turned from position 0 to theirs (sign 1) or back (-1): of their dtype, of its own."""
        cos, sin = self._table(layer, keys.dtype)
        return turned(keys, cos[positions], sign * sin[positions], self._decoder.rope(layer))

    def _table(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, (T, R/2), of every position in layers of that type."""
        kind = self._decoder.layer_types[layer]
        if (kind, dtype) not in self._tables:
            inv_freq = self._decoder.ropes[kind]
            positions = torch.arange(self._plan.tokens, device=inv_freq.device, dtype=inv_freq.dtype)
            angles = positions[:, None] * inv_freq
            self._tables[kind, dtype] = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._tables[kind, dtype]


def _handy(stored: Tensor) -> Tensor:
    """As it is in bfloat16, else float32: squares of float16 may overflow."""
    return stored if stored.dtype == torch.bfloat16 else stored.float()
