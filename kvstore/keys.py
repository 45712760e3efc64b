"""Token ids + model fingerprint + encoding prefix + salt -> the SHA-256 that a chunk's KV is found by.

Canonical bytes: the format version, a domain, then every field as (name length, value length, name, value).
With the lengths inside, no two inputs share bytes, which joined text or JSON (1 or 1.0, escapes) would not
promise.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.kvstore.chunks import Geometry

FORMAT_VERSION = 2  # of keys, blobs and folders alike: one number, so that none of them can drift
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


def _canonical(domain: str, fields: Iterable[tuple[str, bytes]]) -> bytes:
    parts = [struct.pack("<I", FORMAT_VERSION)]
    for name, value in [("domain", domain.encode()), *fields]:
        parts.append(struct.pack("<IQ", len(name.encode()), len(value)) + name.encode() + value)
    return b"".join(parts)


@dataclass(frozen=True)
class ModelFingerprint:
    """What must be equal for one model's KV to be usable by another.

    weights, tokenizer: hex digests of the content (never a name); rope: canonical JSON of RoPE's parameters.
    """

    weights: str
    tokenizer: str
    geometry: "Geometry"
    rope: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 hex over all fields, the geometry's dtype and the format version included."""
        g = self.geometry
        fields = [
            ("weights", self.weights.encode()),
            ("tokenizer", self.tokenizer.encode()),
            ("shape", struct.pack("<4Q", g.layers, g.kv_heads, g.key_size, g.value_size)),
            ("dtype", g.dtype.encode()),
            ("rope", self.rope.encode()),
        ]
        return hashlib.sha256(_canonical("ragblend model", fields)).hexdigest()


def chunk_key(
    model: ModelFingerprint, prefix_ids: Sequence[int], salt: str, token_ids: Sequence[int]
) -> ChunkKey:
    """The address of the KV of `token_ids`, encoded by `model` behind `prefix_ids`, in collection `salt`."""
    fields = [
        ("model", bytes.fromhex(model.digest)),
        ("prefix", pack_tokens(prefix_ids)),
        ("salt", salt.encode("utf-8", "surrogatepass")),
        ("tokens", pack_tokens(token_ids)),
    ]
    return ChunkKey(hashlib.sha256(_canonical("ragblend chunk", fields)).hexdigest())


def node_key(parent: ChunkKey, salt: str, token_ids: Sequence[int]) -> ChunkKey:
    """The address of the KV of `token_ids`, computed behind all that `parent` stands for (see `tree.py`)."""
    fields = [
        ("parent", bytes.fromhex(parent.digest)),
        ("salt", salt.encode("utf-8", "surrogatepass")),
        ("tokens", pack_tokens(token_ids)),
    ]
    return ChunkKey(hashlib.sha256(_canonical("ragblend node", fields)).hexdigest())
