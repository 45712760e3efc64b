"""Encodes nodes with the model loaded in this process: immediately, in the background, or between requests."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.nodes import NodeEncoder, TokenIds, UnencodedNode, log
from ragblend.engine.prompts.segments import Chunk
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.scheduling.queue import PATIENCE_S, CallbackCancel, Cancel, DeviceTurn
from ragblend.engine.scheduling.recovery import retry_after_device_failure
from ragblend.kvstore.blob import file_nbytes
from ragblend.kvstore.chunks import ChunkKV
from ragblend.kvstore.errors import Cancelled, PromptTooLongError, StoreFullError
from ragblend.kvstore.keys import ChunkKey


class LocalNodeEncoder(NodeEncoder):
    """Encodes with the model of a `Runtime`."""

    _runtime: Runtime

    def _encoder_after(self, prefix: TokenIds) -> Callable[[TokenIds, ChunkKey, str | None], int]:
        return partial(self._encode_now, _PrefixedEncoder(self._runtime, prefix))

    def _encode_now(
        self, encoder: "_PrefixedEncoder", passage: TokenIds, key: ChunkKey, node_id: str | None
    ) -> int:
        if self.copy_from_shared(key, passage, encoder.prefix, node_id):
            return 0
        chunk = self._encode_with_retry(lambda: self._encode_in_turn(encoder, passage))
        self.store(key, chunk, node_id)
        return len(passage)

    def encode_missing(self, node_ids: Sequence[str], cancel: Cancel | None) -> Iterator[int]:
        """Each chunk is written while the next one is computed."""
        runtime = self._runtime
        encoder = _PrefixedEncoder(runtime, runtime.canonical_prefix)
        runtime.gate_verdict()
        computed: tuple[UnencodedNode, ChunkKV] | None = None  # not written yet
        writing: Future[int] | None = None
        with ThreadPoolExecutor(1, "ragblend-write") as writer:
            try:
                for node_id in node_ids:
                    # Before the last chunk is written, because writing holds the store's lock.
                    node = self._unencoded(node_id, computed[0].nbytes if computed is not None else 0)
                    if node is None or (computed is not None and node.key == computed[0].key):
                        if computed is not None:
                            yield self._write(*computed)
                            computed = None
                        yield 0
                        continue
                    if not node.fits:
                        break
                    if computed is not None:
                        writing, computed = writer.submit(self._write, *computed), None
                    due = time.monotonic() + PATIENCE_S
                    chunk = self._encode_with_retry(
                        partial(self._encode_when_idle, encoder, node.passage, cancel, due)
                    )
                    if writing is not None:
                        yield writing.result()
                    writing, computed = None, (node, chunk)
            except (Cancelled, KeyboardInterrupt, PromptTooLongError):
                if writing is not None:
                    yield writing.result()
                elif computed is not None:
                    yield self._write(*computed)
                raise
            if computed is not None:
                yield self._write(*computed)

    def encode_in_background(self, chunk: Chunk, due: float) -> None:
        """The chunk is encoded alone, never copied from a fused cache."""
        runtime = self._runtime
        if runtime.loaded_now is None:  # the engine was closed after the answer
            return
        passage, prefix = chunk.encoded_ids, runtime.canonical_prefix
        key = self._key_of(passage, prefix)
        if key is None or self._is_stored(key):
            return
        nbytes = file_nbytes(runtime.fingerprint.geometry, len(passage), runtime.codec)
        try:
            with runtime.store_lock:
                runtime.store.check_room(len(passage), nbytes)
            is_wanted = self.claim(chunk.node_id, passage, key)
            if is_wanted and not self.copy_from_shared(key, passage, prefix, chunk.node_id):
                encoder = _PrefixedEncoder(runtime, prefix, loads_model=False)
                is_closed = CallbackCancel(lambda: runtime.loaded_now is None)
                self.store(key, self._encode_when_idle(encoder, passage, is_closed, due), chunk.node_id)
        except Cancelled:
            pass
        except StoreFullError as error:  # the next question tries again
            log.warning("a passage has no KV for the next question: %s", error)

    def prefetch(self, tokenized: Callable[[], Sequence[Chunk]]) -> None:
        """Load the model if necessary, and read the chunks' KV ahead from the disk."""
        runtime = self._runtime
        if not runtime.gate_verdict().passed:
            return
        prefix = runtime.canonical_prefix
        for chunk in tokenized():
            collection = chunk.collection or self._collection
            runtime.store.read_ahead(runtime.key_of(prefix, chunk.token_ids or (), collection))

    def _encode_with_retry(self, encode: Callable[[], ChunkKV]) -> ChunkKV:
        """If the device fails, retry once with a reloaded model. Raises DeviceError."""
        return retry_after_device_failure(self._runtime, lambda *_: encode())

    def _encode_when_idle(
        self, encoder: "_PrefixedEncoder", passage: TokenIds, cancel: Cancel | None, due: float
    ) -> ChunkKV:
        """Encode a passage while no request needs the device; after `due`, as an ordinary request."""
        queue = self._runtime.queue
        while time.monotonic() < due:
            try:
                with queue.turn(cancel, background=True, claim=Claim(deadline=due)) as turn:
                    return encoder.encode(passage, turn, lambda: queue.has_waiting)
            except Cancelled:  # a request came: the passage is encoded again after it
                if cancel is not None and cancel.is_set():
                    raise
        return self._encode_in_turn(encoder, passage, cancel)

    def _encode_in_turn(
        self, encoder: "_PrefixedEncoder", passage: TokenIds, cancel: Cancel | None = None
    ) -> ChunkKV:
        """Encode a passage as an ordinary request, which yields to others in between."""
        with self._runtime.queue.turn(cancel, claim=Claim(shares=True, new_tokens=len(passage))) as turn:
            return encoder.encode(passage, turn)

    def _write(self, node: UnencodedNode, chunk: ChunkKV) -> int:
        """Write the KV; returns the tokens stored, 0 if the node was deleted meanwhile."""
        return len(node.passage) if self.store(node.key, chunk, node.node_id) else 0


class _PrefixedEncoder:
    """Encodes after one prefix with the loaded model. loads_model: loads it again if it was closed meanwhile."""

    def __init__(self, runtime: Runtime, prefix: TokenIds, loads_model: bool = True) -> None:
        self._runtime, self.prefix, self._loads_model = runtime, prefix, loads_model
        self._encoder: ChunkEncoder | None = None

    def encode(
        self, passage: TokenIds, turn: DeviceTurn, should_stop: Callable[[], bool] = lambda: False
    ) -> ChunkKV:
        """Encode within that device turn. Raises Cancelled if the turn or should_stop() requests it, or the model was
        closed.
        """
        if not self._loads_model and self._runtime.loaded_now is None:
            raise Cancelled("the model was closed")
        decoder = self._runtime.decoder  # may load the model, which takes long
        turn.between_layers()  # from here on the watchdog detects a hang
        if self._encoder is None or not self._encoder.uses(decoder):
            self._encoder = ChunkEncoder(decoder, self.prefix)

        def is_cancelled() -> bool:
            turn.between_layers()
            return should_stop()

        return self._encoder.encode(passage, CallbackCancel(is_cancelled))
