"""ChunkKV <-> one self-checking file, layers in order.

    fixed    magic, format version and codec, header bytes, file bytes, key digest, start, tokens, geometry
    layers   crc32 of every layer, L uint32
    tokens   the token ids, T uint32
    parent   the key of its parent node in the tree, 32 bytes, if it has one
    padding  to 64 bytes, then crc32 of all of the above
    payload  layer 0: K (H, T, D), V (H, T, D), or as the codec packs them; layer 1: ...
             one contiguous run per layer

The header repeats the key and the token ids, so that a file under a wrong name is detected before use. CRC-32 protects
against accidents only (ISA-L's takes a tenth of the time of zlib's): whoever can write to the folder (0700) is trusted.
"""

import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragblend.kvstore import system
from ragblend.kvstore.checksum import crc32
from ragblend.kvstore.chunks import DTYPES, ChunkKV, Geometry
from ragblend.kvstore.codec import RAW, Codec, Source, codec_numbered
from ragblend.kvstore.errors import CorruptBlobError, StoreError, UsageError
from ragblend.kvstore.files import finish_deleting, open_file
from ragblend.kvstore.keys import FORMAT_VERSION, ChunkKey, pack_tokens, unpack_tokens

MAGIC = b"RBKV\r\n\x1a\n"  # a text-mode copy would change it
_FIXED = struct.Struct("<8sHHIQ32sQ5I8s")  # the codec, 0 for raw, was the upper half of a 32-bit version
_HAS_PARENT = 0x100  # flag in the codec field, unknown to earlier versions
_PARENT_BYTES = 32
_LEAD = struct.Struct("<8sHHIQ")
_CRC = struct.Struct("<I")
_ALIGN = 64
_MAX_HEADER_BYTES = 64 << 20


class BlobDamage(CorruptBlobError):
    """Damage of one file; kind is one of `upkeep.Problem`'s."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class BlobHeader:
    """The header of a blob."""

    key: ChunkKey
    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    layer_crcs: tuple[int, ...]
    codec: Codec = RAW
    parent: ChunkKey | None = None

    @property
    def nbytes(self) -> int:
        raw = _FIXED.size + 4 * self.geometry.layers + 4 * len(self.token_ids) + _CRC.size
        raw += _PARENT_BYTES if self.parent else 0
        return -(-raw // _ALIGN) * _ALIGN

    @property
    def layer_nbytes(self) -> int:
        return self.codec.layer_nbytes(self.geometry, len(self.token_ids))

    @property
    def file_nbytes(self) -> int:
        return self.nbytes + self.geometry.layers * self.layer_nbytes

    def layer_offset(self, layer: int) -> int:
        """Offset of a layer in the file, in bytes."""
        return self.nbytes + layer * self.layer_nbytes

    def pack(self) -> bytes:
        g, digest = self.geometry, bytes.fromhex(self.key.digest)
        codec, parent = self.codec.number, b""
        if self.parent is not None:
            codec, parent = codec | _HAS_PARENT, bytes.fromhex(self.parent.digest)
        lead = (MAGIC, FORMAT_VERSION, codec, self.nbytes, self.file_nbytes)
        shape = (len(self.token_ids), g.layers, g.kv_heads, g.key_size, g.value_size)
        fixed = _FIXED.pack(*lead, digest, self.start, *shape, g.dtype.encode())
        crcs = struct.pack(f"<{g.layers}I", *self.layer_crcs)
        body = (fixed + crcs + pack_tokens(self.token_ids) + parent).ljust(self.nbytes - _CRC.size, b"\0")
        return body + _CRC.pack(crc32(body))


def file_nbytes(geometry: Geometry, tokens: int, codec: Codec) -> int:
    """Size in bytes of the file with the KV of this many tokens."""
    return BlobHeader(ChunkKey("0" * 64), (0,) * tokens, 0, geometry, (), codec).file_nbytes


def read_header(pread: Callable[[int, int], bytes], file_nbytes: int) -> BlobHeader:
    """Read a header through `pread(nbytes, offset)`; BlobDamage unless checksum, shape and lengths all agree."""
    lead = pread(_LEAD.size, 0)
    _require(
        len(lead) == _LEAD.size, f"the file ends after {len(lead)} bytes, inside its header", "bad-length"
    )
    magic, version, _, header_nbytes, stated_nbytes = _LEAD.unpack(lead)
    is_our_format = magic == MAGIC and version == FORMAT_VERSION
    _require(is_our_format, f"not a KV file of format {FORMAT_VERSION}: it begins with {lead[:12].hex()}")
    lengths = f"the file has {file_nbytes} bytes, its header says {stated_nbytes}"
    _require(stated_nbytes == file_nbytes, lengths, "bad-length")
    is_possible = _FIXED.size + _CRC.size <= header_nbytes <= min(file_nbytes, _MAX_HEADER_BYTES)
    _require(is_possible, f"a header of {header_nbytes} bytes is impossible")

    raw = pread(header_nbytes, 0)
    is_sound = len(raw) == header_nbytes and _CRC.unpack(raw[-_CRC.size :]) == (crc32(raw[: -_CRC.size]),)
    _require(is_sound, "the header does not match its checksum")
    fields = _FIXED.unpack_from(raw)
    digest, start, tokens, layers, heads, key_size, value_size, dtype = fields[5:]
    has_parent = bool(fields[2] & _HAS_PARENT)
    codec, name = codec_numbered(fields[2] & ~_HAS_PARENT), dtype.rstrip(b"\0").decode("ascii", "replace")
    if codec is None:
        raise BlobDamage("bad-header", f"this version does not know its codec, {fields[2]}")
    has_shape = name in DTYPES and layers and heads and key_size and value_size and tokens
    _require(has_shape, f"the header describes an impossible shape: {fields[7:]}")
    crcs_end = _FIXED.size + 4 * layers
    tokens_end = crcs_end + 4 * tokens
    parent = raw[tokens_end : tokens_end + _PARENT_BYTES * has_parent]
    _require(tokens_end + len(parent) + _CRC.size <= len(raw), "the header is shorter than its tables")
    header = BlobHeader(
        ChunkKey(digest.hex()),
        unpack_tokens(raw[crcs_end:tokens_end]),
        start,
        Geometry(layers, heads, key_size, value_size, name),
        struct.unpack_from(f"<{layers}I", raw, _FIXED.size),
        codec,
        ChunkKey(parent.hex()) if has_parent else None,
    )
    do_agree = (header.nbytes, header.file_nbytes) == (header_nbytes, file_nbytes)
    _require(do_agree, f"lengths disagree: {header_nbytes} + payload is not {file_nbytes} bytes")
    return header


def _require(condition: object, message: str, kind: str = "bad-header") -> None:
    if not condition:
        raise BlobDamage(kind, message)


def tensor_bytes(tensor: Tensor) -> Any:
    """A contiguous CPU tensor's own memory as uint8 (numpy has no bfloat16): no copy, writable."""
    assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    assert tensor.device.type == "cpu", tensor.device
    return tensor.detach().view(torch.uint8).numpy()


