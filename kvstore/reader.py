"""An open value: layers read straight from the file into the caller's tensors, checked on the way.

The file stays open, so it may be evicted, replaced or unlinked meanwhile: a reader finishes what it began.
"""

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragblend.kvstore.blob import BlobDamage, BlobHeader, read_header, tensor_bytes
from ragblend.kvstore.chunks import ChunkKey, Geometry
from ragblend.kvstore.closing import Closing
from ragblend.kvstore.codec import RAW, Codec
from ragblend.kvstore.errors import CorruptBlobError, StoreError

_IOV_MAX = max(16, os.sysconf("SC_IOV_MAX"))
Damaged = Callable[[str], None]


class ChunkReader(Closing):
    """One chunk's KV on disk; a context manager. `KVStore.open_chunk` makes it, its header verified."""

    def __init__(self, fd: int, header: BlobHeader, path: Path, damaged: Damaged) -> None:
        self.header = header
        self._fd, self._path, self._damaged = fd, path, damaged
        self._state = threading.Condition()
        self._reading, self._closed, self._reported = 0, False, False

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.header.token_ids

    @property
    def start(self) -> int:
        """Position of the first token when the chunk was encoded."""
        return self.header.start

    @property
    def geometry(self) -> Geometry:
        return self.header.geometry

    @property
    def codec(self) -> Codec:
        """How its layers are packed."""
        return self.header.codec

    @property
    def tier(self) -> str:
        """Where it lies."""
        return "disk"

    @property
    def in_memory(self) -> bool:
        """Whether it lies in memory, host's or device's: no."""
        return False

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill keys (H, T, Dk) and values (H, T, Dv), CPU tensors of the geometry's dtype, with a layer's KV.

        They may be slices of larger tensors, strided over H: each (T, D) head is contiguous. Several
        threads may read at once. Raises CorruptBlobError (the file is then in quarantine, the tensors hold
        nothing of use).
        """
        self._assert_fits(layer, keys, values)
        if self.codec is RAW:
            self._read(layer, [tensor_bytes(head) for tensor in (keys, values) for head in tensor])
            return
        packed = torch.empty(self.header.layer_nbytes, dtype=torch.uint8)
        self.read_packed(layer, packed)
        self.codec.unpack(packed, self.geometry, keys, values)

    def read_packed(self, layer: int, packed: Tensor) -> None:
        """Fill packed (layer bytes,), uint8 on the CPU, with a layer as the codec made it. Raises CorruptBlobError."""
        assert packed.numel() == self.header.layer_nbytes, packed.shape
        self._read(layer, [tensor_bytes(packed)])

    def _read(self, layer: int, buffers: list[Any]) -> None:
        with self._open_fd() as fd:
            try:
                found = read_into(fd, buffers, self.header.layer_offset(layer))
            except OSError as error:
                raise self._damage(f"reading layer {layer} failed: {error.strerror}") from error
        if found != self.header.layer_nbytes:
            raise self._damage(f"layer {layer} ends after {found} of {self.header.layer_nbytes} bytes")
        crc = 0
        for buffer in buffers:
            crc = zlib.crc32(buffer, crc)
        if crc != self.header.layer_crcs[layer]:
            raise self._damage(f"layer {layer} does not match its checksum")

    def drop_page_cache(self) -> None:
        """Ask the kernel to forget this file's pages, so that the next read comes from the disk."""
        with self._open_fd() as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file when the reads under way are done; closing twice is fine."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: self._reading == 0)
        os.close(self._fd)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    @contextmanager
    def _open_fd(self) -> Iterator[int]:
        """The descriptor, which `close` leaves alone meanwhile: its number could soon be another file's."""
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

    def _assert_fits(self, layer: int, keys: Tensor, values: Tensor) -> None:
        g, tokens = self.geometry, len(self.token_ids)
        assert 0 <= layer < g.layers, layer
        assert keys.shape == (g.kv_heads, tokens, g.key_size), keys.shape
        assert values.shape == (g.kv_heads, tokens, g.value_size), values.shape
        assert keys.dtype == values.dtype == g.torch_dtype, (keys.dtype, values.dtype)

    def _damage(self, what: str) -> CorruptBlobError:
        with self._state:
            first, self._reported = not self._reported, True
        if first:
            self._damaged(what)
        return BlobDamage(
            "bad-layer", f"reading KV from {self._path}: {what}. It is out of use; encode the chunk anew."
        )


def open_verified(
    path: Path, key: ChunkKey, token_ids: Sequence[int] | None, damaged: Damaged
) -> ChunkReader:
    """Open a value file; CorruptBlobError unless length, header, key and token ids are right.

    token_ids None compares none (for check(), which has only the key). OSError passes through.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        header = read_header(lambda nbytes, offset: _pread(fd, nbytes, offset), os.fstat(fd).st_size)
        if header.key != key:
            raise BlobDamage("wrong-key", f"the file under key {key} holds key {header.key}")
        if token_ids is not None and header.token_ids != tuple(token_ids):
            raise BlobDamage("wrong-key", "the file holds the KV of other token ids")
    except BaseException:
        os.close(fd)
        raise
    return ChunkReader(fd, header, path, damaged)


def _pread(fd: int, nbytes: int, offset: int) -> bytes:
    buffer = bytearray(nbytes)
    return bytes(buffer[: read_into(fd, [memoryview(buffer)], offset)])


def read_into(fd: int, buffers: Sequence[Any], offset: int) -> int:
    """Fill `buffers` in order from `offset` with preadv; bytes read, fewer only at the end of the file."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    first, total = 0, 0
    while first < len(views):
        count = os.preadv(fd, views[first : first + _IOV_MAX], offset + total)
        if count == 0:
            break
        total += count
        while first < len(views) and count >= len(views[first]):  # a short read may end anywhere
            count -= len(views[first])
            first += 1
        if count:
            views[first] = views[first][count:]
    return total
