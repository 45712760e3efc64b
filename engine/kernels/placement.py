"""Moves one layer's raw KV of all spans to their rows in the fused buffers, and rotates the keys on the way.

One launch instead of a dozen calls: launching them took longer than copying the bytes to the device.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragblend.engine.kernels import available, on_device, passes
from ragblend.engine.model.rope import INTERLEAVED, UNROTATED, Rope, rotate_

TILE_ROWS, WARPS = 16, 4
ALIGNED = 16  # numbers: an access of 16 bytes and more needs it


@triton.jit(do_not_specialize=["count"])
def _place(
    Room, Key_at, Value_at, Tokens, Rows, Turns, Cos, Sin, Keys, Values, count, k_head, k_row, v_head, v_row,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALIGNED: tl.constexpr, M: tl.constexpr, K2: tl.constexpr, V2: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.program_id(1)
    valid = m < count
    tokens = tl.load(Tokens + m, mask=valid, other=0)
    key_at = tl.load(Key_at + m, mask=valid, other=0) + head * tokens * SIZE
    value_at = tl.load(Value_at + m, mask=valid, other=0) + head * tokens * VALUE_SIZE
    row = tl.load(Rows + m, mask=valid, other=0)
    key_to = row * k_row + head * k_head
    value_to = row * v_row + head * v_head
    if ALIGNED:
        key_at, value_at = tl.multiple_of(key_at, 16), tl.multiple_of(value_at, 16)
        key_to, value_to = tl.multiple_of(key_to, 16), tl.multiple_of(value_to, 16)
    dims = tl.arange(0, V2)
    inside = valid[:, None] & (dims < VALUE_SIZE)[None, :]
    value = tl.load(Room + value_at[:, None] + dims[None, :], mask=inside)
    tl.store(Values + value_to[:, None] + dims[None, :], value, mask=inside)
    if PAIRS > 0:
        pair = tl.arange(0, P2)
        if INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        else:
            first, second = pair, pair + PAIRS
        inside = valid[:, None] & (pair < PAIRS)[None, :]
        a = tl.load(Room + key_at[:, None] + first[None, :], mask=inside, other=0.0)
        b = tl.load(Room + key_at[:, None] + second[None, :], mask=inside, other=0.0)
        turn = tl.load(Turns + m, mask=valid, other=-1)
        moved = inside & (turn >= 0)[:, None]
        cos = tl.load(Cos + turn[:, None] * PAIRS + pair[None, :], mask=moved, other=1.0)
        sin = tl.load(Sin + turn[:, None] * PAIRS + pair[None, :], mask=moved, other=0.0)
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        new_a = (wide_a * cos - wide_b * sin).to(a.dtype)
        new_b = (wide_b * cos + wide_a * sin).to(a.dtype)
        tl.store(Keys + key_to[:, None] + first[None, :], tl.where(moved, new_a, a), mask=inside)
        tl.store(Keys + key_to[:, None] + second[None, :], tl.where(moved, new_b, b), mask=inside)
    if 2 * PAIRS < SIZE:
        dims = tl.arange(0, K2)
        inside = valid[:, None] & ((dims >= 2 * PAIRS) & (dims < SIZE))[None, :]
        key = tl.load(Room + key_at[:, None] + dims[None, :], mask=inside)
        tl.store(Keys + key_to[:, None] + dims[None, :], key, mask=inside)


class RowTable:
    """Where each row's keys and values lie in a room, and where they go; the same for all layers.

    spans: for each its first number in the room, tokens, first row and whether its keys are rotated. In the room a span
    is keys (H, T, D), then values (H, T, Dv).
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int, int, bool]],
        heads: int,
        size: int,
        value_size: int,
        device: torch.device,
    ) -> None:
        key_at, value_at, tokens, rows, turns, turn = [], [], [], [], [], 0
        for begin, count, start, is_moved in spans:
            at = torch.arange(count)
            key_at.append(begin + at * size)
            value_at.append(begin + heads * count * size + at * value_size)
            tokens.append(torch.full_like(at, count))
            rows.append(start + at)
            turns.append(torch.full_like(at, turn if is_moved else -1))
            turn += is_moved
        self.heads, self.size, self.value_size = heads, size, value_size
        columns = torch.stack([torch.cat(each) for each in (key_at, value_at, tokens, rows, turns)])
        self._columns = columns.int().to(device)

    def place(
        self, room: Tensor, keys: Tensor, values: Tensor, rope: Rope, turns: tuple[Tensor, Tensor] | None
    ) -> None:
        """Copy the room's numbers (N,) to keys and values, (H, capacity, D) and (H, capacity, Dv).

        turns: cos and sin, (spans that are rotated, R/2) float32; None if no keys are rotated.
        """
        rotates = turns is not None and rope.layout != UNROTATED
        cos, sin = turns if turns is not None and rotates else (room, room)  # else never read
        pairs, count = (cos.shape[1] if rotates else 0), self._columns.shape[1]
        shape = {
            "SIZE": self.size,
            "VALUE_SIZE": self.value_size,
            "PAIRS": pairs,
            "INTERLEAVED": rope.layout == INTERLEAVED,
            "ALIGNED": self.size % ALIGNED == 0 and self.value_size % ALIGNED == 0,
            "M": TILE_ROWS,
            "K2": triton.next_power_of_2(self.size),
            "V2": triton.next_power_of_2(self.value_size),
            "P2": triton.next_power_of_2(max(pairs, 1)),
        }
        strides = [*keys.stride()[:2], *values.stride()[:2]]
        with on_device(room.device):
            _place[triton.cdiv(count, TILE_ROWS), self.heads](
                room, *self._columns.unbind(), cos, sin, keys, values, count, *strides, **shape, num_warps=WARPS
            )  # fmt: skip


@functools.cache
def supports(
    device: torch.device, dtype: torch.dtype, size: int, value_size: int, pairs: int, layout: str
) -> bool:
    """Whether the kernel is right for such keys and values on that device; compiles it."""
    dtypes = [torch.float16, torch.float32] + [torch.bfloat16] * (device.type == "cuda")
    if not available(device) or dtype not in dtypes:
        return False

    def largest_error() -> float:
        heads, tokens, draw = 2, 20, torch.Generator().manual_seed(0)
        rope = Rope(torch.rand(pairs, generator=draw).to(device), layout)
        room = torch.randn(heads * tokens * (size + value_size), generator=draw).to(device, dtype)
        keys, values = (room.new_zeros(heads, tokens + 3, each) for each in (size, value_size))
        turns = (7 * rope.inv_freq[None]).cos(), (7 * rope.inv_freq[None]).sin()
        table = RowTable([(0, tokens, 3, True)], heads, size, value_size, device)
        table.place(room, keys, values, rope, turns)
        own = room[: heads * tokens * size].view(heads, tokens, size).clone()
        rotate_(own, *turns, rope)
        moved = (keys[:, 3:].float() - own.float()).abs().max()
        copied = (values[:, 3:].flatten() != room[heads * tokens * size :]).any()
        return float(moved) + float(copied)

    # A product and a sum may be rounded once or twice: a unit in the last place of numbers up to 8.
    return passes(largest_error, "placing of stored KV", 8 * torch.finfo(dtype).eps)
