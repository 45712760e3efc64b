"""Nodes of a collection: a node id with the token ids of its passage, and the key of its KV.

`NodeEncoder` enters nodes, before or with their KV, finds the token ids of prompts' node ids, stores KV that a node
refers to, and deletes nodes with their KV.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ragblend.engine.prompts.segments import Chunk
from ragblend.engine.prompts.tokenizing import NodeTokenIds
from ragblend.engine.results import Missing
from ragblend.engine.runtime_base import RuntimeBase
from ragblend.engine.scheduling.background import Priority
from ragblend.engine.scheduling.queue import PATIENCE_S, Cancel
from ragblend.kvstore.blob import Blob, file_nbytes
from ragblend.kvstore.chunks import ChunkKV
from ragblend.kvstore.errors import RemoteError, StoreError, UnknownChunkError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.nodes import NodeIndex, Scope
from ragblend.kvstore.remote import Remote, Wanted

BATCH_NODES = 200  # nodes that are handled while the store's lock is held
BATCH_PAUSE_S = 0.001  # between two batches, so that a waiting thread gets the lock
log = logging.getLogger("ragblend")
TokenIds = tuple[int, ...]
Progress = Callable[[int, int], None]  # called with the passages done, and their number


@dataclass(frozen=True)
class UnencodedNode:
    """A node without KV. nbytes: size of its KV once encoded; fits: whether the store has room for it without evicting.

    passage: its token ids.
    """

    node_id: str
    passage: TokenIds
    key: ChunkKey
    nbytes: int
    fits: bool


class NodeEncoder(ABC):
    """The nodes of one collection, and an encoder for them: the model in this process, or a server (subclasses).

    A passage is given as its token ids. KV is encoded after the canonical prefix, unless stated otherwise.
    """

    def __init__(self, runtime: RuntimeBase, collection: str) -> None:
        self._runtime, self._collection = runtime, collection

    def enter(
        self, node_ids: Sequence[str], passages: Sequence[TokenIds], keys: Sequence[ChunkKey | None]
    ) -> None:
        """Record the passage of each node id, and the key of its KV (None if there is none yet).

        KV that no node refers to afterwards is deleted.
        """
        with self._runtime.store_lock:
            self._runtime.nodes.put_many(self._scope, zip(node_ids, passages, keys, strict=True))
        self._delete_orphaned_kv()

    def enter_named(self, chunks: Sequence[Chunk]) -> None:
        """Enter the nodes that a prompt names beside their passages, if they are new or had other passages.

        Call it before the prompt is computed: entered later, a node that was deleted or replaced meanwhile would come
        back. A failing disk is only logged, because the question can still be answered.
        """
        runtime, new = self._runtime, dict[str, dict[str, TokenIds]]()
        try:
            for chunk in chunks:
                node_id, ids, collection = (
                    chunk.node_id,
                    chunk.encoded_ids,
                    chunk.collection or self._collection,
                )
                if node_id is None or chunk.entered or not ids:
                    continue
                if runtime.nodes.get(runtime.scope(collection), node_id) != ids:
                    new.setdefault(collection, {})[node_id] = ids
            for collection, passages in new.items():
                nodes = type(self)(runtime, collection)
                nodes.enter(list(passages), list(passages.values()), [None] * len(passages))
        except StoreError as error:
            log.warning("passages of this prompt get no KV for the next question: %s", error)

    def token_ids_of(self, chunks: Sequence[Chunk]) -> NodeTokenIds:
        """Token ids of the chunks that have only a node id, by collection and node id. Raises UnknownChunkError for a
        node that was never encoded.
        """
        found: NodeTokenIds = {}
        for chunk in chunks:
            if chunk.token_ids is not None or chunk.text is not None or chunk.node_id is None:
                continue
            collection = chunk.collection or self._collection
            ids = self._runtime.nodes.get(self._runtime.scope(collection), chunk.node_id)
            if ids is None:
                raise UnknownChunkError(
                    f"no chunk with the node id {chunk.node_id!r} was encoded in the collection {collection!r} "
                    f"of {self._runtime.home}; encode it first, or pass its text as well: Chunk(text, node_id)"
                )
            found[chunk.collection, chunk.node_id] = ids
        return found

    def forget(self, node_ids: Sequence[str]) -> int:
        """Delete nodes, hidden ones too, and the KV that no other node shares. Returns the bytes freed."""
        self._drop_tasks(node_ids)
        with self._runtime.store_lock:
            self._runtime.nodes.delete(self._collection, node_ids)
        return self._delete_orphaned_kv()

    def hide(self, node_ids: Sequence[str]) -> None:
        """Treat nodes as deleted, in the shared store too, but keep their KV here until `unhide` or `forget`."""
        self._drop_tasks(node_ids)
        runtime = self._runtime
        with runtime.store_lock:
            shared = runtime.store.remote is not None
            runtime.nodes.set_hidden(self._collection, node_ids, True, shared)
        self._delete_shared()

    def unhide(self, node_ids: Sequence[str]) -> None:
        """Use hidden nodes and their KV again, and offer it to the shared store."""
        runtime = self._runtime
        with runtime.store_lock:
            keys, store = runtime.nodes.set_hidden(self._collection, node_ids, False), runtime.store
            for key in keys:
                if store.remote is not None and store.contains(key):
                    store.remote.queue_write(key)

    def _drop_tasks(self, node_ids: Sequence[str]) -> None:
        """Drop queued tasks that encode these nodes, and the list of nodes that an earlier process did not encode."""
        self._runtime.forget_unstored()
        mine = {(self._collection, node_id) for node_id in node_ids}
        self._runtime.background.drop(lambda name: isinstance(name, tuple) and name[:2] in mine)

    def forget_all(self) -> int:
        """Delete every node of the collection, its KV and its registered texts; returns the bytes freed."""
        self._runtime.forget_unstored()
        mine = self._collection
        # Tasks that encode its passages would enter the nodes again.
        self._runtime.background.drop(lambda name: isinstance(name, tuple) and name[0] == mine)
        with self._runtime.store_lock:
            self._runtime.nodes.delete_collection(self._collection)
        return self._delete_orphaned_kv()

    def _delete_orphaned_kv(self) -> int:
        """Delete the KV in the node index's outbox, which no node refers to, here and in the shared store; returns the
        bytes freed.

        Deletes in batches, so that requests are not blocked. After a kill the next call deletes the rest, except KV
        that has a node again.
        """
        runtime, freed, last_digest = self._runtime, 0, ""
        failed: StoreError | None = None
        while True:
            with runtime.store_lock:
                store, nodes = runtime.store, runtime.nodes
                orphaned = nodes.outbox(BATCH_NODES, after=last_digest)
                if not orphaned:
                    break
                last_digest = max(key.digest for key in orphaned)
                try:
                    freed += store.delete(orphaned, partial(_orphaned_keys, nodes, orphaned))
                    nodes.remove_from_outbox(orphaned, also_shared=store.remote is not None)
                except StoreError as error:  # a file that cannot be removed must not stop the others
                    failed = failed or error
            time.sleep(BATCH_PAUSE_S)
        if last_digest:
            self._note_shared_copies()
        self._delete_shared()
        if failed is not None:
            raise failed
        return freed

    def _note_shared_copies(self) -> None:
        """Log once that deleted KV may stay in a shared store whose URL this process was not given."""
        runtime = self._runtime
        if runtime.has_noted_shared_copies:
            return
        with runtime.store_lock:
            if runtime.store.remote is not None or Remote.name not in runtime.store.totals_by_tier():
                return
        runtime.has_noted_shared_copies = True
        log.warning(
            "Copies of deleted KV may stay in the shared store that this home has used, until they expire: this "
            "process was not given its URL. To delete them, add the documents again and delete them with --remote."
        )

    def _delete_shared(self) -> None:
        """Delete from the shared store the KV that was deleted here, of any collection. If that store cannot be
        reached, the deletion is repeated when it answers again.
        """
        runtime = self._runtime
        with runtime.store_lock:
            store, waiting = runtime.store, runtime.nodes.outbox(shared=True)
        if store.remote is None or not waiting:
            return
        try:
            store.delete_shared(tuple(waiting))
        except RemoteError as error:
            log.warning(
                "%s. The KV of %d deleted passages may still be there. It is deleted when the shared store answers "
                "again, at the next deletion, or by `ragblend store gc`, and expires after its time-to-live.",
                error, len(waiting),
            )  # fmt: skip
            retry = partial(runtime.background.add, self._delete_shared, priority=Priority.STORE)
            store.remote.call_when_available(retry, NodeEncoder._delete_shared)
        else:
            with runtime.store_lock:
                runtime.nodes.remove_from_outbox(waiting)

    def keys_of(self, passages: Sequence[TokenIds], prefix: TokenIds) -> list[ChunkKey | None]:
        """The key of each passage's KV; None for a passage that can have no KV (empty, too long, or of a model that
        is not fused).
        """
        self._runtime.gate_verdict()  # runs the gate now, on which `refusal` depends
        return [self._key_of(passage, prefix) for passage in passages]

    def missing(self, node_ids: Sequence[str]) -> Missing:
        """Which of these nodes have no KV with this model, the most requested first; loads no weights."""
        runtime, found, sizes, left_out = self._runtime, list[tuple[float, str]](), dict[str, int](), 0
        geometry = runtime.fingerprint.geometry  # converts a GGUF: before the lock is taken
        prefix, scope = runtime.canonical_prefix, self._scope
        with runtime.store_lock:
            requests, room_bytes = runtime.store.unstored_request_counts(), max(0, runtime.store.room_bytes)
        for begin in range(0, len(node_ids), BATCH_NODES):
            with runtime.store_lock:
                for node_id in node_ids[begin : begin + BATCH_NODES]:
                    passage = runtime.nodes.get(scope, node_id) or ()
                    if not passage or not runtime.fits_window(len(prefix) + len(passage)):
                        left_out += 1
                        continue
                    key = runtime.key_of(prefix, passage, self._collection)
                    if not runtime.store.contains(key):
                        found.append((-requests.get(key.digest, 0.0), node_id))
                        sizes[key.digest] = len(passage)
            time.sleep(BATCH_PAUSE_S)
        found.sort(key=lambda each: each[0])  # a stable sort: nodes without requests stay in order
        nbytes = sum(file_nbytes(geometry, tokens, runtime.codec) for tokens in sizes.values())
        names = tuple(node_id for _, node_id in found)
        return Missing(names, sum(sizes.values()), nbytes, room_bytes, left_out)

    def store_chunk(self, chunk: Chunk, key: ChunkKey, make: Callable[[], ChunkKV | Blob]) -> bool:
        """Store the KV of a chunk, or of a path in the knowledge tree that ends with it; it is deleted with the chunk's
        node.

        make: gives the KV; called only if the node still exists. Returns whether the KV was stored: not if the node, or
        the KV of the path before it, was deleted.
        """
        return self.claim(chunk.node_id, chunk.encoded_ids, key) and self.store(key, make(), chunk.node_id)

    def claim(self, node_id: str | None, passage: TokenIds, key: ChunkKey) -> bool:
        """Make the key one of its node's, so that the KV is deleted with it. False if the node was deleted, or has
        another passage: then the KV must not be stored.
        """
        with self._runtime.store_lock:
            return node_id is None or self._runtime.nodes.claim(self._scope, node_id, passage, key)

    def copy_from_shared(
        self, key: ChunkKey, passage: TokenIds, prefix: TokenIds, node_id: str | None = None
    ) -> bool:
        """Copy a passage's KV from the shared store, if it has it; returns whether it is stored here now."""
        remote, geometry = self._runtime.store.remote, self._runtime.fingerprint.geometry
        blob = None if remote is None else remote.fetch(Wanted(key, passage, geometry, len(prefix)))
        return blob is not None and self.store(key, blob, node_id)

    def store(self, key: ChunkKey, chunk: ChunkKV | Blob, node_id: str | None) -> bool:
        """Store KV, unless its node was deleted while it was computed; returns whether it was stored.

        Call it outside of a device turn, so that deletions do not wait for the device.
        """
        runtime = self._runtime

        def has_node() -> bool:
            return node_id is None or runtime.nodes.has(self._scope, node_id, key)

        with runtime.store_lock:
            if isinstance(chunk, Blob):
                return runtime.store.put_blob(chunk, has_node)
            return runtime.store.put(key, chunk, runtime.codec, may_store=has_node)

    @property
    def _scope(self) -> Scope:
        return self._runtime.scope(self._collection)

    def _key_of(self, passage: TokenIds, prefix: TokenIds) -> ChunkKey | None:
        """The key of the passage's KV; None if it cannot have any."""
        if not passage or self._runtime.refusal(len(prefix) + len(passage)) is not None:
            return None
        return self._runtime.key_of(prefix, passage, self._collection)

    def _is_stored(self, key: ChunkKey) -> bool:
        with self._runtime.store_lock:
            return self._runtime.store.contains(key)

    def encode(
        self,
        passages: Sequence[TokenIds],
        keys: Sequence[ChunkKey | None],
        prefix: TokenIds,
        progress: Progress | None = None,
        node_ids: Sequence[str] | None = None,
    ) -> tuple[int, int]:
        """Encode the passages without KV; returns the tokens and chunks encoded. Requests are served in between.

        node_ids: entered with these keys; KV of a node that is deleted meanwhile is not stored.
        """
        encode_one, tokens, encoded = self._encoder_after(prefix), 0, 0
        names: Sequence[str | None] = node_ids or [None] * len(passages)
        for number, (passage, key, name) in enumerate(zip(passages, keys, names, strict=True), start=1):
            if key is not None and not self._is_stored(key):
                new = encode_one(passage, key, name)
                tokens, encoded = tokens + new, encoded + bool(new)
            if progress is not None:
                progress(number, len(passages))
        return tokens, encoded

    def _unencoded(self, node_id: str, reserved_bytes: int = 0) -> UnencodedNode | None:
        """The node, if it must be encoded; None if it was deleted, has KV, or gets it now from the shared store.

        reserved_bytes: size of KV that is computed and not yet written. Raises PromptTooLongError.
        """
        runtime, prefix = self._runtime, self._runtime.canonical_prefix
        with runtime.store_lock:
            passage = runtime.nodes.get(self._scope, node_id) or ()
            room_bytes = runtime.store.room_bytes - reserved_bytes
        runtime.check_length(len(prefix) + len(passage), "a passage with its prefix")
        key = self._key_of(passage, prefix)
        if key is None or not self.claim(node_id, passage, key) or self._is_stored(key):
            return None
        nbytes = file_nbytes(runtime.fingerprint.geometry, len(passage), runtime.codec)
        if nbytes <= room_bytes and self.copy_from_shared(key, passage, prefix, node_id):
            return None
        return UnencodedNode(node_id, passage, key, nbytes, nbytes <= room_bytes)

    def queue_encoding(self, chunk: Chunk) -> None:
        """Queue the encoding of a chunk, for the next question."""
        due, name = time.monotonic() + PATIENCE_S, (self._collection, chunk.node_id, chunk.encoded_ids)
        self._runtime.background.add(partial(self.encode_in_background, chunk, due), name, Priority.STORE)

    def queue_nodes(self, node_ids: Sequence[str]) -> None:
        """Queue the encoding of nodes; those that were deleted are left out.

        An index that cannot be read is logged: they are encoded at their next request.
        """
        try:
            for node_id in node_ids:
                if ids := self._runtime.nodes.get(self._scope, node_id):
                    self.queue_encoding(Chunk(node_id=node_id, token_ids=ids, entered=True))
        except StoreError as error:
            log.warning("passages of an earlier process stay without KV: %s", error)

    @abstractmethod
    def _encoder_after(self, prefix: TokenIds) -> Callable[[TokenIds, ChunkKey, str | None], int]:
        """A function of passage, key and node id that encodes the passage after that prefix and stores its KV.

        It returns the tokens encoded: 0 if the KV came from the shared store.
        """

    @abstractmethod
    def encode_missing(self, node_ids: Sequence[str], cancel: Cancel | None) -> Iterator[int]:
        """Encode nodes while no request needs the device, yielding the number of tokens encoded after each.

        Ends before a passage for which others would have to be evicted. Raises Cancelled and PromptTooLongError.
        """

    @abstractmethod
    def encode_in_background(self, chunk: Chunk, due: float) -> None:
        """The queued task: encode a chunk unless it is stored. due: until when to wait for an idle device, by
        `time.monotonic`.
        """


def _orphaned_keys(nodes: NodeIndex, keys: Collection[ChunkKey]) -> set[ChunkKey]:
    """The keys among these that no node refers to now."""
    return nodes.outbox().keys() & set(keys)
