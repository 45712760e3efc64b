"""Four bits a number, two in a byte: 0.31 of the bytes of bfloat16.

As KIVI (ICML'24, arXiv 2402.02750), section 3, there with two bits: keys with a scale a channel in groups of 32 tokens,
values with a scale a token in groups of 32 channels. Rotated by RoPE, a channel of keys is a sine over the tokens and
fills its range evenly; so keys are packed as they were before it.
"""

import torch
from torch import Tensor

from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.quantize import Parts, joined, parts_nbytes, quantized, restore, split

LEVELS = 15
GROUP = 32  # numbers with one scale; the last ones of a row that is no multiple have their own


def layer_nbytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of one packed layer."""
    return parts_nbytes(_parts(geometry, tokens))


def _parts(geometry: Geometry, tokens: int) -> Parts:
    """Keys' least and step, values' least and step, keys' and values' codes."""
    heads, key_size, value_size = geometry.kv_heads, geometry.key_size, geometry.value_size
    of_keys = torch.float16, (heads, _count(tokens, GROUP), key_size)
    of_values = torch.float16, (heads, tokens, _count(value_size, GROUP))
    codes = [(torch.uint8, (heads, tokens, _count(size, 2))) for size in (key_size, value_size)]
    return [of_keys, of_keys, of_values, of_values, *codes]


def _count(numbers: int, size: int) -> int:
    """How many pieces of that size hold them."""
    return -(-numbers // size)


def pack(keys: Tensor, values: Tensor) -> tuple[Tensor, ...] | None:
    """One layer's parts; None for numbers beyond float16. keys: not rotated."""
    *key_scales, key_codes = _quantized_in_groups(keys.detach().cpu().float(), 1)
    *value_scales, value_codes = _quantized_in_groups(values.detach().cpu().float(), 2)
    return joined([*key_scales, *value_scales], [_two_in_a_byte(key_codes), _two_in_a_byte(value_codes)])


def _quantized_in_groups(numbers: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = [quantized(group, dim, LEVELS) for group in numbers.split(GROUP, dim)]
    least, step, codes = (torch.cat(each, dim) for each in zip(*groups, strict=True))
    return least, step, codes


def _two_in_a_byte(codes: Tensor) -> Tensor:
    """(H, T, D) to (H, T, D/2, rounded up): the first half of a head in the lower bits."""
    half = _count(codes.shape[2], 2)
    packed = codes[..., :half].clone()
    packed[..., : codes.shape[2] - half] |= codes[..., half:] << 4
    return packed


def unpack(packed: Tensor, geometry: Geometry, keys: Tensor, values: Tensor) -> None:
    """Fill keys, not rotated, and values (H, T, D), on packed's device."""
    key_least, key_step, value_least, value_step, key_codes, value_codes = split(
        packed, _parts(geometry, keys.shape[1])
    )
    _restore_groups(keys, _one_in_a_byte(key_codes, geometry.key_size), key_least, key_step, 1)
    _restore_groups(values, _one_in_a_byte(value_codes, geometry.value_size), value_least, value_step, 2)


def _one_in_a_byte(packed: Tensor, size: int) -> Tensor:
    """(H, T, D/2, rounded up) to (H, T, D)."""
    return torch.cat((packed & LEVELS, packed >> 4), 2)[..., :size]


def _restore_groups(out: Tensor, codes: Tensor, least: Tensor, step: Tensor, dim: int) -> None:
    groups, rest = divmod(out.shape[dim], GROUP)
    whole = groups * GROUP
    if groups:
        numbers, coded = (of.narrow(dim, 0, whole).unflatten(dim, (groups, GROUP)) for of in (out, codes))
        scales = (of.narrow(dim, 0, groups).unsqueeze(dim + 1) for of in (least, step))
        restore(numbers, coded, *scales)
    if rest:
        numbers, coded = (of.narrow(dim, whole, rest) for of in (out, codes))
        restore(numbers, coded, *(of.narrow(dim, groups, 1) for of in (least, step)))
