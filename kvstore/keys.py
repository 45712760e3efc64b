"""ChunkKey, the address of stored KV, and token ids as bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragblend.kvstore.errors import UsageError

FORMAT_VERSION = 2  # one version for keys, blobs and folders
_TOKEN = np.dtype("<u4")


@dataclass(frozen=True)
class ChunkKey:
    """The address of one chunk's KV: 64 hex digits of SHA-256 (see `chunk_key`)."""

    digest: str

    def __post_init__(self) -> None:
        assert len(self.digest) == 64 and set(self.digest) <= set("0123456789abcdef"), self.digest

    def __str__(self) -> str:
        return self.digest


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; UsageError for an id that does not fit."""
    try:
        wide = np.asarray(token_ids, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"token ids must be whole numbers, found {error}") from error
    if wide.ndim != 1 or (wide.size and not 0 <= wide.min() <= wide.max() < 2**32):
        raise UsageError("token ids must be one flat sequence of numbers from 0 to 2**32 - 1")
    return wide.astype(_TOKEN).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`."""
    return tuple(np.frombuffer(packed, dtype=_TOKEN).tolist())
