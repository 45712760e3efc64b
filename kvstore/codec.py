"""Encodes one layer's KV as bytes: raw, or in fewer bits; and `Source`, the interface of stored values.

A codec packs a layer into one run of bytes, which can be unpacked on any device, so that fewer bytes are sent to an
accelerator too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ragblend.kvstore import int4, int8
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.files import Closing


@dataclass(frozen=True)
class Codec:
    """An entry of CODECS. number: identifies the codec in file headers, and must never change its meaning.

    layer_nbytes(geometry, tokens): size of a packed layer. pack(keys, values): (H, T, D) tensors to contiguous CPU
    tensors, whose bytes in order are the layer; None for numbers that it cannot represent. unpack(packed, geometry,
    keys, values): fill keys and values, on the device that `packed` (layer_nbytes,) uint8 is on. unrotated: whether it
    packs `ChunkKV.unrotated_keys` instead of the rotated ones.
    """

    name: str
    number: int
    layer_nbytes: Callable[[Geometry, int], int]
    pack: Callable[[Tensor, Tensor], tuple[Tensor, ...] | None]
    unpack: Callable[[Tensor, Geometry, Tensor, Tensor], None]
    unrotated: bool = False

    def token_nbytes(self, geometry: Geometry) -> float:
        """Mean bytes per token, in all layers of a passage of 512 tokens, which share scales and padding."""
        return geometry.layers * self.layer_nbytes(geometry, 512) / 512


class Source(Closing):
    """An open value of any tier. start: position of its first token when it was encoded; tier: the tier's name.

    in_memory: whether `read_layer` fills tensors of any device, from memory; else only the CPU's, from a file.
    reads_runs: whether consecutive layers are read at once.
    """

    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    codec: Codec
    tier: str  # remote, disk, memory, device
    in_memory = True
    reads_runs = False

    def expect(self, layer: int) -> None:
        """Announce that this layer will be read, so that a remote value can be fetched ahead."""

    @property
    def comes_from(self) -> str:
        """The tier whose measured speed applies to reading; `page cache` for a file that the kernel holds in memory."""
        return self.tier

    @property
    def unrotated(self) -> bool:
        """Whether `read_layer` gives keys that are rotated to position 0 instead of their own positions."""
        return self.codec.unrotated

    @property
    def is_exact(self) -> bool:
        """Whether the KV has the same bits as when it was computed."""
        return self.codec is RAW

    @property
    def is_lost(self) -> bool:
        """Whether it is already known that reading will fail."""
        return False

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill keys (H, T, Dk) and values (H, T, Dv), which may be strided over H. Raises CorruptBlobError."""
        raise NotImplementedError

    def read_packed(self, layer: int, packed: Tensor) -> None:
        """Fill packed (layer bytes,) uint8 with the layer as the codec packed it. Raises CorruptBlobError."""
        raise NotImplementedError

    def read_packed_layers(self, first: int, packed: Sequence[Tensor]) -> None:
        """`read_packed` of consecutive layers from `first` on. Raises CorruptBlobError."""
        for layer, each in enumerate(packed, first):
            self.read_packed(layer, each)

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
        self.codec = RAW  # it is read unpacked, because a part of a packed layer is not contiguous

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        tokens, part = len(self._source.token_ids), slice(self._skipped, self._skipped + len(self.token_ids))
        if part == slice(0, tokens):
            return self._source.read_layer(layer, keys, values)
        all_keys, all_values = (
            out.new_empty((out.shape[0], tokens, out.shape[2])) for out in (keys, values)
        )  # (H, T, D)
        self._source.read_layer(layer, all_keys, all_values)
        keys.copy_(all_keys[:, part])
        values.copy_(all_values[:, part])
        return None

    def expect(self, layer: int) -> None:
        self._source.expect(layer)

    @property
    def comes_from(self) -> str:
        return self._source.comes_from

    @property
    def unrotated(self) -> bool:
        return self._source.unrotated

    @property
    def is_exact(self) -> bool:
        return self._source.is_exact

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


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("raw", 0, lambda geometry, tokens: tokens * geometry.layer_token_bytes, _pack_raw, _unpack_raw),
        Codec("int8", 1, int8.layer_nbytes, int8.pack, int8.unpack),
        Codec("int4", 2, int4.layer_nbytes, int4.pack, int4.unpack, unrotated=True),
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
