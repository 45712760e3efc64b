"""Eight bits a number: keys with a scale a channel, whose outliers are in few channels, values with a scale a token.

KIVI (ICML'24, arXiv 2402.02750), section 3, there with two bits and groups.
"""

import torch
from torch import Tensor

from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.quantize import Parts, joined, parts_nbytes, quantized, restore, split

LEVELS = 255


def layer_nbytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of one packed layer."""
    return parts_nbytes(_parts(geometry, tokens))


def _parts(geometry: Geometry, tokens: int) -> Parts:
    """Keys' least and step, values' least and step, keys' and values' codes."""
    heads, key_size, value_size = geometry.kv_heads, geometry.key_size, geometry.value_size
    by_channel, by_token = (torch.float16, (heads, 1, key_size)), (torch.float16, (heads, tokens, 1))
    codes = [(torch.uint8, (heads, tokens, size)) for size in (key_size, value_size)]
    return [by_channel, by_channel, by_token, by_token, *codes]


def pack(keys: Tensor, values: Tensor) -> tuple[Tensor, ...] | None:
    """One layer's parts; None for numbers beyond float16."""
    *key_scales, key_codes = quantized(keys.detach().cpu().float(), 1, LEVELS)
    *value_scales, value_codes = quantized(values.detach().cpu().float(), 2, LEVELS)
    return joined([*key_scales, *value_scales], [key_codes, value_codes])


def unpack(packed: Tensor, geometry: Geometry, keys: Tensor, values: Tensor) -> None:
    """Fill keys and values (H, T, D), on packed's device."""
    key_least, key_step, value_least, value_step, key_codes, value_codes = split(
        packed, _parts(geometry, keys.shape[1])
    )
    restore(keys, key_codes, key_least, key_step)
    restore(values, value_codes, value_least, value_step)
