"""Chunks by their node ids: entered before there is KV, encoded, found in prompts, forgotten with their KV."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.prompts.segments import Chunk
from ragblend.engine.prompts.tokenizing import NodeIds
from ragblend.engine.results import Missing
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.scheduling.queue import PATIENCE_S, Asking, Turn, Worth
from ragblend.engine.scheduling.recovery import twice
from ragblend.kvstore.blob import Blob, file_nbytes
from ragblend.kvstore.chunks import ChunkKV
from ragblend.kvstore.errors import (
    Cancelled,
    PromptTooLongError,
    RemoteError,
    StoreFullError,
    UnknownChunkError,
)
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.nodes import Scope
from ragblend.kvstore.remote import Wanted

LOOKED_UP = 200  # nodes in one turn with the store
log = logging.getLogger("ragblend")
TokenIds = tuple[int, ...]
Progress = Callable[[int, int], None]
Leave = Callable[[], bool]


class Nodes:
    """The nodes of one collection. Where nothing else is said, KV is that behind the canonical prefix."""

    def __init__(self, runtime: Runtime, collection: str) -> None:
        self._runtime, self._collection = runtime, collection

    def enter(
        self, node_ids: Sequence[str], passages: Sequence[TokenIds], keys: Sequence[ChunkKey | None]
    ) -> None:
        """Note what each node id stands for. keys: under which its KV will be; None where none is yet.

        KV that thereby lost its last node is deleted.
        """
        with self._runtime.use.turn():
            self._runtime.nodes.put_many(self._scope, zip(node_ids, passages, keys, strict=True))
        self._bury()

    def find(self, chunks: Sequence[Chunk]) -> NodeIds:
        """Token ids of the chunks that are named by node id alone. Raises UnknownChunkError for one never encoded."""
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
        """Remove nodes and the KV that no other node shares. Returns the bytes freed."""
        self._runtime.forget_unstored()
        with self._runtime.use.turn():
            self._runtime.nodes.delete(self._collection, node_ids)
        return self._bury()

    def forget_all(self) -> int:
        """The same for every node of the collection and every text that is looked for. What waits to be encoded is
        dropped: it would enter its node again.
        """
        self._runtime.forget_unstored()
        mine = self._collection
        self._runtime.chores.drop(lambda name: isinstance(name, tuple) and name[0] == mine)
        with self._runtime.use.turn():
            self._runtime.nodes.delete_collection(self._collection)
        return self._bury()

    def _bury(self) -> int:
        """Delete the KV that lost its last node, here and in the shared store; bytes freed.

        Whoever asks a question waits for some of it, and for no network. What a kill leaves of it the next call
        finishes; what a node has again by then stays.
        """
        runtime, freed = self._runtime, 0
        while True:
            with runtime.use.turn():
                store, waiting = runtime.store, runtime.nodes.outbox(LOOKED_UP)
                if not waiting:
                    break
                freed += store.delete(waiting)
                runtime.nodes.deleted(waiting, also_shared=store.remote is not None)
        self._withdraw()
        return freed

    def _withdraw(self) -> None:
        """Have the shared store delete what is deleted here, in whichever collection it was."""
        runtime = self._runtime
        with runtime.use.turn():
            store, owed = runtime.store, runtime.nodes.outbox(shared=True)
        if store.remote is None or not owed:
            return
        try:
            store.withdraw(tuple(owed))
        except RemoteError as error:
            log.warning(
                "%s. The KV of %d deleted passages may be there still, until it answers again, the next deletion, or "
                "`ragblend store gc`; no longer than its time-to-live.", error, len(owed),
            )  # fmt: skip
            store.remote.when_back(
                lambda: runtime.chores.add(self._withdraw, worth=Worth.STORE), Nodes._withdraw
            )
        else:
            with runtime.use.turn():
                runtime.nodes.deleted(owed)

    def keys_of(self, passages: Sequence[TokenIds], prefix: TokenIds) -> list[ChunkKey | None]:
        """Under which key each passage's KV is or will be stored; None where none can be."""
        self._runtime.judged()
        return [self._key_of(passage, prefix) for passage in passages]

    def encode(
        self,
        passages: Sequence[TokenIds],
        keys: Sequence[ChunkKey | None],
        prefix: TokenIds,
        progress: Progress | None = None,
        node_ids: Sequence[str] | None = None,
    ) -> tuple[int, int]:
        """Tokens and chunks encoded; others have the device in between.

        node_ids: entered with these keys; of one that is deleted meanwhile nothing is kept.
        """
        encoder, tokens, encoded = _Encoder(self._runtime, prefix), 0, 0
        names: Sequence[str | None] = node_ids or [None] * len(passages)
        for number, (passage, key, name) in enumerate(zip(passages, keys, names, strict=True), start=1):
            if key is not None and not self._is_stored(key):
                new = self._encode_now(encoder, passage, key, name)
                tokens, encoded = tokens + new, encoded + bool(new)
            if progress is not None:
                progress(number, len(passages))
        return tokens, encoded

    def _encode_now(self, encoder: "_Encoder", passage: TokenIds, key: ChunkKey, name: str | None) -> int:
        """The tokens encoded; none where others had encoded them."""
        if self.fetched(key, passage, encoder.prefix, name):
            return 0
        self.keep(key, self._again(partial(self._compute_in_turn, encoder, passage)), name)
        return len(passage)

    def missing(self, node_ids: Sequence[str]) -> Missing:
        """What of these nodes has no KV under this model, most asked first; loads no weights."""
        runtime, found, sizes, left_out = self._runtime, list[tuple[float, str]](), dict[str, int](), 0
        geometry = runtime.fingerprint.geometry  # a GGUF is converted for it: nobody is to wait for that
        prefix, scope = runtime.canonical_prefix, self._scope
        with runtime.use.turn():
            asked, room_bytes = runtime.store.asked(), max(0, runtime.store.room_bytes)
        for begin in range(0, len(node_ids), LOOKED_UP):
            with runtime.use.turn():  # whoever asks a question waits for one of these
                for node_id in node_ids[begin : begin + LOOKED_UP]:
                    passage = runtime.nodes.get(scope, node_id) or ()
                    if not passage or not runtime.reads(len(prefix) + len(passage)):
                        left_out += 1
                        continue
                    key = runtime.key_of(prefix, passage, self._collection)
                    if not runtime.store.contains(key):
                        found.append((-asked.get(key.digest, 0.0), node_id))
                        sizes[key.digest] = len(passage)
        found.sort(key=lambda each: each[0])  # stable: of what nobody asked for the order stays
        nbytes = sum(file_nbytes(geometry, tokens, runtime.codec) for tokens in sizes.values())
        names = tuple(node_id for _, node_id in found)
        return Missing(names, sum(sizes.values()), nbytes, room_bytes, left_out)

    def encode_missing(self, node_ids: Sequence[str], leave: Leave) -> Iterator[int]:
        """Encode what is missing of nodes that were entered; yields for each the tokens encoded, in the background.

        A chunk is written while the next one is computed. Ends early where the next would need the room of another.
        Raises Cancelled when leave() says so, and PromptTooLongError.
        """
        runtime = self._runtime
        encoder = _Encoder(runtime, runtime.canonical_prefix)
        runtime.judged()
        computed: _Computed | None = None  # and not written yet
        writing: Future[int] | None = None
        with ThreadPoolExecutor(1, "ragblend-write") as writer:
            try:
                for node_id in node_ids:
                    # Asked before the one before is written: registry and store are closed to others until it is.
                    taken_bytes = computed.asked.nbytes if computed is not None else 0
                    asked = self._to_encode(node_id, encoder.prefix, taken_bytes)
                    if asked is None or (computed is not None and asked.key == computed.asked.key):
                        if computed is not None:
                            yield self._written(computed)
                            computed = None
                        yield 0
                        continue
                    if asked.room_bytes < asked.nbytes:
                        break
                    if computed is not None:
                        writing, computed = writer.submit(self._written, computed), None
                    due = time.monotonic() + PATIENCE_S
                    chunk = self._again(partial(self._compute_behind, encoder, asked.passage, leave, due))
                    if writing is not None:
                        yield writing.result()
                    writing, computed = None, _Computed(asked, chunk)
            except (Cancelled, KeyboardInterrupt, PromptTooLongError):
                if writing is not None:
                    yield writing.result()
                elif computed is not None:
                    yield self._written(computed)
                raise
            if computed is not None:
                yield self._written(computed)

    def add_chore(self, chunk: Chunk) -> None:
        """Have a chunk encoded in the background, as `encode_later` does."""
        due, what = time.monotonic() + PATIENCE_S, (self._collection, chunk.node_id, chunk.encoded_ids)
        self._runtime.chores.add(partial(self.encode_later, chunk, due), what, Worth.STORE)

    def add_unstored(self, node_ids: Sequence[str]) -> None:
        """The same for nodes that are known by their ids alone; what was deleted meanwhile is left out."""
        for node_id in node_ids:
            if ids := self._runtime.nodes.get(self._scope, node_id):
                self.add_chore(Chunk(node_id=node_id, token_ids=ids, entered=True))

    def encode_later(self, chunk: Chunk, due: float) -> None:
        """Encode a chunk alone, for the next question, unless it is stored: never from the fused cache."""
        runtime = self._runtime
        if runtime.loaded_now is None:  # it was closed behind the answer that wanted this
            return
        passage, prefix = chunk.encoded_ids, runtime.canonical_prefix
        key = self._key_of(passage, prefix)
        if key is None or self._is_stored(key):
            return
        nbytes = file_nbytes(runtime.fingerprint.geometry, len(passage), runtime.codec)
        try:
            with runtime.use.turn():
                runtime.store.check_room(len(passage), nbytes)
            if self._claim_named(chunk, key) and not self.fetched(key, passage, prefix, chunk.node_id):
                encoder = _Encoder(runtime, prefix, loads=False)
                made = self._compute_behind(encoder, passage, lambda: runtime.loaded_now is None, due)
                self.keep(key, made, chunk.node_id)
        except Cancelled:
            pass
        except StoreFullError as error:  # the next question finds out whether there is room
            log.warning("a passage has no KV for the next question: %s", error)

    def keep_computed(self, chunk: Chunk, key: ChunkKey, made: Callable[[], ChunkKV]) -> bool:
        """Store a node of the knowledge tree for that chunk. It goes when the chunk's node does.

        made: is called if the chunk is still there. False if it was deleted, or what it stands behind.
        """
        return self._claim_named(chunk, key) and self.keep(key, made(), chunk.node_id)

    def keep_blob(self, chunk: Chunk, blob: Blob) -> bool:
        """Store that value of a chunk as it came from others. False if the chunk's node was deleted meanwhile."""
        key = blob.header.key
        return self._claim_named(chunk, key) and self.keep(key, blob, chunk.node_id)

    def _claim_named(self, chunk: Chunk, key: ChunkKey) -> bool:
        """Whether the chunk's KV is wanted; a node that a prompt was the first to name is entered."""
        if chunk.node_id is not None and not chunk.entered:
            self.enter([chunk.node_id], [chunk.encoded_ids], [key])
        return self.claim(chunk.node_id, chunk.encoded_ids, key)

    def prefetch(self, tokenized: Callable[[], Sequence[Chunk]]) -> None:
        """Load the model if it is not there yet, and have the disk read the chunks' KV."""
        runtime = self._runtime
        if not runtime.judged().passed:
            return
        prefix = runtime.canonical_prefix
        for chunk in tokenized():
            collection = chunk.collection or self._collection
            runtime.store.will_need(runtime.key_of(prefix, chunk.token_ids or (), collection))

    def _to_encode(self, node_id: str, prefix: TokenIds, taken_bytes: int = 0) -> "_Asked | None":
        """None for a node that is there no more or has KV. Raises PromptTooLongError.

        taken_bytes: of the store's room, for what is not written yet.
        """
        runtime = self._runtime
        with runtime.use.turn():
            passage = runtime.nodes.get(self._scope, node_id) or ()
            room_bytes = runtime.store.room_bytes - taken_bytes
        runtime.check_length(len(prefix) + len(passage), "a passage behind its prefix")
        key = self._key_of(passage, prefix)
        if key is None or not self.claim(node_id, passage, key) or self._is_stored(key):
            return None
        nbytes = file_nbytes(runtime.fingerprint.geometry, len(passage), runtime.codec)
        if nbytes <= room_bytes and self.fetched(key, passage, prefix, node_id):
            return None
        return _Asked(node_id, passage, key, nbytes, room_bytes)

    def claim(self, node_id: str | None, passage: TokenIds, key: ChunkKey) -> bool:
        """Whether this KV is wanted still: its node was not deleted."""
        with self._runtime.use.turn():
            return node_id is None or self._runtime.nodes.claim(self._scope, node_id, passage, key)

    def _again(self, compute: Callable[[], ChunkKV]) -> ChunkKV:
        """Where the device fails, once more on a model that is loaded anew. Raises DeviceError."""
        return twice(self._runtime, lambda _: compute(), None)

    def _compute_behind(self, encoder: "_Encoder", passage: TokenIds, leave: Leave, due: float) -> ChunkKV:
        """Encode a passage when nobody needs the device; from `due` on in turn with those who do.

        Raises Cancelled when leave() says so.
        """
        queue = self._runtime.queue
        while time.monotonic() < due:
            try:
                with queue.turn(Asking(leave), background=True, claim=Claim(deadline=due)) as turn:
                    return encoder.encode(passage, turn, lambda: queue.wanted)
            except Cancelled:  # whoever came goes first, and the passage is begun again
                if leave():
                    raise
        return self._compute_in_turn(encoder, passage, leave)

    def _compute_in_turn(
        self, encoder: "_Encoder", passage: TokenIds, leave: Leave = lambda: False
    ) -> ChunkKV:
        """Encode a passage as a request among others, which have the device in between."""
        with self._runtime.queue.turn(
            Asking(leave), claim=Claim(shares=True, new_tokens=len(passage))
        ) as turn:
            return encoder.encode(passage, turn)

    def _written(self, computed: "_Computed") -> int:
        """The tokens encoded: none where the node was deleted meanwhile."""
        asked = computed.asked
        return len(asked.passage) if self.keep(asked.key, computed.chunk, asked.node_id) else 0

    def fetched(self, key: ChunkKey, passage: TokenIds, prefix: TokenIds, node_id: str | None = None) -> bool:
        """Have others' KV of a passage here, where they share it and it comes in time."""
        remote, geometry = self._runtime.store.remote, self._runtime.fingerprint.geometry
        blob = None if remote is None else remote.fetch(Wanted(key, passage, geometry, len(prefix)))
        return blob is not None and self.keep(key, blob, node_id)

    def keep(self, key: ChunkKey, chunk: ChunkKV | Blob, node_id: str | None) -> bool:
        """Store what was encoded, unless its node has lost the key: deleted is deleted, whoever still worked on it.

        Not in the device's turn: who deletes does not wait for the device behind an encode.
        """
        runtime = self._runtime

        def wanted() -> bool:
            return node_id is None or runtime.nodes.has(self._scope, node_id, key)

        with runtime.use.turn():
            if isinstance(chunk, Blob):
                return runtime.store.put_blob(chunk, wanted)
            return runtime.store.put(key, chunk, runtime.codec, wanted=wanted)

    @property
    def _scope(self) -> Scope:
        return self._runtime.scope(self._collection)

    def _key_of(self, passage: TokenIds, prefix: TokenIds) -> ChunkKey | None:
        """Where the gate was passed or not passed before."""
        if not passage or self._runtime.refusal(len(prefix) + len(passage)) is not None:
            return None
        return self._runtime.key_of(prefix, passage, self._collection)

    def _is_stored(self, key: ChunkKey) -> bool:
        with self._runtime.use.turn():
            return self._runtime.store.contains(key)


