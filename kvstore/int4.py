"""Four bits per number, two numbers in a byte: with the scales 31% of bfloat16's bytes.

After KIVI (ICML'24, arXiv 2402.02750), section 3, which uses two bits: keys have a scale per channel and group of 32
tokens, values a scale per token and group of 32 channels. RoPE turns a channel of keys into a sine over the tokens,
which fills its range evenly, so keys are packed un-rotated.
"""

import torch
from torch import Tensor

from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.quantize import Parts, dequantize, join_parts, parts_nbytes, quantize, split_parts

MAX_CODE = 15
GROUP = 32  # numbers that share a scale; the last group may be smaller


def layer_nbytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of one packed layer."""
    return parts_nbytes(_parts(geometry, tokens))


def _parts(geometry: Geometry, tokens: int) -> Parts:
    """Minimum and step of keys, minimum and step of values, codes of keys and of values."""
    heads, key_size, value_size = geometry.kv_heads, geometry.key_size, geometry.value_size
    key_scales = torch.float16, (heads, _groups_of(tokens, GROUP), key_size)
    value_scales = torch.float16, (heads, tokens, _groups_of(value_size, GROUP))
    codes = [(torch.uint8, (heads, tokens, _groups_of(size, 2))) for size in (key_size, value_size)]
    return [key_scales, key_scales, value_scales, value_scales, *codes]


def _groups_of(numbers: int, size: int) -> int:
    """How many groups of that size hold this many numbers, rounded up."""
    return -(-numbers // size)


def pack(keys: Tensor, values: Tensor) -> tuple[Tensor, ...] | None:
    """One layer's parts; None for numbers beyond float16. keys: not rotated."""
    *key_scales, key_codes = _quantized_in_groups(keys.detach().cpu().float(), 1)
    *value_scales, value_codes = _quantized_in_groups(values.detach().cpu().float(), 2)
    return join_parts([*key_scales, *value_scales], [_pack_nibbles(key_codes), _pack_nibbles(value_codes)])


def _quantized_in_groups(numbers: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = [quantize(group, dim, MAX_CODE) for group in numbers.split(GROUP, dim)]
    minimum, step, codes = (torch.cat(each, dim) for each in zip(*groups, strict=True))
    return minimum, step, codes


def _pack_nibbles(codes: Tensor) -> Tensor:
    """(H, T, D) to (H, T, D/2, rounded up): the first half of D in the lower bits, the second in the upper ones."""
    half = _groups_of(codes.shape[2], 2)
    packed = codes[..., :half].clone()
    packed[..., : codes.shape[2] - half] |= codes[..., half:] << 4
    return packed


def unpack(packed: Tensor, geometry: Geometry, keys: Tensor, values: Tensor) -> None:
    """Fill keys, not rotated, and values (H, T, D), on packed's device."""
    key_minimum, key_step, value_minimum, value_step, key_codes, value_codes = split_parts(
        packed, _parts(geometry, keys.shape[1])
    )
    _dequantize_groups(keys, _unpack_nibbles(key_codes, geometry.key_size), key_minimum, key_step, 1)
    _dequantize_groups(
        values, _unpack_nibbles(value_codes, geometry.value_size), value_minimum, value_step, 2
    )


def _unpack_nibbles(packed: Tensor, size: int) -> Tensor:
    """The inverse of `_pack_nibbles`: (H, T, D/2, rounded up) to (H, T, D). size: D."""
    return torch.cat((packed & MAX_CODE, packed >> 4), 2)[..., :size]


def _dequantize_groups(out: Tensor, codes: Tensor, minimum: Tensor, step: Tensor, dim: int) -> None:
    groups, rest = divmod(out.shape[dim], GROUP)
    grouped = groups * GROUP
    if groups:
        numbers, coded = (t.narrow(dim, 0, grouped).unflatten(dim, (groups, GROUP)) for t in (out, codes))
        scales = (t.narrow(dim, 0, groups).unsqueeze(dim + 1) for t in (minimum, step))
        dequantize(numbers, coded, *scales)
    if rest:
        numbers, coded = (t.narrow(dim, grouped, rest) for t in (out, codes))
        dequantize(numbers, coded, *(t.narrow(dim, groups, 1) for t in (minimum, step)))
