"""Eight bits per number: keys have a scale per channel, because few channels have their outliers; values one per token.

After KIVI (ICML'24, arXiv 2402.02750), section 3, which uses two bits, and groups.
"""

import torch
from torch import Tensor

from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.quantize import Parts, dequantize, join_parts, parts_nbytes, quantize, split_parts

MAX_CODE = 255


def layer_nbytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of one packed layer."""
    return parts_nbytes(_parts(geometry, tokens))


def _parts(geometry: Geometry, tokens: int) -> Parts:
    """Minimum and step of keys, minimum and step of values, codes of keys and of values."""
    heads, key_size, value_size = geometry.kv_heads, geometry.key_size, geometry.value_size
    by_channel, by_token = (torch.float16, (heads, 1, key_size)), (torch.float16, (heads, tokens, 1))
    codes = [(torch.uint8, (heads, tokens, size)) for size in (key_size, value_size)]
    return [by_channel, by_channel, by_token, by_token, *codes]


def pack(keys: Tensor, values: Tensor) -> tuple[Tensor, ...] | None:
    """One layer's parts; None for numbers beyond float16."""
    *key_scales, key_codes = quantize(keys.detach().cpu().float(), 1, MAX_CODE)
    *value_scales, value_codes = quantize(values.detach().cpu().float(), 2, MAX_CODE)
    return join_parts([*key_scales, *value_scales], [key_codes, value_codes])


def unpack(packed: Tensor, geometry: Geometry, keys: Tensor, values: Tensor) -> None:
    """Fill keys and values (H, T, D), on packed's device."""
    key_minimum, key_step, value_minimum, value_step, key_codes, value_codes = split_parts(
        packed, _parts(geometry, keys.shape[1])
    )
    dequantize(keys, key_codes, key_minimum, key_step)
    dequantize(values, value_codes, value_minimum, value_step)
