"""Prompts in the knowledge tree: which nodes a prompt's chunks are, and how what was computed exactly gets there."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.nodes import Nodes
from ragblend.engine.plan import Span
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import Asking, Worth, patient
from ragblend.kvstore.blob import file_nbytes
from ragblend.kvstore.chunks import ChunkKV
from ragblend.kvstore.codec import RAW
from ragblend.kvstore.errors import Cancelled, CorruptBlobError, StoreFullError
from ragblend.kvstore.fingerprint import node_key
from ragblend.kvstore.memory import whole
from ragblend.kvstore.tree import Node, match

# What joins two chunks of a path: a separator, or a heading. Longer text may be somebody's own words, as between the
# passages of two questions, and none of that is stored beside a passage.
JOINT_TOKENS = 16
ASKED_AGAIN = 1.5  # retrievals; a little of the earlier ones has faded


def path_of(runtime: Runtime, prompt: Prompt, collection: str) -> list[tuple[Node, Chunk]]:
    """The chunks that stand one behind the other, as places in the tree; the last token of a prompt is in none."""
    path, everything, parent = list[tuple[Node, Chunk]](), prompt.token_ids, None
    start = len(prompt.prefix_ids)
    for chunk, (offset, stop) in zip(prompt.chunks, prompt.places, strict=True):
        if chunk.whole is not None or offset - start > JOINT_TOKENS or stop >= len(everything):
            break
        ids, salt = everything[start:stop], chunk.collection or collection
        if parent is None:
            key = runtime.key_of(prompt.prefix_ids, ids, salt)
        else:
            key = node_key(parent, salt, ids)
        path.append((Node(key, ids, start, parent), chunk))
        start, parent = stop, key
    return path


@dataclass(frozen=True)
class Computed:
    """The KV of a node, as views (H, T, D) of the cache in which it was computed, L keys and L values."""

    node: Node
    chunk: Chunk
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


def computed_in(
    cache: FusedCache, path: Sequence[tuple[Node, Chunk]], spans: Sequence[Span]
) -> list[Computed]:
    """What of the path was computed by a policy that is exact: all that it has not read."""
    read = {span.stop for span in spans if span.reader is not None}
    layers, found = range(cache.geometry.layers), list[Computed]()
    for node, chunk in path:
        if node.stop not in read:
            views = [cache.span(layer, node.start, node.stop) for layer in layers]
            found.append(Computed(node, chunk, *map(list, zip(*views, strict=True))))
    return found


def grow(runtime: Runtime, collection: str, computed: Sequence[Computed]) -> None:
    """Enter nodes, from the first on, without the device: where requests never leave it alone, none would be entered.

    While the store has room all of them; what would displace others only where it is asked for again. The tree's first
    level is what is encoded alone, behind the canonical prefix: behind another one, which may hold somebody's words,
    there are paths only where passages were encoded behind it on purpose.
    """
    geometry, store = runtime.fingerprint.geometry, runtime.store
    for each in computed:
        node, salt = each.node, each.chunk.collection or collection
        alone = runtime.key_of(runtime.canonical_prefix, node.token_ids, salt)
        with runtime.use.turn():
            if store.contains(node.key):
                continue
            has_room = file_nbytes(geometry, len(node.token_ids), RAW) <= store.room_bytes
            is_wanted = has_room or store.times_asked(node.key) >= ASKED_AGAIN
        is_root_elsewhere = node.parent is None and node.key != alone
        if runtime.codec is not RAW or runtime.chores.hurried or is_root_elsewhere or not is_wanted:
            return
        try:
            if not Nodes(runtime, salt).keep_computed(each.chunk, node.key, partial(_copied, runtime, each)):
                return
        except StoreFullError:
            return


def _copied(runtime: Runtime, each: Computed) -> ChunkKV:
    keys, values = (
        [layer.clone(memory_format=torch.contiguous_format).cpu() for layer in layers]
        for layers in (each.keys, each.values)
    )
    node, geometry = each.node, runtime.fingerprint.geometry
    return ChunkKV(node.token_ids, node.start, geometry, keys, values, node.parent)


def learn(runtime: Runtime, prompt: Prompt, collection: str) -> None:
    """When nobody needs the device, compute the first node of the path that is not stored, once asked for again.

    Raises Cancelled where it is given up.
    """
    path, store = path_of(runtime, prompt, collection), runtime.store
    with runtime.use.turn():
        stored = list(takewhile(lambda place: store.contains(place[0].key), path))
        if not stored or len(stored) == len(path):
            return
        node, chunk = path[len(stored)]
        if runtime.codec is not RAW or store.times_asked(node.key) < ASKED_AGAIN:
            return

    def given_up() -> bool:
        return runtime.chores.gives_up(Worth.PREPARE)

    def made() -> ChunkKV:
        with runtime.queue.turn(Asking(given_up), background=True, claim=patient()) as turn:
            if runtime.loaded_now is None:
                raise Cancelled("the model was let go")
            encoder = ChunkEncoder(runtime.decoder, prompt.prefix_ids)
            for source in match(store.open_chunk, [place for place, _ in stored], runtime.decoder.geometry):
                with source:
                    encoder.go_on(whole(source))
            if encoder.start != node.start:
                raise Cancelled("what the node stands behind is gone")
            kv = encoder.encode(node.token_ids, lambda: turn.is_wanted() or given_up())
            return replace(kv, parent=node.parent)

    with suppress(CorruptBlobError, StoreFullError):  # the next time, if there is one
        Nodes(runtime, chunk.collection or collection).keep_computed(chunk, node.key, made)
