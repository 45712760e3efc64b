"""Writes one layer's stored KV of all spans to their rows in the fused buffers: unpacked, with rotated keys.

It takes one launch. A dozen calls for each span took longer to launch than copying the bytes to the device.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragblend.engine.kernels import available, on_device, passes_self_test
from ragblend.engine.kernels.launching import TILE_ROWS, row_constants
from ragblend.engine.model.rope import Rope, rotate_
from ragblend.kvstore import int4
from ragblend.kvstore.chunks import DTYPES, Geometry
from ragblend.kvstore.codec import CODECS

ALIGNED = 16  # aligned to so many numbers, several are loaded or stored at once
WHOLE = 1 << 30  # size of a group that has every token, or every channel
# By codec: numbers per byte (0: not packed), tokens that share a scale in keys, channels that share one in values.
PACKINGS = {"raw": (0, WHOLE, WHOLE), "int8": (1, WHOLE, WHOLE), "int4": (2, int4.GROUP, int4.GROUP)}


@triton.jit
def _numbers(
    Memory, Bytes, Halves, begin, index, tokens, head, heads, dims, mask, IS_VALUE: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ALIGNED: tl.constexpr,
    PER_BYTE: tl.constexpr, TOKEN_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr,
):  # fmt: skip
    # The unpacked numbers (M, dims) of M tokens in one head, keys or values. Memory, Bytes and Halves are the same
    # bytes as the model's dtype, uint8 and float16. A packed layer has the scales (least, step) of keys, then those of
    # values, as float16, then the codes of keys, then those of values.
    row = head * tokens + index
    if PER_BYTE == 0:
        if IS_VALUE:
            at = begin + heads * tokens * SIZE + row * VALUE_SIZE
        else:
            at = begin + row * SIZE
        if ALIGNED:
            at = tl.multiple_of(at, 16)
        numbers = tl.load(Memory + at[:, None] + dims[None, :], mask=mask, other=0.0)
    else:
        KEY_BYTES: tl.constexpr = (SIZE + PER_BYTE - 1) // PER_BYTE
        VALUE_BYTES: tl.constexpr = (VALUE_SIZE + PER_BYTE - 1) // PER_BYTE
        VALUE_GROUPS: tl.constexpr = (VALUE_SIZE + VALUE_GROUP - 1) // VALUE_GROUP
        groups = (tokens + (TOKEN_GROUP - 1)) // TOKEN_GROUP
        key_scales, value_scales = heads * groups * SIZE, heads * tokens * VALUE_GROUPS
        codes = begin + 4 * (key_scales + value_scales)
        if IS_VALUE:
            scale = (begin // 2 + 2 * key_scales + row * VALUE_GROUPS)[:, None] + (dims // VALUE_GROUP)[
                None, :
            ]
            count = value_scales
            codes += heads * tokens * KEY_BYTES + row * VALUE_BYTES
        else:
            scale = (begin // 2 + (head * groups + index // TOKEN_GROUP) * SIZE)[:, None] + dims[None, :]
            count = key_scales
            codes += row * KEY_BYTES
        least = tl.load(Halves + scale, mask=mask, other=0.0).to(tl.float32)
        step = tl.load(Halves + scale + count[:, None], mask=mask, other=0.0).to(tl.float32)
        if PER_BYTE == 2:
            half: tl.constexpr = VALUE_BYTES if IS_VALUE else KEY_BYTES
            upper = dims >= half
            at = tl.where(upper, dims - half, dims)
            both = tl.load(Bytes + codes[:, None] + at[None, :], mask=mask, other=0).to(tl.int32)
            code = tl.where(upper[None, :], both >> 4, both & 15)
        else:
            code = tl.load(Bytes + codes[:, None] + dims[None, :], mask=mask, other=0).to(tl.int32)
        numbers = (least + code.to(tl.float32) * step).to(Memory.dtype.element_ty)
    return numbers


@triton.jit(do_not_specialize=["count", "heads"])
def _place(
    Memory, Bytes, Halves, Begin, Index, Tokens, Rows, AngleRows, Cos, Sin, Keys, Values, count, heads,
    k_head, k_row, v_head, v_row,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ALIGNED: tl.constexpr,
    PER_BYTE: tl.constexpr, TOKEN_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    M: tl.constexpr, K2: tl.constexpr, V2: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    # Writes M rows of the table in one head: values, then the rotated pairs of keys, then the keys' other dimensions.
    m = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.program_id(1)
    valid = m < count
    begin, index = tl.load(Begin + m, mask=valid, other=0), tl.load(Index + m, mask=valid, other=0)
    tokens, row = tl.load(Tokens + m, mask=valid, other=0), tl.load(Rows + m, mask=valid, other=0)
    key_to, value_to = row * k_row + head * k_head, row * v_row + head * v_head
    if ALIGNED:
        key_to, value_to = tl.multiple_of(key_to, 16), tl.multiple_of(value_to, 16)
    dims = tl.arange(0, V2)
    inside = valid[:, None] & (dims < VALUE_SIZE)[None, :]
    value = _numbers(
        Memory, Bytes, Halves, begin, index, tokens, head, heads, dims, inside, True,
        SIZE, VALUE_SIZE, ALIGNED, PER_BYTE, TOKEN_GROUP, VALUE_GROUP,
    )  # fmt: skip
    tl.store(Values + value_to[:, None] + dims[None, :], value, mask=inside)
    if PAIRS > 0:
        pair = tl.arange(0, P2)
        if INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        else:
            first, second = pair, pair + PAIRS
        inside = valid[:, None] & (pair < PAIRS)[None, :]
        a = _numbers(
            Memory, Bytes, Halves, begin, index, tokens, head, heads, first, inside, False,
            SIZE, VALUE_SIZE, ALIGNED, PER_BYTE, TOKEN_GROUP, VALUE_GROUP,
        )  # fmt: skip
        b = _numbers(
            Memory, Bytes, Halves, begin, index, tokens, head, heads, second, inside, False,
            SIZE, VALUE_SIZE, ALIGNED, PER_BYTE, TOKEN_GROUP, VALUE_GROUP,
        )  # fmt: skip
        angle_row = tl.load(AngleRows + m, mask=valid, other=-1)
        rotates = inside & (angle_row >= 0)[:, None]
        cos = tl.load(Cos + angle_row[:, None] * PAIRS + pair[None, :], mask=rotates, other=1.0)
        sin = tl.load(Sin + angle_row[:, None] * PAIRS + pair[None, :], mask=rotates, other=0.0)
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        new_a = (wide_a * cos - wide_b * sin).to(a.dtype)
        new_b = (wide_b * cos + wide_a * sin).to(a.dtype)
        tl.store(Keys + key_to[:, None] + first[None, :], tl.where(rotates, new_a, a), mask=inside)
        tl.store(Keys + key_to[:, None] + second[None, :], tl.where(rotates, new_b, b), mask=inside)
    if 2 * PAIRS < SIZE:
        dims = tl.arange(0, K2)
        inside = valid[:, None] & ((dims >= 2 * PAIRS) & (dims < SIZE))[None, :]
        key = _numbers(
            Memory, Bytes, Halves, begin, index, tokens, head, heads, dims, inside, False,
            SIZE, VALUE_SIZE, ALIGNED, PER_BYTE, TOKEN_GROUP, VALUE_GROUP,
        )  # fmt: skip
        tl.store(Keys + key_to[:, None] + dims[None, :], key, mask=inside)


class RowTable:
    """For each row, where its packed layer begins in memory, and its position; the same for all layers.

    memory: on the device, (bytes,) uint8. spans, all of one codec: for each the first byte of its packed layer, its
    first position, and angle_rows (tokens,): the row of the table of angles by which each key is rotated, -1 for none.
    """

    def __init__(
        self, memory: Tensor, spans: Sequence[tuple[int, int, Tensor]], geometry: Geometry, codec: str
    ) -> None:
        self._geometry, self._packing = geometry, PACKINGS[codec]
        self._memory_views = memory.view(geometry.torch_dtype), memory, memory.view(torch.float16)
        unit = 1 if self._packing[0] else geometry.torch_dtype.itemsize
        columns = list[Tensor]()
        for begin, start, angle_rows in spans:
            index = torch.arange(angle_rows.numel())
            same = torch.ones_like(index)
            columns.append(
                torch.stack(
                    [begin // unit * same, index, angle_rows.numel() * same, start + index, angle_rows]
                )
            )
        joined = torch.cat(columns, dim=1).int()
        # Each column is aligned: Triton compiles anew for pointers that are not.
        self._count, extra = joined.shape[1], -joined.shape[1] % ALIGNED
        self._columns = torch.nn.functional.pad(joined, (0, extra)).to(memory.device).unbind()

    def place(self, keys: Tensor, values: Tensor, rope: Rope, angles: tuple[Tensor, Tensor]) -> None:
        """Fill keys and values, (H, capacity, D) and (H, capacity, Dv), from memory. angles: cos and sin, (n, R/2)
        float32.
        """
        g = self._geometry
        shape = row_constants(g.key_size, g.value_size, rope)
        shape["ALIGNED"] = g.key_size % ALIGNED == 0 and g.value_size % ALIGNED == 0
        shape |= dict(zip(("PER_BYTE", "TOKEN_GROUP", "VALUE_GROUP"), self._packing, strict=True))
        strides = [*keys.stride()[:2], *values.stride()[:2]]
        with on_device(keys.device):
            _place[triton.cdiv(self._count, TILE_ROWS), g.kv_heads](
                *self._memory_views, *self._columns, *angles, keys, values, self._count, g.kv_heads, *strides, **shape,
            )  # fmt: skip


@functools.cache
def supports(
    device: torch.device, dtype: str, size: int, value_size: int, pairs: int, layout: str, codec: str
) -> bool:
    """Whether the kernel is right for such keys and values, packed so, on that device; compiles it."""
    dtypes = ["float16", "float32"] + ["bfloat16"] * (device.type == "cuda")
    if not available(device) or dtype not in dtypes or codec not in PACKINGS:
        return False

    def largest_error() -> float:
        tokens, draw, g = 37, torch.Generator().manual_seed(0), Geometry(1, 2, size, value_size, dtype)
        rope = Rope(torch.rand(pairs, generator=draw).to(device), layout)
        of_chunk = (
            torch.randn(g.kv_heads, tokens, each, generator=draw).to(g.torch_dtype)
            for each in (size, value_size)
        )
        packed = CODECS[codec].pack(*of_chunk)
        assert packed is not None, "numbers around 1"
        memory = torch.cat([part.flatten().view(torch.uint8) for part in packed]).to(device)
        memory = torch.nn.functional.pad(memory, (0, -len(memory) % 16))
        buffers = [
            torch.zeros(2, tokens + 3, each, dtype=g.torch_dtype, device=device)
            for each in (size, value_size)
        ]
        rotation = (7 * rope.inv_freq[None]).cos(), (7 * rope.inv_freq[None]).sin()
        expected = [each.clone() for each in buffers]
        CODECS[codec].unpack(
            memory[: CODECS[codec].layer_nbytes(g, tokens)], g, *(each[:, 3:] for each in expected)
        )
        rotate_(expected[0][:, 3:], *rotation, rope)
        table = RowTable(memory, [(0, 3, torch.zeros(tokens, dtype=torch.long))], g, codec)
        table.place(buffers[0], buffers[1], rope, rotation)
        errors = [(a.float() - b.float()).abs().max() for a, b in zip(buffers, expected, strict=True)]
        return float(torch.stack(errors).max())

    # A product and a sum may be rounded once or twice: a unit in the last place of numbers up to 8.
    return passes_self_test(
        largest_error, f"unpacking of stored KV ({codec})", 8 * torch.finfo(DTYPES[dtype]).eps
    )
