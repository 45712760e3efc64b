"""Prompts in the knowledge tree: maps a prompt's chunks to nodes, and stores exactly computed KV."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch

from ragblend.engine.cache import FusedCache
from ragblend.engine.encode import ChunkEncoder
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
from ragblend.kvstore.memory import whole
from ragblend.kvstore.tree import Node, match

# The longest text between two chunks of a path: a separator, or a heading. Longer text may be a user's own words, as
# between the passages of two questions, and is never stored beside a passage.
JOINT_TOKENS = 16
ASKED_AGAIN = 1.5  # minimum weight of retrievals: two, of which the earlier counts a little less


def path_of(runtime: Runtime, prompt: Prompt, collection: str) -> list[tuple[Node, Chunk]]:
    """The adjacent chunks at the prompt's beginning, as nodes of the tree. No node holds the prompt's last token."""
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


def computed_in(
    cache: FusedCache, path: Sequence[tuple[Node, Chunk]], spans: Sequence[Span]
) -> list[Computed]:
    """The nodes of the path that an exact policy computed: those that were not loaded."""
    read = {span.stop for span in spans if span.reader is not None}
    layers, found = range(cache.geometry.layers), list[Computed]()
    for node, chunk in path:
        if node.stop not in read:
            views = [cache.span(layer, node.start, node.stop) for layer in layers]
            found.append(Computed(node, chunk, *map(list, zip(*views, strict=True))))
    return found


def store_computed(runtime: Runtime, collection: str, computed: Sequence[Computed]) -> None:
    """Store computed nodes in the tree, from the first on, without waiting for an idle device.

    Nodes for which others would be evicted are stored only if they were requested before. The first level of the tree
    is KV encoded alone after the canonical prefix. Another prefix may hold a user's own words, so paths after it exist
    only if passages were deliberately encoded after it.
    """
    geometry, store = runtime.fingerprint.geometry, runtime.store
    for each in computed:
        node, salt = each.node, each.chunk.collection or collection
        alone = runtime.key_of(runtime.canonical_prefix, node.token_ids, salt)
        with runtime.store_lock:
            if store.contains(node.key):
                continue
            has_room = file_nbytes(geometry, len(node.token_ids), RAW) <= store.room_bytes
            is_wanted = has_room or store.times_asked(node.key) >= ASKED_AGAIN
        is_root_elsewhere = node.parent is None and node.key != alone
        if runtime.codec is not RAW or runtime.background.stopping or is_root_elsewhere or not is_wanted:
            return
        try:
            if not LocalNodeEncoder(runtime, salt).keep_for(
                each.chunk, node.key, partial(_copied, runtime, each)
            ):
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


def compute_next_node(runtime: Runtime, prompt: Prompt, collection: str) -> None:
    """While the device is idle, compute the first node of the path that is not stored, if it was requested before.

    Raises Cancelled.
    """
    path, store = path_of(runtime, prompt, collection), runtime.store
    with runtime.store_lock:
        stored = list(takewhile(lambda place: store.contains(place[0].key), path))
        if not stored or len(stored) == len(path):
            return
        node, chunk = path[len(stored)]
        if runtime.codec is not RAW or store.times_asked(node.key) < ASKED_AGAIN:
            return

    def compute() -> ChunkKV:
        cancel = CallbackCancel(lambda: runtime.background.should_stop(Priority.PREPARE))
        with runtime.queue.turn(cancel, background=True) as turn:
            if runtime.loaded_now is None:
                raise Cancelled("the model was closed")
            encoder = ChunkEncoder(runtime.decoder, prompt.prefix_ids)
            for source in match(store.open_chunk, [place for place, _ in stored], runtime.decoder.geometry):
                with source:
                    encoder.extend_prefix(whole(source))
            if encoder.start != node.start:
                raise Cancelled("the parent of the node was deleted")
            kv = encoder.encode(node.token_ids, CallbackCancel(turn.is_wanted))
            return replace(kv, parent=node.parent)

    with suppress(CorruptBlobError, StoreFullError):  # the next request tries again
        LocalNodeEncoder(runtime, chunk.collection or collection).keep_for(chunk, node.key, compute)
