"""Encodes one layer's KV as bytes: raw, or eight bits per number; and `Source`, the interface of stored values.

A codec is a table row. It packs a layer into one run of bytes, which can be unpacked on any device, so that fewer bytes
are sent to an accelerator too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.files import Closing

LEVELS = 255  # of an unsigned byte, less one


@dataclass(frozen=True)
class Codec:
    """One row of the table. number: identifies the codec in file headers, and must never change its meaning.

    layer_nbytes(geometry, tokens): size of a packed layer. pack(keys, values): (H, T, D) tensors to contiguous CPU
    tensors, whose bytes in order are the layer; None for numbers that it cannot represent. unpack(packed, geometry,
    keys, values): fill keys and values, on the device that `packed` (layer_nbytes,) uint8 is on.
    """

    name: str
    number: int
    layer_nbytes: Callable[[Geometry, int], int]
    pack: Callable[[Tensor, Tensor], tuple[Tensor, ...] | None]
    unpack: Callable[[Tensor, Geometry, Tensor, Tensor], None]


class Source(Closing):
    """An open value of any tier. start: position of its first token when it was encoded; tier: the tier's name.

    in_memory: whether `read_layer` fills tensors of any device, from memory; else only the CPU's, from a file.
    """

    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    codec: Codec
    tier: str  # remote, disk, memory, device
    in_memory = True

    def expect(self, layer: int) -> None:
        """Announce that this layer will be read, so that a remote value can be fetched ahead."""

    @property
    def is_lost(self) -> bool:
        """Whether it is already known that reading will fail."""
        return False

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill keys (H, T, Dk) and values (H, T, Dv), which may be strided over H. Raises CorruptBlobError."""
        raise NotImplementedError

    def read_packed(self, layer: int, packed: Tensor) -> None:
        """Fill packed (layer bytes,) uint8, as the codec made it. Raises CorruptBlobError."""
        raise NotImplementedError

    def drop_page_cache(self) -> None:
        """Drop the file's pages from the page cache, so that the next read comes from the disk."""

    def close(self) -> None:
        """Nothing to do for values in memory."""


class Part(Source):
    """Some tokens of an open value, which is read as a whole; closing the part closes the value."""

    def __init__(self, source: Source, skipped: int, tokens: int) -> None:
        self._source, self._skipped = source, skipped
        self.token_ids = source.token_ids[skipped : skipped + tokens]
        self.start = source.start + skipped
        self.geometry, self.tier, self.in_memory = source.geometry, source.tier, source.in_memory
        self.codec = RAW  # as raw KV, because a part of a packed layer is not contiguous

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        tokens, at = len(self._source.token_ids), slice(self._skipped, self._skipped + len(self.token_ids))
        if at == slice(0, tokens):
            return self._source.read_layer(layer, keys, values)
        all_keys, all_values = (
            of.new_empty((of.shape[0], tokens, of.shape[2])) for of in (keys, values)
        )  # (H, T, D)
        self._source.read_layer(layer, all_keys, all_values)
        keys.copy_(all_keys[:, at])
        values.copy_(all_values[:, at])
        return None

    def expect(self, layer: int) -> None:
        self._source.expect(layer)

    @property
    def is_lost(self) -> bool:
        return self._source.is_lost

    def close(self) -> None:
        self._source.close()


def _pack_raw(keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return keys.detach().cpu().contiguous(), values.detach().cpu().contiguous()


def _unpack_raw(packed: Tensor, geometry: Geometry, keys: Tensor, values: Tensor) -> None:
    parts = packed.split([part.numel() * geometry.torch_dtype.itemsize for part in (keys, values)])
    for out, part in zip((keys, values), parts, strict=True):
        out.copy_(part.view(geometry.torch_dtype).view(out.shape), non_blocking=True)


def _int8_parts(geometry: Geometry, tokens: int) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes and shape of: keys' minimum and step, values' minimum and step (float16), keys' and values' codes."""
    heads, key_size, value_size = geometry.kv_heads, geometry.key_size, geometry.value_size
    by_channel, by_token = (heads, 1, key_size), (heads, tokens, 1)
    scales = [(2 * heads * size, shape) for size, shape in ((key_size, by_channel), (tokens, by_token))]
    codes = [(heads * tokens * size, (heads, tokens, size)) for size in (key_size, value_size)]
    return [scales[0], scales[0], scales[1], scales[1], *codes]


def _pack_int8(keys: Tensor, values: Tensor) -> tuple[Tensor, ...] | None:
    key_parts, value_parts = _quantised(keys, dim=1), _quantised(values, dim=2)
    scales = (*key_parts[:2], *value_parts[:2])
    if not all(bool(scale.isfinite().all()) for scale in scales):  # beyond float16, or not numbers
        return None
    return (*scales, key_parts[2], value_parts[2])


def _quantised(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Minimum and step along `dim` (float16), and the codes (uint8); number = minimum + step * code."""
    numbers = tensor.detach().cpu().float()
    infinity = torch.tensor(torch.inf, dtype=torch.float16)
    # Rounded outwards, because numbers outside of the range would be clipped.
    least = torch.nextafter(numbers.amin(dim, keepdim=True).half(), -infinity)
    step = (numbers.amax(dim, keepdim=True) - least.float()).div_(LEVELS)
    step = torch.nextafter(step.half(), infinity)
    codes = (numbers - least.float()).div_(step.float()).round_().clamp_(0, LEVELS)
    return least, step, codes.to(torch.uint8)


def _unpack_int8(packed: Tensor, geometry: Geometry, keys: Tensor, values: Tensor) -> None:
    parts = _int8_parts(geometry, keys.shape[1])
    pieces = packed.split([nbytes for nbytes, _ in parts])
    shaped = [piece.view(torch.float16) for piece in pieces[:4]] + list(pieces[4:])
    key_least, key_step, value_least, value_step, key_codes, value_codes = (
        piece.view(shape) for piece, (_, shape) in zip(shaped, parts, strict=True)
    )
    _restore(keys, key_codes, key_least, key_step)
    _restore(values, value_codes, value_least, value_step)


def _restore(out: Tensor, codes: Tensor, least: Tensor, step: Tensor) -> None:
    # Computed in float32 and cast once, else half of bfloat16's precision would be lost.
    out.copy_(torch.addcmul(least.float(), codes.float(), step.float()))


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("raw", 0, lambda geometry, tokens: tokens * geometry.layer_token_bytes, _pack_raw, _unpack_raw),
        # Asymmetric; keys a scale a channel, whose outliers are in few channels, values a scale a token: KIVI (ICML'24,
        # arXiv 2402.02750), section 3, there with 2 bits and groups.
        Codec(
            "int8",
            1,
            lambda *shape: sum(nbytes for nbytes, _ in _int8_parts(*shape)),
            _pack_int8,
            _unpack_int8,
        ),
    )
}
RAW = CODECS["raw"]
_BY_NUMBER = {codec.number: codec for codec in CODECS.values()}


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises UsageError for an unknown one."""
    if name not in CODECS:
        raise UsageError(f"the KV codec {name!r} is unknown; there are {', '.join(CODECS)}")
    return CODECS[name]


def codec_numbered(number: int) -> Codec | None:
    """The codec of a file's header; None for a number that this version does not know."""
    return _BY_NUMBER.get(number)
