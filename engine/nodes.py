"""Chunks by their node ids: entered before there is KV, encoded, found in prompts, forgotten with their KV."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.prompt import Chunk
from ragblend.engine.results import Missing
from ragblend.engine.runtime import Runtime
from ragblend.kvstore.blob import file_nbytes
from ragblend.kvstore.chunks import ChunkKV
from ragblend.kvstore.errors import Cancelled, UnknownChunkError
from ragblend.kvstore.keys import ChunkKey

TokenIds = tuple[int, ...]
Progress = Callable[[int, int], None]


def enter(
    runtime: Runtime,
    collection: str,
    node_ids: Sequence[str],
    passages: Sequence[TokenIds],
    keys: Sequence[ChunkKey | None],
) -> None:
    """Note what each node id of a collection stands for. keys: under which its KV will be; None where none is yet.

    KV that thereby lost its last node is deleted.
    """
    with runtime.use.turn():
        named = zip(node_ids, passages, keys, strict=True)
        _bury(runtime, runtime.nodes.put_many(runtime.scope(collection), named))


def find(runtime: Runtime, collection: str, chunks: Sequence[Chunk]) -> dict[str, TokenIds]:
    """Token ids of the chunks that are named by node id alone. Raises UnknownChunkError for one never encoded here."""
    named = [c.node_id for c in chunks if c.token_ids is None and c.text is None and c.node_id is not None]
    found = {}
    for node_id in named:
        ids = runtime.nodes.get(runtime.scope(collection), node_id)
        if ids is None:
            raise UnknownChunkError(
                f"no chunk with the node id {node_id!r} was encoded in the collection "
                f"{collection!r} of {runtime.home}; encode it first, or "
                "pass its text as well: Chunk(text, node_id)"
            )
        found[node_id] = ids
    return found


def forget(runtime: Runtime, collection: str, node_ids: Sequence[str]) -> int:
    """Remove nodes and the KV that no other node shares. Returns the bytes freed."""
    with runtime.use.turn():
        return _bury(runtime, runtime.nodes.delete(collection, node_ids))


def _bury(runtime: Runtime, doomed: Sequence[ChunkKey]) -> int:
    """Delete the KV that lost its last node; bytes freed. What a kill leaves of it the next call finishes."""
    if not doomed:
        return 0
    freed = sum(runtime.store.delete(key) for key in doomed)
    runtime.nodes.buried(doomed)
    return freed


def keys_of(
    runtime: Runtime, passages: Sequence[TokenIds], prefix: TokenIds, collection: str
) -> list[ChunkKey | None]:
    """Under which key each passage's KV is or will be stored; None where none can be."""
    with runtime.queue.turn():
        _ = runtime.gate
    return [_key_of(runtime, passage, prefix, collection) for passage in passages]


def encode(
    runtime: Runtime,
    passages: Sequence[TokenIds],
    keys: Sequence[ChunkKey | None],
    prefix: TokenIds,
    collection: str,
    progress: Progress | None = None,
    node_ids: Sequence[str] | None = None,
) -> tuple[int, int]:
    """Tokens and chunks encoded. The device is given back between chunks.

    node_ids: entered with these keys; of one that is deleted meanwhile nothing is kept.
    """
    encoder = _Encoder(runtime, prefix)
    tokens = encoded = 0
    names: Sequence[str | None] = node_ids or [None] * len(passages)
    for number, (passage, key, name) in enumerate(zip(passages, keys, names, strict=True), start=1):
        if key is not None and not _is_stored(runtime, key):
            with runtime.queue.turn():
                chunk = encoder.encode(passage)
            _keep(runtime, key, chunk, collection, name)
            tokens, encoded = tokens + len(passage), encoded + 1
        if progress is not None:
            progress(number, len(passages))
    return tokens, encoded


def missing(runtime: Runtime, node_ids: Sequence[str], collection: str) -> Missing:
    """What of these nodes has no KV under this model, most asked first; loads no weights."""
    fingerprint = runtime.fingerprint  # a GGUF is converted for it: nobody is to wait for that
    prefix, scope = runtime.canonical_prefix, runtime.scope(collection)
    found: list[tuple[float, str, int]] = []
    with runtime.use.turn():
        asked = runtime.store.asked()
        for node_id in node_ids:
            passage = runtime.nodes.get(scope, node_id)
            if passage:
                key = runtime.key_of(prefix, passage, collection)
                if not runtime.store.contains(key):
                    found.append((-asked.get(key.digest, 0.0), node_id, len(passage)))
        found.sort(key=lambda each: each[0])  # stable: of what nobody asked for the order stays
        nbytes = sum(file_nbytes(fingerprint.geometry, tokens, runtime.codec) for _, _, tokens in found)
        names, tokens = tuple(node_id for _, node_id, _ in found), sum(each[2] for each in found)
        return Missing(names, tokens, nbytes, max(0, runtime.store.room_bytes))


