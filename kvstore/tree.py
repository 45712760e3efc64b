"""The knowledge tree: KV of chunks computed after exact context, so that it needs no repair.

RAGCache (arXiv 2404.12457) sections 4 and 5. A node is a chunk, with the separator before it, after a path of other
nodes after a prefix. Its key is a digest of that path. Its KV is an ordinary value of the store whose header names its
parent; KV that was encoded alone has no parent, and fused KV is never stored. On the first level a node is the chunk's
own KV, stored once, because a chunk directly after its encoding prefix is exact.

A node with children is not evicted, a node is deleted with its descendants, and one whose parent is gone is deleted
when the store is opened next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.codec import Source
from ragblend.kvstore.keys import ChunkKey


@dataclass(frozen=True)
class Node:
    """A node of the tree.

    token_ids: of the separator and the chunk; start: position of the first one; parent: None on the first level.
    """

    key: ChunkKey
    token_ids: tuple[int, ...]
    start: int
    parent: ChunkKey | None

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def match(open_chunk: Callable[..., Source | None], path: Sequence[Node], geometry: Geometry) -> list[Source]:
    """The longest stored beginning of the path, opened; every node of the path counts as requested.

    open_chunk: `KVStore.open_chunk`. KV that a codec has rounded is not exact, so it ends the path.
    """
    opened = [open_chunk(n.key, n.token_ids, geometry, n.start, n.parent) for n in path]
    found = list(takewhile(lambda source: source is not None and source.is_exact, opened))
    for source in opened[len(found) :]:
        if source is not None:
            source.close()
    return [source for source in found if source is not None]
