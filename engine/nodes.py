"""Node ids of a collection: entered before there is KV, found again in prompts, and forgotten with their KV."""

import hashlib
from collections.abc import Sequence

from ragblend.engine.prompt import Chunk
from ragblend.engine.resources import Resources
from ragblend.kvstore.chunks import ChunkKey
from ragblend.kvstore.errors import UnknownChunkError

TokenIds = tuple[int, ...]


def enter(
    resources: Resources,
    collection: str,
    node_ids: Sequence[str],
    passages: Sequence[TokenIds],
    keys: Sequence[ChunkKey | None],
) -> None:
    """Note what each node id of a collection stands for. keys: under which its KV will be; None where none can be.

    KV that thereby lost its last node is deleted.
    """
    named = [
        (node_id, passage, key or _unstored_key(passage, collection))
        for node_id, passage, key in zip(node_ids, passages, keys, strict=True)
    ]
    _bury(resources, resources.nodes.put_many(resources.scope(collection), named))


def find(resources: Resources, collection: str, chunks: Sequence[Chunk]) -> dict[str, TokenIds]:
    """Token ids of the chunks that are named by node id alone. Raises UnknownChunkError for one never encoded here."""
    named = [c.node_id for c in chunks if c.token_ids is None and c.text is None and c.node_id is not None]
    found = {}
    for node_id in named:
        ids = resources.nodes.get(resources.scope(collection), node_id)
        if ids is None:
            raise UnknownChunkError(
                f"no chunk with the node id {node_id!r} was encoded in the collection "
                f"{collection!r} of {resources.home}; encode it first, or "
                "pass its text as well: Chunk(text, node_id)"
            )
        found[node_id] = ids
    return found


def forget(resources: Resources, collection: str, node_ids: Sequence[str]) -> int:
    """Remove nodes and the KV that no other node shares. Returns the bytes freed."""
    return _bury(resources, resources.nodes.delete(collection, node_ids))


def _bury(resources: Resources, doomed: Sequence[ChunkKey]) -> int:
    """Delete the KV that lost its last node; bytes freed. What a kill leaves of it the next call finishes."""
    if not doomed:
        return 0
    freed = sum(resources.store.delete(key) for key in doomed)
    resources.nodes.buried(doomed)
    return freed


def _unstored_key(token_ids: TokenIds, collection: str) -> ChunkKey:
    """A key for the node index where there is no KV: of an empty passage, or of a model that cannot be fused."""
    described = f"unstored|{collection}|{token_ids}"
    return ChunkKey(hashlib.sha256(described.encode()).hexdigest())
