"""ChunkKV <-> one self-checking file, layers in order.

    fixed    magic, format version and codec, header bytes, file bytes, key digest, start, tokens, geometry
    layers   crc32 of every layer, L uint32
    tokens   the token ids, T uint32
    padding  to 64 bytes, then crc32 of all of the above
    payload  layer 0: K (H, T, D), V (H, T, D), or what the codec makes of them; layer 1: ...
             one contiguous run per layer

The header repeats the key and the token ids: a file under a wrong name is found out before it is used.
CRC-32 is there for accidents (3-4 GB/s in zlib); who can write to the folder is trusted (it is 0700).
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragblend.kvstore.chunks import DTYPES, ChunkKey, ChunkKV, Geometry
from ragblend.kvstore.codec import RAW, Codec, codec_numbered
from ragblend.kvstore.errors import CorruptBlobError, UsageError
from ragblend.kvstore.keys import FORMAT_VERSION, pack_tokens, unpack_tokens

MAGIC = b"RBKV\r\n\x1a\n"  # a text-mode copy would change it
_FIXED = struct.Struct(
    "<8sHHIQ32sQ5I8s"
)  # the codec has the upper half of what was a 32-bit version, 0 for raw
_LEAD = struct.Struct("<8sHHIQ")
_CRC = struct.Struct("<I")
_ALIGN = 64
_MAX_HEADER_BYTES = 64 << 20


class BlobDamage(CorruptBlobError):
    """What is wrong with one file; kind is a word of `check.Problem`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class BlobHeader:
    """Everything a blob says about itself before its payload."""

    key: ChunkKey
    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    layer_crcs: tuple[int, ...]
    codec: Codec = RAW

    @property
    def nbytes(self) -> int:
        raw = _FIXED.size + 4 * self.geometry.layers + 4 * len(self.token_ids) + _CRC.size
        return -(-raw // _ALIGN) * _ALIGN

    @property
    def layer_nbytes(self) -> int:
        return self.codec.layer_nbytes(self.geometry, len(self.token_ids))

    @property
    def file_nbytes(self) -> int:
        return self.nbytes + self.geometry.layers * self.layer_nbytes

    def layer_offset(self, layer: int) -> int:
        """Where in the file `layer` begins, in bytes."""
        return self.nbytes + layer * self.layer_nbytes

    def pack(self) -> bytes:
        g = self.geometry
        shape = (len(self.token_ids), g.layers, g.kv_heads, g.key_size, g.value_size)
        fixed = _FIXED.pack(
            MAGIC,
            FORMAT_VERSION,
            self.codec.number,
            self.nbytes,
            self.file_nbytes,
            bytes.fromhex(self.key.digest),
            self.start,
            *shape,
            g.dtype.encode(),
        )
        crcs = struct.pack(f"<{g.layers}I", *self.layer_crcs)
        body = (fixed + crcs + pack_tokens(self.token_ids)).ljust(self.nbytes - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))


def read_header(pread: Callable[[int, int], bytes], file_nbytes: int) -> BlobHeader:
    """Read and verify a header through `pread(nbytes, offset)`; BlobDamage says what is wrong."""
    lead = pread(_LEAD.size, 0)
    if len(lead) < _LEAD.size:
        raise BlobDamage("bad-length", f"the file ends after {len(lead)} bytes, inside its header")
    magic, version, _, header_nbytes, promised_nbytes = _LEAD.unpack(lead)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise BlobDamage(
            "bad-header", f"not a KV file of format {FORMAT_VERSION}: it begins with {lead[:12].hex()}"
        )
    if promised_nbytes != file_nbytes:
        raise BlobDamage(
            "bad-length", f"the file has {file_nbytes} bytes, its header promises {promised_nbytes}"
        )
    if not _FIXED.size + _CRC.size <= header_nbytes <= min(file_nbytes, _MAX_HEADER_BYTES):
        raise BlobDamage("bad-header", f"a header of {header_nbytes} bytes cannot be")
    return parse_header(pread(header_nbytes, 0), header_nbytes, file_nbytes)


def parse_header(raw: bytes, header_nbytes: int, file_nbytes: int) -> BlobHeader:
    """The header from its bytes; BlobDamage unless checksum, shape and lengths all agree."""
    if len(raw) < header_nbytes or zlib.crc32(raw[: -_CRC.size]) != _CRC.unpack(raw[-_CRC.size :])[0]:
        raise BlobDamage("bad-header", "the header does not match its checksum")
    fields = _FIXED.unpack_from(raw)
    digest, start, tokens, layers, heads, key_size, value_size, dtype = fields[5:]
    codec = codec_numbered(fields[2])
    if codec is None:
        raise BlobDamage(
            "bad-header", f"the KV is packed by codec {fields[2]}, which this version does not know"
        )
    name = dtype.rstrip(b"\0").decode("ascii", "replace")
    if name not in DTYPES or not (layers and heads and key_size and value_size and tokens):
        raise BlobDamage("bad-header", f"the header describes an impossible shape: {fields[7:]}")
    crcs_end = _FIXED.size + 4 * layers
    if crcs_end + 4 * tokens + _CRC.size > len(raw):
        raise BlobDamage("bad-header", "the header is shorter than its tables")
    header = BlobHeader(
        ChunkKey(digest.hex()),
        unpack_tokens(raw[crcs_end : crcs_end + 4 * tokens]),
        start,
        Geometry(layers, heads, key_size, value_size, name),
        struct.unpack_from(f"<{layers}I", raw, _FIXED.size),
        codec,
    )
    if header.nbytes != header_nbytes or header.file_nbytes != file_nbytes:
        raise BlobDamage(
            "bad-header", f"lengths disagree: {header_nbytes} + payload is not {file_nbytes} bytes"
        )
    return header


def tensor_bytes(tensor: Tensor) -> Any:
    """A contiguous CPU tensor's own memory as uint8 (numpy has no bfloat16): no copy, writable."""
    assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    assert tensor.device.type == "cpu", tensor.device
    return tensor.detach().view(torch.uint8).numpy()


@dataclass(frozen=True)
class Blob:
    """A chunk's KV about to be written: the header, and each layer's payload as contiguous CPU tensors."""

    header: BlobHeader
    layers: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, key: ChunkKey, chunk: ChunkKV, codec: Codec = RAW) -> "Blob":
        """Pack and checksum every layer of `chunk`; UsageError if it has no tokens.

        A raw layer is not copied. KV that the codec cannot hold is written raw.
        """
        if not chunk.token_ids or chunk.start < 0:
            raise UsageError(
                f"cannot store a chunk of {len(chunk.token_ids)} tokens from position {chunk.start}"
            )
        layers: list[tuple[Tensor, ...]] = []
        for keys, values in zip(chunk.keys, chunk.values, strict=True):
            packed = codec.pack(keys, values)
            if packed is None:
                return cls.of(key, chunk)
            layers.append(packed)
        crcs = tuple(_crc(packed) for packed in layers)
        header = BlobHeader(key, tuple(chunk.token_ids), chunk.start, chunk.geometry, crcs, codec)
        return cls(header, tuple(layers))

    @property
    def nbytes(self) -> int:
        return self.header.file_nbytes

    def pieces(self) -> Iterator[memoryview]:
        """The file's bytes in order, payload straight from the tensors."""
        yield memoryview(self.header.pack())
        for packed in self.layers:
            for tensor in packed:
                yield memoryview(tensor_bytes(tensor)).cast("B")


def _crc(packed: tuple[Tensor, ...]) -> int:
    crc = 0
    for tensor in packed:
        crc = zlib.crc32(tensor_bytes(tensor), crc)
    return crc
