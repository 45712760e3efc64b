"""Keys of KV: SHA-256 over token ids, model fingerprint, encoding prefix and salt.

Canonical bytes: the format version, a domain, then every field as (name length, value length, name, value). The lengths
make the encoding injective, unlike joined text or JSON (1 or 1.0, escapes).
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.keys import FORMAT_VERSION, ChunkKey, pack_tokens


def _canonical(domain: str, fields: Iterable[tuple[str, bytes]]) -> bytes:
    parts = [struct.pack("<I", FORMAT_VERSION)]
    for name, value in [("domain", domain.encode()), *fields]:
        parts.append(struct.pack("<IQ", len(name.encode()), len(value)) + name.encode() + value)
    return b"".join(parts)


@dataclass(frozen=True)
class ModelFingerprint:
    """Everything that must be equal for one model's KV to be usable by another.

    weights, tokenizer: hex digests of the content (never a name); rope: canonical JSON of RoPE's parameters.
    """

    weights: str
    tokenizer: str
    geometry: Geometry
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
    """The key of the KV of `token_ids`, encoded by `model` after `prefix_ids`, in collection `salt`."""
    fields = [
        ("model", bytes.fromhex(model.digest)),
        ("prefix", pack_tokens(prefix_ids)),
        ("salt", salt.encode("utf-8", "surrogatepass")),
        ("tokens", pack_tokens(token_ids)),
    ]
    return ChunkKey(hashlib.sha256(_canonical("ragblend chunk", fields)).hexdigest())


def node_key(parent: ChunkKey, salt: str, token_ids: Sequence[int]) -> ChunkKey:
    """The key of the KV of `token_ids`, computed after the path that ends with `parent` (see `tree.py`)."""
    fields = [
        ("parent", bytes.fromhex(parent.digest)),
        ("salt", salt.encode("utf-8", "surrogatepass")),
        ("tokens", pack_tokens(token_ids)),
    ]
    return ChunkKey(hashlib.sha256(_canonical("ragblend node", fields)).hexdigest())
