"""Attention of scattered rows without a mask: a row at position p sees the keys at positions <= p.

FlashAttention's one pass over the keys (Dao et al., arXiv 2205.14135) with true positions: a tile of ascending rows
sees all keys before its first row without a mask, and no keys after its last one. Heads of a group read the same key
head, which is not expanded. In sliding layers a row sees only keys at positions > p - window.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragblend.engine.kernels import available, on_device, passes_self_test

LOG2_E = 1.4426950408889634
HEAD_SIZES = (16, 32, 64, 128, 256)
# Numbers are rounded to the dtype twice, weights and result; float32 in the interpreter only.
ALLOWED = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 1e-4}
LARGE_SHARED_BYTES = 160 << 10  # of shared memory in a block: A100, H100 and later


@triton.jit
def _step(
    q, acc, total, top, K, V, begin, stop, positions, window, scale, k_stride, v_stride,
    D: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    # Adds the keys begin..begin + N to the running softmax of a tile: acc (M, D) and total (M,) are the sums of
    # weighted values and of weights, both relative to top (M,), the highest score so far.
    dims = tl.arange(0, D)
    at = begin + tl.arange(0, N)
    inside = at < stop
    if MASKED:
        k = tl.load(K + at[None, :] * k_stride + dims[:, None], mask=inside[None, :], other=0.0)
    else:
        k = tl.load(K + at[None, :] * k_stride + dims[:, None])
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if MASKED:
        seen = at[None, :] <= positions[:, None]
        if WINDOWED:
            seen = seen & (at[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen no key yet
    weights = tl.exp2(scores - safe[:, None])
    rescale = tl.exp2(top - safe)
    total = total * rescale + tl.sum(weights, 1)
    if MASKED:
        v = tl.load(V + at[:, None] * v_stride + dims[None, :], mask=inside[:, None], other=0.0)
    else:
        v = tl.load(V + at[:, None] * v_stride + dims[None, :])
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, total, highest


# Not compiled anew for each number of rows, nor for rows that begin within others.
@triton.jit(do_not_specialize=["count", "group", "window"], do_not_specialize_on_alignment=["Rows"])
def _attend(
    Q, K, V, Rows, Out, count, group, window, scale, q_head, q_row, k_head, k_row, v_head, v_row, out_row, out_head,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # tiles that see the most keys first
    head = tl.program_id(1)
    m = start + tl.arange(0, M)
    dims = tl.arange(0, D)
    least = tl.load(Rows + start).to(tl.int32)
    most = tl.load(Rows + tl.minimum(start + M, count) - 1).to(tl.int32)
    positions = tl.load(Rows + m, mask=m < count, other=0).to(tl.int32)
    positions = tl.where(m < count, positions, most)
    q = tl.load(Q + head * q_head + m[:, None] * q_row + dims[None, :], mask=(m < count)[:, None], other=0.0)
    K += (head // group).to(tl.int64) * k_head
    V += (head // group).to(tl.int64) * v_head
    acc = tl.zeros((M, D), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    stop = most + 1
    if WINDOWED:
        masked_begin = tl.maximum(0, least - window + 1) // N * N
    else:
        masked_begin = (least + 1) // N * N
        for begin in range(0, masked_begin, N):
            acc, total, top = _step(
                q, acc, total, top, K, V, begin, stop, positions, window, scale, k_row, v_row, D, N, False, WINDOWED
            )  # fmt: skip
    for begin in range(masked_begin, stop, N):
        acc, total, top = _step(
            q, acc, total, top, K, V, begin, stop, positions, window, scale, k_row, v_row, D, N, True, WINDOWED
        )  # fmt: skip
    out = (acc / total[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + m[:, None] * out_row + head * out_head + dims[None, :], out, mask=(m < count)[:, None])


Blocks = tuple[int, int, int, int]  # rows, keys, warps, stages


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    scaling: float | None = None,
    window: int | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """query (N, R, D), key and value (H, T, D) -> (R, N, D); rows (R,) ascending positions, all below T.

    N is a multiple of H, and D contiguous. blocks: instead of `blocks_of`'s.
    """
    heads, count, size = query.shape
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1, "the last dimension is contiguous"
    out = torch.empty((count, heads, size), dtype=query.dtype, device=query.device)
    scale = (size**-0.5 if scaling is None else scaling) * LOG2_E
    tile, keys, warps, stages = blocks or blocks_of(count, size, _large_shared(query.device))
    strides = [*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2]]
    grid, group = (triton.cdiv(count, tile), heads), heads // key.shape[0]
    shape = {"D": size, "M": tile, "N": keys, "WINDOWED": window is not None}
    with on_device(query.device):
        _attend[grid](
            query, key, value, rows.contiguous(), out, count, group, window or 0, scale, *strides, **shape,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def blocks_of(count: int, size: int, large_shared: bool) -> Blocks:
    """The shape of a tile, by the number of rows. Not measured on a card yet; tuning would cost seconds at each start.

    `measure_gpu`'s part `kernels` compares others.
    """
    keys, stages = (64 if size <= 128 else 32), (3 if large_shared else 2)
    if count <= 16:
        return 16, keys, 4, stages
    return (64, keys, 4, stages) if count <= 256 else (128, keys, 8, stages)


@functools.cache
def supports(device: torch.device, dtype: torch.dtype, size: int, group: int, windowed: bool) -> bool:
    """Whether the kernel is right for such heads on that device; compiles it for all numbers of rows."""
    dtypes = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32, torch.float16)
    if not available(device) or dtype not in dtypes or size not in HEAD_SIZES:
        return False

    def largest_error() -> float:
        draw = torch.Generator().manual_seed(0)
        rows = torch.randperm(96, generator=draw).sort().values[::3].to(device)
        query, key, value = (
            torch.randn(heads, count, size, generator=draw).to(device, dtype)
            for heads, count in ((2 * group, len(rows)), (2, 96), (2, 96))
        )
        window = 20 if windowed else None
        expected = attend_by_torch(query, key, value, rows, window)
        errors = [
            (attend(query, key, value, rows, None, window, blocks).float() - expected).abs().max()
            for blocks in {blocks_of(count, size, _large_shared(device)) for count in (1, 256, 1024)}
        ]
        return float(torch.stack(errors).max())

    return passes_self_test(largest_error, "attention of scattered rows", ALLOWED[dtype])


def attend_by_torch(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, window: int | None = None
) -> Tensor:
    """What `attend` computes, by torch in float32."""
    at, group = torch.arange(key.shape[1], device=rows.device), query.shape[0] // key.shape[0]
    mask = at[None] <= rows[:, None]
    if window is not None:
        mask &= at[None] > rows[:, None] - window
    keys, values = (each.float().repeat_interleave(group, 0)[None] for each in (key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(query.float()[None], keys, values, mask)
    return attended[0].transpose(0, 1)


@functools.cache
def _large_shared(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= LARGE_SHARED_BYTES
