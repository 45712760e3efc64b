"""Prompts in the knowledge tree: maps a prompt's chunks to tree nodes, and stores their exact KV."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile

from ragblend.engine.cache import FusedCache
from ragblend.engine.encode import ChunkEncoder, copied_kv
from ragblend.engine.model.decoder import Decoder
from ragblend.engine.node_encoder import LocalNodeEncoder
from ragblend.engine.plan import Span
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.results import Computed
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.background import Priority
from ragblend.engine.scheduling.queue import CallbackCancel
from ragblend.kvstore.blob import file_nbytes
from ragblend.kvstore.chunks import ChunkKV
from ragblend.kvstore.codec import RAW
from ragblend.kvstore.errors import Cancelled, CorruptBlobError, StoreFullError
from ragblend.kvstore.fingerprint import node_key
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.memory import read_whole
from ragblend.kvstore.tree import Node, match

# The longest text between two chunks of a path: a separator, or a heading. Longer text may be a user's own words, as
# between the passages of two questions, and is never stored beside a passage.
JOINT_TOKENS = 16
REQUESTED_TWICE = 1.5  # the least `request_count` of two requests, of which the older counts a little less


def path_of(runtime: Runtime, prompt: Prompt, collection: str) -> list[tuple[Node, Chunk]]:
    """The adjacent chunks at the prompt's beginning, as nodes of the tree.

    The path ends before a chunk that is empty, is a part of a whole, or ends the prompt.
    """
    path, all_ids, parent = list[tuple[Node, Chunk]](), prompt.token_ids, None
    start = len(prompt.prefix_ids)
    for chunk, (offset, stop) in zip(prompt.chunks, prompt.places, strict=True):
        can_be_node = chunk.whole is None and offset < stop < len(all_ids)
        if not can_be_node or offset - start > JOINT_TOKENS:
            break
        ids, salt = all_ids[start:stop], chunk.collection or collection
        if parent is None:
            key = runtime.key_of(prompt.prefix_ids, ids, salt)
            if runtime.codec is not RAW:  # the path begins with an unpacked copy, a child of the passage
                key, parent = node_key(key, salt, ids), key
        else:
            key = node_key(parent, salt, ids)
        path.append((Node(key, ids, start, parent), chunk))
        start, parent = stop, key
    return path


def computed_nodes(
    decoder: Decoder, cache: FusedCache, path: Sequence[tuple[Node, Chunk]], spans: Sequence[Span]
) -> list[Computed]:
    """The nodes of the path that an exact policy computed: those that were not loaded."""
    loaded_stops = {span.stop for span in spans if span.stored is not None}
    layers, found = range(cache.geometry.layers), list[Computed]()
    for node, chunk in path:
        if node.stop not in loaded_stops:
            views = [cache.span(layer, node.start, node.stop) for layer in layers]
            passage = (node.parent or node.key) if node is path[0][0] else None
            found.append(Computed(node, chunk, passage, views, decoder.rope))
    return found


def store_computed(runtime: Runtime, collection: str, computed: Sequence[Computed]) -> None:
    """Store computed nodes in the tree, from the first on, without waiting for an idle device.

    The first level of the tree is KV encoded alone after the canonical prefix. Another prefix may hold a user's own
    words, so paths after it exist only if passages were deliberately encoded after it.
    """
    for each in computed:
        node, salt, passage = each.node, each.chunk.collection or collection, each.passage
        canonical_key = runtime.key_of(runtime.canonical_prefix, node.token_ids, salt)
        has_other_prefix = passage not in (None, canonical_key)
        keys = [(node.key, node.parent)]
        if passage is not None and node.parent == passage:
            keys.insert(0, (passage, None))
        for key, parent in keys:
            with runtime.store_lock:
                if runtime.store.contains(key):
                    continue
                is_worth_it = _is_worth_storing(runtime, node, key, parent)
            if runtime.background.stopping or has_other_prefix or not is_worth_it:
                return
            nodes = LocalNodeEncoder(runtime, salt)
            try:
                if not nodes.store_chunk(each.chunk, key, partial(_copied_kv, runtime, each, parent)):
                    return
            except StoreFullError:
                return


def _is_worth_storing(runtime: Runtime, node: Node, key: ChunkKey, parent: ChunkKey | None) -> bool:
    """Whether the node was requested before, or there is room and it is not an unpacked copy beside packed KV."""
    if runtime.store.request_count(key) >= REQUESTED_TWICE:
        return True
    nbytes = file_nbytes(runtime.fingerprint.geometry, len(node.token_ids), runtime.codec)
    return (runtime.codec is RAW or parent is None) and nbytes <= runtime.store.room_bytes


def _copied_kv(runtime: Runtime, each: Computed, parent: ChunkKey | None) -> ChunkKV:
    node, geometry = each.node, runtime.fingerprint.geometry
    return replace(copied_kv(node.token_ids, node.start, geometry, each.layers, each.rope), parent=parent)


def compute_next_node(runtime: Runtime, prompt: Prompt, collection: str) -> None:
    """While the device is idle, compute the first node of the path that is not stored, if it was requested before.

    Raises Cancelled.
    """
    path, store = path_of(runtime, prompt, collection), runtime.store
    with runtime.store_lock:
        stored = list(takewhile(lambda place: store.contains(place[0].key), path))
        if len(stored) == len(path):
            return
        node, chunk = path[len(stored)]
        if node.parent is None or not store.contains(node.parent):
            return
        if store.request_count(node.key) < REQUESTED_TWICE:
            return

    def compute() -> ChunkKV:
        cancel = CallbackCancel(lambda: runtime.background.should_stop(Priority.PREPARE))
        with runtime.queue.turn(cancel, background=True) as turn:
            if runtime.loaded_now is None:
                raise Cancelled("the model was closed")
            encoder = ChunkEncoder(runtime.decoder, prompt.prefix_ids)
            for source in match(store.open_chunk, [place for place, _ in stored], runtime.decoder.geometry):
                with source:
                    encoder.extend_prefix(read_whole(source))
            if encoder.start != node.start:
                raise Cancelled("the parent of the node was deleted")
            kv = encoder.encode(node.token_ids, CallbackCancel(turn.should_stop))
            return replace(kv, parent=node.parent)

    with suppress(CorruptBlobError, StoreFullError):  # the next request tries again
        LocalNodeEncoder(runtime, chunk.collection or collection).store_chunk(chunk, node.key, compute)
