"""The knowledge tree: the KV of chunks, each computed behind exactly what stood before it, so that nothing is repaired.

RAGCache (arXiv 2404.12457) sections 4 and 5. A node is a chunk, with the few words that join it to the one before,
behind a path of other nodes behind a prefix. Its key is a digest of that path, its KV a value of the store like any
other, whose header names its parent: what was encoded alone has none, what was fused is in no file. On the first level
a node is the chunk's own KV, stored once, because a chunk right behind its encoding prefix is exact.

A node with nodes below it is not evicted, a node is deleted with all below it, and one whose parent is gone is deleted
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
    """One place in the tree.

    token_ids: of what joins it to its parent, and of its chunk; start: position of the first one; parent: None on the
    first level.
    """

    key: ChunkKey
    token_ids: tuple[int, ...]
    start: int
    parent: ChunkKey | None

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def match(open_chunk: Callable[..., Source | None], path: Sequence[Node], geometry: Geometry) -> list[Source]:
    """The longest part of the path that is stored, from its first node on, opened; each node counts as asked for.

    open_chunk: `KVStore.open_chunk`. What a codec has rounded is not exact: a chunk's own KV that was packed so ends
    the path.
    """
    opened = [open_chunk(n.key, n.token_ids, geometry, n.start, n.parent) for n in path]
    found = list(takewhile(lambda source: source is not None and source.is_exact, opened))
    for source in opened[len(found) :]:
        if source is not None:
            source.close()
    return [source for source in found if source is not None]