def encode_nodes(
    runtime: Runtime, node_ids: Sequence[str], collection: str, leave: Callable[[], bool]
) -> Iterator[int]:
    """Encode what is missing of nodes that were entered; yields for each the tokens encoded, in the background.

    Ends early where the next would need the room of another. Raises Cancelled when leave() says so, and
    PromptTooLongError.
    """
    prefix, scope = runtime.canonical_prefix, runtime.scope(collection)
    encoder = _Encoder(runtime, prefix)
    with runtime.queue.turn():
        _ = runtime.gate
    for node_id in node_ids:
        with runtime.use.turn():
            passage, room_bytes = runtime.nodes.get(scope, node_id) or (), runtime.store.room_bytes
        runtime.check_length(len(prefix) + len(passage), "a passage behind its prefix")
        key = _key_of(runtime, passage, prefix, collection)
        if key is None or _is_stored(runtime, key):
            yield 0
            continue
        if room_bytes < file_nbytes(runtime.fingerprint.geometry, len(passage), runtime.codec):
            return
        yield _encode_behind(runtime, encoder, passage, key, collection, node_id, leave)


def encode_later(runtime: Runtime, chunk: Chunk, collection: str) -> None:
    """Encode a chunk alone, for the next question, unless it is stored: never from the fused cache."""
    passage, prefix = chunk.token_ids or (), runtime.canonical_prefix
    key = _key_of(runtime, passage, prefix, collection)
    if key is None or _is_stored(runtime, key):
        return
    if chunk.node_id is not None and not chunk.entered:
        enter(runtime, collection, [chunk.node_id], [passage], [key])
    encoder = _Encoder(runtime, prefix)
    _encode_behind(runtime, encoder, passage, key, collection, chunk.node_id, lambda: False)


def prefetch(runtime: Runtime, passages: Callable[[], Sequence[TokenIds]], collection: str) -> None:
    """Load the model if it is not there yet, and have the disk read the passages' KV."""
    with runtime.queue.turn():
        if not runtime.gate.passed:
            return
        prefix = runtime.canonical_prefix
        _ = runtime.store, runtime.readers
    for passage in passages():
        runtime.store.will_need(runtime.key_of(prefix, passage, collection))


class _Encoder:
    """Encodes behind one prefix with the model that is loaded: another one if it was closed meanwhile."""

    def __init__(self, runtime: Runtime, prefix: TokenIds) -> None:
        self._runtime, self._prefix = runtime, prefix
        self._made: ChunkEncoder | None = None

    def encode(self, passage: TokenIds, leave: Callable[[], bool] | None = None) -> ChunkKV:
        """With the device in hand."""
        if self._made is None or self._made.decoder is not self._runtime.decoder:
            self._made = ChunkEncoder(self._runtime.decoder, self._prefix)
        return self._made.encode(passage, leave)


def _encode_behind(
    runtime: Runtime,
    encoder: _Encoder,
    passage: TokenIds,
    key: ChunkKey,
    collection: str,
    node_id: str | None,
    leave: Callable[[], bool],
) -> int:
    """Encode a passage when nobody needs the device, unless its node was deleted. Returns the tokens encoded."""
    with runtime.use.turn():
        scope = runtime.scope(collection)
        if node_id is not None and not runtime.nodes.claim(scope, node_id, passage, key):
            return 0
    while True:
        try:
            with runtime.queue.turn(background=True):
                chunk = encoder.encode(passage, lambda: runtime.queue.wanted or leave())
            break
        except Cancelled:  # whoever came goes first, and the passage is begun again
            if leave():
                raise
    return len(passage) if _keep(runtime, key, chunk, collection, node_id) else 0


def _keep(runtime: Runtime, key: ChunkKey, chunk: ChunkKV, collection: str, node_id: str | None) -> bool:
    """Store what was encoded, unless its node has lost the key: deleted is deleted, whoever still worked on it.

    Not in the device's turn: who deletes does not wait for the device behind an encode.
    """
    with runtime.use.turn(), contextlib.ExitStack() as stack:
        if node_id is not None:
            holding = runtime.nodes.holding(runtime.scope(collection), node_id, key)
            if not stack.enter_context(holding):
                return False
        runtime.store.put(key, chunk, runtime.codec)
    return True


def _key_of(runtime: Runtime, passage: TokenIds, prefix: TokenIds, collection: str) -> ChunkKey | None:
    """Where the gate was passed or not passed before."""
    if not passage or runtime.refusal(len(prefix) + len(passage)) is not None:
        return None
    return runtime.key_of(prefix, passage, collection)


def _is_stored(runtime: Runtime, key: ChunkKey) -> bool:
    with runtime.use.turn():
        return runtime.store.contains(key)
