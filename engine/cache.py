"""FusedCache: the KV of one whole prompt, partly stored, partly new, as the cache that transformers' layers update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ragblend.engine.model.attention import rounded_up
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.errors import Cancelled

GROW_TOKENS = 128


class FusedLayer(DynamicLayer):
    """One layer's buffers, (1, H, capacity, D), of which the first `length` tokens are valid. Appending copies nothing.

    Capacity grows in steps, so that oneDNN, which caches half a megabyte for each shape, sees few shapes. Free capacity
    is zeroed, so that a product over the whole buffer is right if the weights after the valid tokens are zero.
    evicted: how many tokens each head has lost; for positions and masks they still count.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, geometry: Geometry, tokens: int, room: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.device = geometry.torch_dtype, device
        shape = (1, geometry.kv_heads, rounded_up(tokens + room) if room else tokens)
        # The loader's threads, which are not in inference mode, write to the buffers.
        with torch.inference_mode(False):
            self.key_buffer = torch.empty((*shape, geometry.key_size), dtype=self.dtype, device=device)
            self.value_buffer = torch.empty((*shape, geometry.value_size), dtype=self.dtype, device=device)
        for buffer in (self.key_buffer, self.value_buffer):
            buffer[:, :, tokens:].zero_()
        self.is_initialized = True
        self.evicted = 0
        self.set_length(0)

    def set_length(self, tokens: int) -> None:
        self.keys = self.key_buffer[:, :, :tokens]
        self.values = self.value_buffer[:, :, :tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (1, H, t, D) in place; the buffers are copied only when their capacity is used up."""
        start = self.keys.shape[2]
        stop = start + key_states.shape[2]
        self.ensure_room(key_states.shape[2])
        self.key_buffer[:, :, start:stop] = key_states
        self.value_buffer[:, :, start:stop] = value_states
        self.set_length(stop)
        return self.keys, self.values

    def ensure_room(self, tokens: int) -> int:
        """Grow the buffers for that many more tokens if necessary; returns the capacity."""
        stop = self.keys.shape[2] + tokens
        if stop > self.key_buffer.shape[2]:
            self.key_buffer, self.value_buffer = _grown(self.keys, stop), _grown(self.values, stop)
        return self.key_buffer.shape[2]

    def write(self, rows: Tensor, key_states: Tensor, value_states: Tensor) -> None:
        """Append (1, H, t, D) at rows (t,), which are the next ones; the capacity must suffice."""
        self.key_buffer.index_copy_(2, rows, key_states)
        self.value_buffer.index_copy_(2, rows, value_states)
        self.set_length(self.keys.shape[2] + rows.shape[0])

    def keep(self, rows: Tensor) -> None:
        """Keep rows (H, kept) of each head, ascending, and free the memory of the others."""
        tokens = self.keys.shape[2]
        self.key_buffer = _gathered(self.keys, rows)
        self.value_buffer = _gathered(self.values, rows)
        self.evicted += tokens - rows.shape[1]
        self.set_length(rows.shape[1])

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2]) + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys, and the first one's position: a mask takes the kept keys to be directly before new ones."""
        return int(self.keys.shape[2]) + query_length, self.evicted


class LayerStopped(Exception):
    """Ends a layer early, once the wanted part of its result is known. Internal: callers never see it."""


class NewKV(LayerStopped):
    """A layer's new keys and values, (H, R, D) each: the result of a peek."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


@dataclass(frozen=True)
class Append:
    """Appends new tokens. cancel: checked in each layer; if it is set, Cancelled is raised."""

    cancel: Cancel | None = None


@dataclass(frozen=True)
class Scatter:
    """Overwrites stored rows with new ones.

    rows (R,): the positions of the new rows; None: all positions. load(layer): called first, waits for the stored KV;
    correct(layer, new keys, new values): called next, corrects the stored KV; peek: write nothing and end the layer
    with `NewKV`; stop: attention gets only keys before this position, None for all; seen (S,): positions of the keys
    that attention gets, None for all.
    """

    rows: Tensor | None = None
    load: Callable[[int], None] | None = None
    correct: Callable[[int, Tensor, Tensor], None] | None = None
    peek: bool = False
    stop: int | None = None
    seen: Tensor | None = None


class FusedCache(DynamicCache):
    """Fused buffers for all layers, which `generate` uses as it uses a `DynamicCache`.

    step: what `update` does with a layer's new KV.
    """

    def __init__(self, geometry: Geometry, tokens: int, room_tokens: int, device: torch.device) -> None:
        super().__init__()
        self.geometry = geometry
        self.prompt_tokens = tokens
        self.fused = [FusedLayer(geometry, tokens, room_tokens, device) for _ in range(geometry.layers)]
        self.layers = list(self.fused)  # the name that transformers uses
        self.step: Append | Scatter = Append()

    def span(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views (H, stop - start, D) of that layer's key and value buffers."""
        held = self.fused[layer]
        return held.key_buffer[0, :, start:stop], held.value_buffer[0, :, start:stop]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention with its new KV, (1, H, R, D); returns the whole layer, (1, H, T, D).

        A layer may have fewer heads than the geometry, if other layers keep more per token (`convolution.py`).
        """
        heads = key_states.shape[1]
        missing = self.fused[layer_idx].key_buffer.shape[1] - heads
        if not missing:
            return self._update(key_states, value_states, layer_idx)
        padding = (0, 0, 0, 0, 0, missing)
        keys, values = self._update(pad(key_states, padding), pad(value_states, padding), layer_idx)
        return keys[:, :heads], values[:, :heads]

    def _update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        step, held = self.step, self.fused[layer_idx]
        if isinstance(step, Append):
            if step.cancel is not None and step.cancel.is_set():
                raise Cancelled("the pass was cancelled between two layers")
            return held.update(key_states, value_states)
        if step.load is not None:
            step.load(layer_idx)
        if step.peek:
            raise NewKV(key_states[0], value_states[0])
        if step.correct is not None:
            step.correct(layer_idx, key_states[0], value_states[0])
        held.set_length(step.stop or self.prompt_tokens)
        if step.rows is None:  # every row is overwritten
            held.keys.copy_(key_states)
            held.values.copy_(value_states)
        else:
            held.keys[0].index_copy_(1, step.rows, key_states[0])
            held.values[0].index_copy_(1, step.rows, value_states[0])
        if step.seen is None:
            return held.keys, held.values
        return held.keys.index_select(2, step.seen), held.values.index_select(2, step.seen)

    def rows(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copies (H, R, D) of that layer's keys and values at rows (R,)."""
        keys, values = self.span(layer, 0, self.prompt_tokens)
        return keys.index_select(1, rows), values.index_select(1, rows)

    def blank(self, layer: int, rows: Tensor) -> None:
        """Zero rows (R,) that are not written yet: even under a mask garbage matters, because 0 times NaN is NaN."""
        held = self.fused[layer]
        held.key_buffer[0].index_fill_(1, rows, 0)
        held.value_buffer[0].index_fill_(1, rows, 0)

    def truncate(self, kept: int = 0) -> None:
        """Drop all but `kept` tokens after the prompt. The prompt's KV stays as prefill or eviction left it."""
        for held in self.fused:
            held.set_length(self.prompt_tokens - held.evicted + kept)

    @property
    def evicted_tokens(self) -> int:
        """How many tokens of the prompt each head has lost, in the layers that lost any."""
        return max(held.evicted for held in self.fused)


def _gathered(held: Tensor, rows: Tensor) -> Tensor:
    """A new buffer with free capacity, filled with rows (H, kept) of the first H heads of held (1, ..., T, D)."""
    heads, kept = rows.shape
    buffer = _with_room(held[:, :heads], kept)
    torch.gather(held[0], 1, rows[..., None].expand(-1, -1, held.shape[3]), out=buffer[0, :, :kept])
    return buffer


def _grown(held: Tensor, tokens: int) -> Tensor:
    """A copy with a larger capacity. Tokens that are not written yet are zeroed, because writing them may fail."""
    grown = _with_room(held, tokens)
    grown[:, :, : held.shape[2]] = held
    grown[:, :, held.shape[2] : tokens].zero_()
    return grown


def _with_room(like: Tensor, tokens: int) -> Tensor:
    """A buffer for tokens that the caller will write; the free capacity after them is zeroed."""
    buffer = like.new_empty((*like.shape[:2], rounded_up(tokens + GROW_TOKENS), like.shape[3]))
    buffer[:, :, tokens:].zero_()
    return buffer