@dataclass(frozen=True)
class _Asked:
    """A node without KV; nbytes: of the KV it will have, room_bytes: what the budget had left for it."""

    node_id: str
    passage: TokenIds
    key: ChunkKey
    nbytes: int
    room_bytes: int


@dataclass(frozen=True)
class _Computed:
    asked: _Asked
    chunk: ChunkKV


class _Encoder:
    """Encodes behind one prefix with the model that is loaded. loads: another one if it was closed meanwhile."""

    def __init__(self, runtime: Runtime, prefix: TokenIds, loads: bool = True) -> None:
        self._runtime, self.prefix, self._loads = runtime, prefix, loads
        self._made: ChunkEncoder | None = None

    def encode(self, passage: TokenIds, turn: Turn, leave: Leave = lambda: False) -> ChunkKV:
        """In that turn with the device. Raises Cancelled when it, or leave(), says so, or the model is gone."""
        if not self._loads and self._runtime.loaded_now is None:
            raise Cancelled("the model was let go")
        decoder = self._runtime.decoder  # may have to be loaded, which takes as long as it takes
        turn.between_layers()  # from here on a hang is seen
        if self._made is None or not self._made.is_of(decoder):
            self._made = ChunkEncoder(decoder, self.prefix)

        def between_layers() -> bool:
            turn.between_layers()
            return leave()

        return self._made.encode(passage, between_layers)
