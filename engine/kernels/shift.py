"""Triton kernels of the shift (`selection/shift.py`), one launch each: `observed`, the change of the recomputed rows,
and `add`, which corrects the stored rows.

In plain torch, each is a dozen calls a layer (gather, subtract, un-rotate; rotate, add), and each call takes the host
longer than the device.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragblend.engine.kernels import available, on_device, passes_self_test
from ragblend.engine.kernels.launching import TILE_ROWS, row_constants
from ragblend.engine.model.rope import Rope, angles, rotated
from ragblend.kvstore.chunks import DTYPES

Rotation = tuple[Tensor, Tensor]  # cos and sin (T, R/2) float32, of every position


@triton.jit(do_not_specialize=["count", "heads"])
def _observe(
    New_keys, New_values, At, Keys, Values, Positions, Cos, Sin, Out, count, heads,
    nk_head, nk_row, nv_head, nv_row, k_head, k_row, v_head, v_row, out_row,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, M: tl.constexpr, K2: tl.constexpr, V2: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    # New minus stored KV of M recomputed rows in one head: values, then the rotated pairs of keys, then the keys' other
    # dimensions.
    m = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.program_id(1)
    valid = m < count
    at = tl.load(At + m, mask=valid, other=0).to(tl.int32)
    position = tl.load(Positions + m, mask=valid, other=0).to(tl.int32)
    out = m * out_row
    dims = tl.arange(0, V2)
    inside = valid[:, None] & (dims < VALUE_SIZE)[None, :]
    new = tl.load(
        New_values + (head * nv_head + at * nv_row)[:, None] + dims[None, :], mask=inside, other=0.0
    )
    old = tl.load(
        Values + (head * v_head + position * v_row)[:, None] + dims[None, :], mask=inside, other=0.0
    )
    to = (out + heads * SIZE + head * VALUE_SIZE)[:, None] + dims[None, :]
    tl.store(Out + to, new.to(tl.float32) - old.to(tl.float32), mask=inside)
    new_at, old_at = head * nk_head + at * nk_row, head * k_head + position * k_row
    to_row = out + head * SIZE
    if PAIRS > 0:
        pair = tl.arange(0, P2)
        if INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        else:
            first, second = pair, pair + PAIRS
        inside = valid[:, None] & (pair < PAIRS)[None, :]
        a = tl.load(New_keys + new_at[:, None] + first[None, :], mask=inside, other=0.0).to(tl.float32)
        a -= tl.load(Keys + old_at[:, None] + first[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(New_keys + new_at[:, None] + second[None, :], mask=inside, other=0.0).to(tl.float32)
        b -= tl.load(Keys + old_at[:, None] + second[None, :], mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(Cos + position[:, None] * PAIRS + pair[None, :], mask=inside, other=1.0)
        sin = tl.load(Sin + position[:, None] * PAIRS + pair[None, :], mask=inside, other=0.0)
        tl.store(Out + to_row[:, None] + first[None, :], a * cos + b * sin, mask=inside)
        tl.store(Out + to_row[:, None] + second[None, :], b * cos - a * sin, mask=inside)
    if 2 * PAIRS < SIZE:
        dims = tl.arange(0, K2)
        inside = valid[:, None] & ((dims >= 2 * PAIRS) & (dims < SIZE))[None, :]
        new = tl.load(New_keys + new_at[:, None] + dims[None, :], mask=inside, other=0.0)
        old = tl.load(Keys + old_at[:, None] + dims[None, :], mask=inside, other=0.0)
        tl.store(Out + to_row[:, None] + dims[None, :], new.to(tl.float32) - old.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["start", "count"])
def _add(
    More_keys, More_values, Keys, Values, Cos, Sin, start, count,
    mk_head, mk_row, mv_head, mv_row, k_head, k_row, v_head, v_row,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    M: tl.constexpr, K2: tl.constexpr, V2: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    # Adds to M stored rows in one head: values, then the rotated pairs of keys, then the keys' other dimensions.
    m = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.program_id(1)
    valid = m < count
    position = start + m
    dims = tl.arange(0, V2)
    inside = valid[:, None] & (dims < VALUE_SIZE)[None, :]
    more = tl.load(
        More_values + (head * mv_head + m * mv_row)[:, None] + dims[None, :], mask=inside, other=0.0
    )
    to = Values + (head * v_head + position * v_row)[:, None] + dims[None, :]
    old = tl.load(to, mask=inside, other=0.0)
    tl.store(to, (old.to(tl.float32) + more.to(tl.float32)).to(old.dtype), mask=inside)
    more_at, to_row = head * mk_head + m * mk_row, head * k_head + position * k_row
    if PAIRS > 0:
        pair = tl.arange(0, P2)
        if INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        else:
            first, second = pair, pair + PAIRS
        inside = valid[:, None] & (pair < PAIRS)[None, :]
        a = tl.load(More_keys + more_at[:, None] + first[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(More_keys + more_at[:, None] + second[None, :], mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(Cos + position[:, None] * PAIRS + pair[None, :], mask=inside, other=1.0)
        sin = tl.load(Sin + position[:, None] * PAIRS + pair[None, :], mask=inside, other=0.0)
        to = Keys + to_row[:, None] + first[None, :]
        old = tl.load(to, mask=inside, other=0.0)
        tl.store(to, (old.to(tl.float32) + (a * cos - b * sin)).to(old.dtype), mask=inside)
        to = Keys + to_row[:, None] + second[None, :]
        old = tl.load(to, mask=inside, other=0.0)
        tl.store(to, (old.to(tl.float32) + (b * cos + a * sin)).to(old.dtype), mask=inside)
    if 2 * PAIRS < SIZE:
        dims = tl.arange(0, K2)
        inside = valid[:, None] & ((dims >= 2 * PAIRS) & (dims < SIZE))[None, :]
        more = tl.load(More_keys + more_at[:, None] + dims[None, :], mask=inside, other=0.0)
        to = Keys + to_row[:, None] + dims[None, :]
        old = tl.load(to, mask=inside, other=0.0)
        tl.store(to, (old.to(tl.float32) + more.to(tl.float32)).to(old.dtype), mask=inside)


def observed(
    new: tuple[Tensor, Tensor],
    at: Tensor,
    stored: tuple[Tensor, Tensor],
    positions: Tensor,
    rotation: Rotation,
    rope: Rope,
) -> Tensor:
    """(C, H D + H Dv) float32: new rows `at` (C,) minus stored rows at positions (C,), keys un-rotated, then values.

    new: keys (H, R, D) and values (H, R, Dv); stored: (H, T, D) and (H, T, Dv).
    """
    heads, _, size = new[0].shape
    width = heads * (size + new[1].shape[2])
    out = torch.empty((at.numel(), width), dtype=torch.float32, device=at.device)
    strides = [stride for each in (*new, *stored) for stride in each.stride()[:2]]
    grid, shape = _launch_shape(at.numel(), *new, rope)
    with on_device(out.device):
        _observe[grid](
            *new, at, *stored, positions, *rotation, out, at.numel(), heads, *strides, width, **shape
        )  # fmt: skip
    return out


def add(
    more: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], start: int, rotation: Rotation, rope: Rope
) -> None:
    """Add keys (H, n, D), rotated to their positions, and values (H, n, Dv) to the stored rows from `start` on."""
    strides = [stride for each in (*more, *stored) for stride in each.stride()[:2]]
    grid, shape = _launch_shape(more[0].shape[1], *more, rope)
    with on_device(more[0].device):
        _add[grid](*more, *stored, *rotation, start, more[0].shape[1], *strides, **shape)


def _launch_shape(
    rows: int, keys: Tensor, values: Tensor, rope: Rope
) -> tuple[tuple[int, int], dict[str, int]]:
    assert keys.stride(2) == values.stride(2) == 1, "the last dimension is contiguous"
    grid = triton.cdiv(rows, TILE_ROWS), keys.shape[0]
    return grid, row_constants(keys.shape[2], values.shape[2], rope)


@functools.cache
def supports(device: torch.device, dtype: str, size: int, value_size: int, pairs: int, layout: str) -> bool:
    """Whether both kernels are right for such keys and values on that device; compiles them."""
    dtypes = ["float16", "float32"] + ["bfloat16"] * (device.type == "cuda")
    if not available(device) or dtype not in dtypes:
        return False

    def largest_error() -> float:
        heads, tokens, draw = 2, 30, torch.Generator().manual_seed(0)
        rope = Rope(torch.rand(pairs, generator=draw).to(device), layout)
        rotation = angles(torch.arange(tokens, device=device).float(), rope.inv_freq)
        new, stored = (
            [
                torch.randn(heads, tokens, each, generator=draw).to(device, DTYPES[dtype])
                for each in (size, value_size)
            ]
            for _ in range(2)
        )
        at, positions = torch.tensor([2, 3, 9], device=device), torch.tensor([4, 7, 21], device=device)
        found = observed((new[0], new[1]), at, (stored[0], stored[1]), positions, rotation, rope)
        keys = new[0][:, at].float() - stored[0][:, positions].float()
        keys = rotated(keys, rotation[0][positions], -rotation[1][positions], rope)
        values = new[1][:, at].float() - stored[1][:, positions].float()
        expected = torch.cat([each.transpose(0, 1).flatten(1) for each in (keys, values)], 1)
        errors = [(found - expected).abs().max()]
        more = [each[:, :20] for each in new]
        rotated_more = rotated(more[0].float(), rotation[0][5:25], rotation[1][5:25], rope)
        wanted = [each.float() for each in stored]
        wanted[0][:, 5:25] += rotated_more
        wanted[1][:, 5:25] += more[1].float()
        add((more[0], more[1]), (stored[0], stored[1]), 5, rotation, rope)
        errors += [(a.float() - b).abs().max() for a, b in zip(stored, wanted, strict=True)]
        return float(torch.stack(errors).max())

    return passes_self_test(largest_error, "the shift of stored KV", 8 * torch.finfo(DTYPES[dtype]).eps)