def _bytes_by_head(tensor: Tensor) -> Any:
    """A CPU tensor's memory as uint8: (H, T, D), perhaps strided over H, to (H, T, bytes). Each head is contiguous."""
    assert tensor.stride()[1:] == (tensor.shape[2], 1), (tensor.shape, tensor.stride())
    assert tensor.device.type == "cpu", tensor.device
    return tensor.detach().view(torch.uint8).numpy()


@dataclass(frozen=True)
class Blob:
    """A chunk's KV ready to be written: the header, and each layer's payload as contiguous CPU tensors."""

    header: BlobHeader
    layers: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, key: ChunkKey, chunk: ChunkKV, codec: Codec = RAW) -> "Blob":
        """Pack and checksum every layer of `chunk`; UsageError if it has no tokens.

        A raw layer is not copied. KV that the codec cannot hold is written raw.
        """
        tokens, layers = len(chunk.token_ids), list[tuple[Tensor, ...]]()
        if codec.unrotated and chunk.unrotated_keys is None:
            return cls.of(key, chunk)
        if not tokens or chunk.start < 0:
            raise UsageError(f"cannot store a chunk of {tokens} tokens from position {chunk.start}")
        for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
            if codec.unrotated and chunk.unrotated_keys is not None:
                keys = chunk.unrotated_keys(layer)
            packed = codec.pack(keys, values)
            if packed is None:
                return cls.of(key, chunk)
            layers.append(packed)
        crcs = tuple(_crc(map(tensor_bytes, packed)) for packed in layers)
        token_ids, start, parent = tuple(chunk.token_ids), chunk.start, chunk.parent
        header = BlobHeader(key, token_ids, start, chunk.geometry, crcs, codec, parent)
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


def _crc(buffers: Iterable[Any]) -> int:
    return reduce(lambda crc, buffer: crc32(buffer, crc), buffers, 0)


OnDamage = Callable[[str], None]  # called once, with a description
PAGE_CACHE = "page cache"  # the source of reads of a file that the kernel holds in memory


