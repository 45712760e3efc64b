"""One model on one device: what all engines of a process that mean the same model and home share, and do with it."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ragblend.engine.config import DecodeOptions, EngineConfig
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.device import pick_device, pick_dtype
from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.generation import OnText, run
from ragblend.engine.profiling import measure
from ragblend.engine.resources import Resources
from ragblend.engine.results import Prefilled, Result
from ragblend.engine.scheduler import Chores, DeviceQueue
from ragblend.engine.serving import Request, left_to_generate, overhead_ms, prefill_natively
from ragblend.kvstore.chunks import ChunkKey
from ragblend.kvstore.errors import UsageError

log = logging.getLogger("ragblend")
Progress = Callable[[int, int], None]
TokenIds = tuple[int, ...]
_machines: dict[tuple[Any, ...], "Machine"] = {}
_sharing = threading.Lock()


class Machine:
    """The resources, the queue before the device, and work for when nobody waits."""

    def __init__(self, config: EngineConfig, home: Path) -> None:
        self.resources = Resources(config, home)
        self.queue = DeviceQueue()
        self.chores = Chores()

    @classmethod
    def shared(cls, config: EngineConfig, home: Path) -> "Machine":
        """The process's one machine for that model, device, dtype and home; an older one gets the config's budgets."""
        device = pick_device(config.device)
        key = (config.model, str(device), pick_dtype(device, config.dtype), home)
        budgets = config.store_budget_bytes, config.memory_budget_bytes, config.device_budget_bytes
        with _sharing:
            if key not in _machines:
                _machines[key] = cls(config, home)
            else:
                _machines[key].resources.set_budgets(*budgets)
                _machines[key].resources.set_codec(config.kv_codec)
            return _machines[key]

    def prefill(
        self, request: Request, cancel: threading.Event | None = None, answering: bool = False
    ) -> Prefilled:
        """With the device in hand: fused where the gate allows it, by the model's own forward elsewhere.

        answering: an unfused model's own `generate` comes next and reads the prompt itself, so it is not read here.
        """
        resources = self.resources
        refusal = resources.refusal(len(request.prompt.token_ids))
        if refusal is not None and answering:
            return left_to_generate(request, refusal)
        if refusal is not None:
            return prefill_natively(resources.loaded.model, request, refusal, cancel)
        prefilled = resources.server.prefill(request, cancel)
        if prefilled.report.misses and request.policy.name != "full":
            for chunk in request.prompt.chunks:
                if chunk.token_ids:
                    collection = chunk.collection or request.collection
                    self.chores.add(partial(self._encode_later, chunk.token_ids, collection))
        if prefilled.report.hits and resources.store.tiers:
            self.chores.add(partial(self._promote, request))
        if prefilled.report.hits:
            self.chores.add(resources.store.write_uses)
        return prefilled

    def answer(
        self,
        request: Request,
        options: DecodeOptions,
        on_text: OnText | None,
        cancel: threading.Event | None,
    ) -> Result:
        """With the device in hand: prefill, decode, and keep what was read for the request's session."""

        def prefill() -> Prefilled:
            read.append(self.prefill(request, cancel, answering=True))
            return read[0]

        read: list[Prefilled] = []
        answered: tuple[int, ...] = ()
        try:
            result = run(self.resources, prefill, options, on_text, cancel)
            answered = result.token_ids
            return result
        finally:  # also of an answer that was stopped: its prompt has been read
            if request.session is not None and read and read[0].cache is not None:
                ids = (*request.prompt.token_ids, *answered)
                request.session.keep(ids, read[0].cache, self.resources.decoder)

    def encode(
        self, passages: Sequence[TokenIds], prefix: TokenIds, collection: str, progress: Progress | None
    ) -> tuple[list[ChunkKey | None], int, int]:
        """The keys, tokens encoded, chunks encoded. The device is given back between chunks."""
        resources = self.resources
        keys = self.keys_of(passages, prefix, collection)
        encoder: ChunkEncoder | None = None
        tokens = encoded = 0
        for number, (passage, key) in enumerate(zip(passages, keys, strict=True), start=1):
            if key is not None and not resources.store.contains(key):
                with self.queue.turn():
                    encoder = encoder or ChunkEncoder(resources.decoder, prefix)
                    chunk = encoder.encode(passage)
                resources.store.put(key, chunk, resources.codec)
                tokens, encoded = tokens + len(passage), encoded + 1
            if progress is not None:
                progress(number, len(passages))
        return keys, tokens, encoded

    def keys_of(
        self, passages: Sequence[TokenIds], prefix: TokenIds, collection: str
    ) -> list[ChunkKey | None]:
        """Under which key each passage's KV is or will be stored; None where none can be."""
        resources = self.resources
        with self.queue.turn():
            passed = resources.gate.passed

        def fits(passage: TokenIds) -> bool:
            return passed and bool(passage) and resources.refusal(len(prefix) + len(passage)) is None

        return [resources.key_of(prefix, p, collection) if fits(p) else None for p in passages]

    def measure(self, progress: Progress | None = None) -> DeviceProfile:
        """Profile this model on this device, keep that, and use it from now on."""
        with self.queue.turn():
            resources = self.resources
            if not resources.gate.passed:
                raise UsageError(f"{resources.model_name} is not fused, so there is nothing to profile")
            server = resources.server
            measured = measure(
                resources.decoder,
                server.lane,
                server.pool,
                resources.store,
                resources.context_window,
                resources.config.prices,
                progress,
            )
            server.profile = replace(measured, overhead_ms=overhead_ms(server))
            server.profile.save(resources.profile_path)
            return server.profile

    def prefetch(self, passages: Callable[[], Sequence[TokenIds]], collection: str) -> None:
        """In the background: load the model if it is not there yet, and have the disk read the passages' KV."""
        self.chores.add(partial(self._prefetch, passages, collection))

    def close(self) -> None:
        """End background work and free model and store; the next use loads them again."""
        self.chores.finish()
        with self.queue.turn():
            self.resources.close()

    def _prefetch(self, passages: Callable[[], Sequence[TokenIds]], collection: str) -> None:
        resources = self.resources
        with self.queue.turn():
            if not resources.gate.passed:
                return
            prefix = resources.canonical_prefix
            _ = resources.server  # its threads and the store
        for passage in passages():
            resources.store.will_need(resources.key_of(prefix, passage, collection))

    def _promote(self, request: Request) -> None:
        """Bring what was used one tier up."""
        resources, prompt = self.resources, request.prompt
        for chunk in prompt.chunks:
            for prefix in {prompt.prefix_ids, resources.canonical_prefix}:
                if chunk.token_ids:
                    collection = chunk.collection or request.collection
                    key = resources.key_of(prefix, chunk.token_ids, collection)
                    resources.store.promote(key, chunk.token_ids)

    def _encode_later(self, token_ids: TokenIds, collection: str) -> None:
        """Encode a chunk alone, for the next question, unless it is stored: never from the fused cache."""
        self.encode([token_ids], self.resources.canonical_prefix, collection, None)
