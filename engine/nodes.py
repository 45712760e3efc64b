"""Chunks by node id: enters them before they have KV, resolves them in prompts, and deletes them with their KV."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ragblend.engine.prompts.segments import Chunk
from ragblend.engine.prompts.tokenizing import NodeIds
from ragblend.engine.results import Missing
from ragblend.engine.runtime_base import RuntimeBase
from ragblend.engine.scheduling.background import Priority
from ragblend.engine.scheduling.queue import PATIENCE_S, Cancel
from ragblend.kvstore.blob import Blob, file_nbytes
from ragblend.kvstore.chunks import ChunkKV
from ragblend.kvstore.errors import RemoteError, StoreError, UnknownChunkError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.nodes import NodeIndex, Scope
from ragblend.kvstore.remote import Wanted

BATCH = 200  # nodes that are handled while the store's lock is held
BREATH_S = 0.001  # pause between two batches, in which a waiting thread gets the lock
log = logging.getLogger("ragblend")
TokenIds = tuple[int, ...]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class UnencodedNode:
    """A node without KV. nbytes: of the KV that it will have; fits: whether the store's budget has room for it."""

    node_id: str
    passage: TokenIds
    key: ChunkKey
    nbytes: int
    fits: bool


class NodeEncoder(ABC):
    """The nodes of one collection and their encoder: the model loaded here, or a server.

    KV means KV encoded after the canonical prefix, unless stated otherwise.
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

        Before the prompt is computed: entered after it, a node that was deleted or replaced meanwhile came back. A disk
        that fails is logged, because the question can be answered.
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

    def find(self, chunks: Sequence[Chunk]) -> NodeIds:
        """Token ids of the chunks that have only a node id. Raises UnknownChunkError for one never encoded."""
        found: NodeIds = {}
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
                    store.remote.offer(key)

    def _drop_tasks(self, node_ids: Sequence[str]) -> None:
        """Drop the queued tasks that encode these nodes, and what is in memory alone."""
        self._runtime.forget_unstored()
        mine = {(self._collection, node_id) for node_id in node_ids}
        self._runtime.background.drop(lambda name: isinstance(name, tuple) and name[:2] in mine)

    def forget_all(self) -> int:
        """Delete every node of the collection, its KV and its registered texts; returns the bytes freed.

        Queued tasks that encode its passages are dropped, because they would enter the nodes again.
        """
        self._runtime.forget_unstored()
        mine = self._collection
        self._runtime.background.drop(lambda name: isinstance(name, tuple) and name[0] == mine)
        with self._runtime.store_lock:
            self._runtime.nodes.delete_collection(self._collection)
        return self._delete_orphaned_kv()

    def _delete_orphaned_kv(self) -> int:
        """Delete the KV that no node refers to, here and in the shared store; returns the bytes freed.

        Deletes in batches, so that requests are not blocked. After a kill the next call deletes the rest, except KV
        that has a node again.
        """
        runtime, freed, after = self._runtime, 0, ""
        failed: StoreError | None = None
        while True:
            with runtime.store_lock:
                store, nodes = runtime.store, runtime.nodes
                waiting = nodes.outbox(BATCH, after=after)
                if not waiting:
                    break
                after = max(key.digest for key in waiting)
                try:
                    freed += store.delete(waiting, partial(_still_orphaned, nodes, waiting))
                    nodes.deleted(waiting, also_shared=store.remote is not None)
                except StoreError as error:  # a file that cannot be removed must not stop the others
                    failed = failed or error
            time.sleep(BREATH_S)
        self._delete_shared()
        if failed is not None:
            raise failed
        return freed

    def _delete_shared(self) -> None:
        """Delete from the shared store KV that was deleted here, of any collection."""
        runtime = self._runtime
        with runtime.store_lock:
            store, owed = runtime.store, runtime.nodes.outbox(shared=True)
        if store.remote is None or not owed:
            return
        try:
            store.withdraw(tuple(owed))
        except RemoteError as error:
            log.warning(
                "%s. The KV of %d deleted passages may still be there, until it answers again, the next deletion, or "
                "`ragblend store gc`; at most for its time-to-live.", error, len(owed),
            )  # fmt: skip
            again = partial(runtime.background.add, self._delete_shared, priority=Priority.STORE)
            store.remote.when_back(again, NodeEncoder._delete_shared)
        else:
            with runtime.store_lock:
                runtime.nodes.deleted(owed)

    def keys_of(self, passages: Sequence[TokenIds], prefix: TokenIds) -> list[ChunkKey | None]:
        """The key of each passage's KV; None if it can have none."""
        self._runtime.judged()
        return [self._key_of(passage, prefix) for passage in passages]

    def missing(self, node_ids: Sequence[str]) -> Missing:
        """Which of these nodes have no KV with this model, the most requested first; loads no weights."""
        runtime, found, sizes, left_out = self._runtime, list[tuple[float, str]](), dict[str, int](), 0
        geometry = runtime.fingerprint.geometry  # converts a GGUF: before the lock is taken
        prefix, scope = runtime.canonical_prefix, self._scope
        with runtime.store_lock:
            asked, room_bytes = runtime.store.asked(), max(0, runtime.store.room_bytes)
        for begin in range(0, len(node_ids), BATCH):
            with runtime.store_lock:
                for node_id in node_ids[begin : begin + BATCH]:
                    passage = runtime.nodes.get(scope, node_id) or ()
                    if not passage or not runtime.fits_window(len(prefix) + len(passage)):
                        left_out += 1
                        continue
                    key = runtime.key_of(prefix, passage, self._collection)
                    if not runtime.store.contains(key):
                        found.append((-asked.get(key.digest, 0.0), node_id))
                        sizes[key.digest] = len(passage)
            time.sleep(BREATH_S)
        found.sort(key=lambda each: each[0])  # a stable sort: nodes without requests stay in order
        nbytes = sum(file_nbytes(geometry, tokens, runtime.codec) for tokens in sizes.values())
        names = tuple(node_id for _, node_id in found)
        return Missing(names, sum(sizes.values()), nbytes, room_bytes, left_out)

    def keep_for(self, chunk: Chunk, key: ChunkKey, make: Callable[[], ChunkKV | Blob]) -> bool:
        """Store KV of a chunk, or of a tree node that ends with it; it is deleted together with the chunk's node.

        make: called if the chunk's node still exists. False if the node, or the tree node before it, was deleted.
        """
        return self.claim(chunk.node_id, chunk.encoded_ids, key) and self.keep(key, make(), chunk.node_id)

    def claim(self, node_id: str | None, passage: TokenIds, key: ChunkKey) -> bool:
        """Whether this KV may be stored: its node was not deleted."""
        with self._runtime.store_lock:
            return node_id is None or self._runtime.nodes.claim(self._scope, node_id, passage, key)

    def fetched(self, key: ChunkKey, passage: TokenIds, prefix: TokenIds, node_id: str | None = None) -> bool:
        """Copy a passage's KV from the shared store; False if that did not work in time."""
        remote, geometry = self._runtime.store.remote, self._runtime.fingerprint.geometry
        blob = None if remote is None else remote.fetch(Wanted(key, passage, geometry, len(prefix)))
        return blob is not None and self.keep(key, blob, node_id)

    def keep(self, key: ChunkKey, chunk: ChunkKV | Blob, node_id: str | None) -> bool:
        """Store KV, unless its node was deleted while it was computed.

        Called outside of a device turn, so that deletions do not wait for the device.
        """
        runtime = self._runtime

        def wanted() -> bool:
            return node_id is None or runtime.nodes.has(self._scope, node_id, key)

        with runtime.store_lock:
            if isinstance(chunk, Blob):
                return runtime.store.put_blob(chunk, wanted)
            return runtime.store.put(key, chunk, runtime.codec, wanted=wanted)

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

    def _to_encode(self, node_id: str, taken_bytes: int = 0) -> UnencodedNode | None:
        """The passage to encode; None for a node that was deleted or has KV. Raises PromptTooLongError.

        taken_bytes: part of the store's budget reserved for KV that is not written yet.
        """
        runtime, prefix = self._runtime, self._runtime.canonical_prefix
        with runtime.store_lock:
            passage = runtime.nodes.get(self._scope, node_id) or ()
            room_bytes = runtime.store.room_bytes - taken_bytes
        runtime.check_length(len(prefix) + len(passage), "a passage behind its prefix")
        key = self._key_of(passage, prefix)
        if key is None or not self.claim(node_id, passage, key) or self._is_stored(key):
            return None
        nbytes = file_nbytes(runtime.fingerprint.geometry, len(passage), runtime.codec)
        if nbytes <= room_bytes and self.fetched(key, passage, prefix, node_id):
            return None
        return UnencodedNode(node_id, passage, key, nbytes, nbytes <= room_bytes)

    def queue_encoding(self, chunk: Chunk) -> None:
        """Encode a chunk in the background, for the next question."""
        due, name = time.monotonic() + PATIENCE_S, (self._collection, chunk.node_id, chunk.encoded_ids)
        self._runtime.background.add(partial(self.encode_later, chunk, due), name, Priority.STORE)

    def queue_unstored(self, node_ids: Sequence[str]) -> None:
        """Encode nodes in the background; those that were deleted meanwhile are left out.

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
        """A function that encodes and stores a node's passage after that prefix, and returns its tokens (0: not encoded
        here).
        """

    @abstractmethod
    def encode_missing(self, node_ids: Sequence[str], cancel: Cancel | None) -> Iterator[int]:
        """Encode entered nodes in the background, yielding the tokens encoded of each.

        Ends before a passage for which others would have to be evicted. Raises Cancelled and PromptTooLongError.
        """

    @abstractmethod
    def encode_later(self, chunk: Chunk, due: float) -> None:
        """Encode a chunk in the background unless it is stored. due: when to stop waiting for an idle device."""


def _still_orphaned(nodes: NodeIndex, keys: Collection[ChunkKey]) -> set[ChunkKey]:
    """The keys that still have no node."""
    return nodes.outbox().keys() & set(keys)