class ChunkReader(Source):
    """One chunk's KV on disk, its header verified; a context manager. Made by `KVStore.open_chunk`."""

    tier, in_memory, reads_runs = "disk", False, True

    def __init__(self, fd: int, header: BlobHeader, path: Path, on_damage: OnDamage) -> None:
        self.header, self.token_ids, self.start = header, header.token_ids, header.start
        self.geometry, self.codec = header.geometry, header.codec
        self._fd, self._path, self._on_damage = fd, path, on_damage
        self._state = threading.Condition()
        self._reading, self._closed, self._reported = 0, False, False

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill keys (H, T, Dk) and values (H, T, Dv), CPU tensors of the geometry's dtype, with a layer's KV.

        They may be slices of larger tensors, strided over H: each (T, D) head is contiguous. Several threads may read
        at once. Raises CorruptBlobError (the file is then quarantined, and the tensors' content undefined).
        """
        g, tokens = self.geometry, len(self.token_ids)
        assert keys.shape == (g.kv_heads, tokens, g.key_size), keys.shape
        assert values.shape == (g.kv_heads, tokens, g.value_size), values.shape
        assert keys.dtype == values.dtype == g.torch_dtype, (keys.dtype, values.dtype)
        if self.codec is RAW:
            self._read(layer, [head for tensor in (keys, values) for head in _bytes_by_head(tensor)])
            return
        packed = torch.empty(self.header.layer_nbytes, dtype=torch.uint8)
        self.read_packed(layer, packed)
        self.codec.unpack(packed, g, keys, values)

    def read_packed(self, layer: int, packed: Tensor) -> None:
        self.read_packed_layers(layer, [packed])

    def read_packed_layers(self, first: int, packed: Sequence[Tensor]) -> None:
        """In one system call, during which other threads run."""
        assert all(each.numel() == self.header.layer_nbytes for each in packed), packed[0].shape
        self._read(first, *([tensor_bytes(each)] for each in packed))

    def _read(self, first: int, *layers: list[Any]) -> None:
        """Fill the buffers of consecutive layers, and compare their checksums."""
        assert 0 <= first <= self.geometry.layers - len(layers), (first, len(layers))
        nbytes = self.header.layer_nbytes
        with self._open_fd() as fd:
            try:
                buffers = [buffer for layer in layers for buffer in layer]
                found = system.read_into(fd, buffers, self.header.layer_offset(first))
            except OSError as error:
                raise self._damage(f"reading layer {first} failed: {error.strerror}") from error
        if found != nbytes * len(layers):
            raise self._damage(
                f"layer {first + found // nbytes} ends after {found % nbytes} of {nbytes} bytes"
            )
        for layer, buffers in enumerate(layers, first):
            if _crc(buffers) != self.header.layer_crcs[layer]:
                raise self._damage(f"layer {layer} does not match its checksum")

    @property
    def comes_from(self) -> str:
        """Checked at three offsets in the file."""
        header = self.header
        offsets = (header.layer_offset(0), header.file_nbytes // 2, header.file_nbytes - 1)
        with self._open_fd() as fd:
            return PAGE_CACHE if all(system.is_cached(fd, offset) for offset in offsets) else self.tier

    def drop_page_cache(self) -> None:
        with self._open_fd() as fd:
            system.drop_pages(fd)

    def close(self) -> None:
        """Close the file when running reads are done. Idempotent."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: self._reading == 0)
        os.close(self._fd)
        finish_deleting()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    @contextmanager
    def _open_fd(self) -> Iterator[int]:
        """The descriptor; `close` waits meanwhile, because the number could be reused for another file."""
        with self._state:
            if self._closed:
                raise StoreError(f"reading {self._path} after its reader was closed; open the chunk again")
            self._reading += 1
        try:
            yield self._fd
        finally:
            with self._state:
                self._reading -= 1
                self._state.notify_all()

    def _damage(self, what: str) -> CorruptBlobError:
        """The error for damage, which is reported once."""
        with self._state:
            is_first, self._reported = not self._reported, True
        if is_first:
            self._on_damage(what)
        return BlobDamage(
            "bad-layer",
            f"reading KV from {self._path}: {what}. It is not used any more; encode the chunk again.",
        )


def open_verified(
    path: Path,
    key: ChunkKey,
    token_ids: Sequence[int] | None,
    on_damage: OnDamage,
    geometry: Geometry | None = None,
    start: int | None = None,
    parent: ChunkKey | None = None,
) -> ChunkReader:
    """Open a value file; CorruptBlobError unless length, header, key, token ids, geometry, start and parent match.

    An argument of None is not compared (check() knows only the key). But if token ids are given, parent None is: KV
    computed after a node is never used as KV that was encoded alone. on_damage: called once if a layer turns out to be
    damaged later. OSError passes through.
    """
    fd = open_file(path)
    try:
        header = read_header(partial(system.read_at, fd), os.fstat(fd).st_size)
        check_header(header, key, token_ids, geometry, start, parent)
    except BaseException:
        os.close(fd)
        raise
    return ChunkReader(fd, header, path, on_damage)


def check_header(
    header: BlobHeader,
    key: ChunkKey,
    token_ids: Sequence[int] | None,
    geometry: Geometry | None,
    start: int | None,
    parent: ChunkKey | None,
) -> None:
    """Compare a header with the arguments of `open_verified`. Raises CorruptBlobError."""
    _require(header.key == key, f"the file under key {key} holds key {header.key}", "wrong-key")
    has_same_tokens = token_ids is None or header.token_ids == tuple(token_ids)
    _require(has_same_tokens, "the file holds the KV of other token ids", "wrong-key")
    found = f"the file holds KV of {header.geometry} from position {header.start}"
    fits = geometry in (None, header.geometry) and start in (None, header.start)
    _require(fits, f"{found}, not {geometry} from {start}", "wrong-key")
    has_same_parent = token_ids is None or header.parent == parent
    _require(has_same_parent, f"the file holds KV computed after {header.parent}, not {parent}", "wrong-key")
