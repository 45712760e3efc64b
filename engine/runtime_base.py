"""Base of all runtimes: tokenizer, store, node index and background tasks of one home."""

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from ragblend.engine.config import EngineConfig, store_budget_of
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.model import load as model
from ragblend.engine.model.checkpoints import tokenizer_digest
from ragblend.engine.model.device import pick_device, pick_dtype
from ragblend.engine.model.gate import GateVerdict
from ragblend.engine.prompts.tokenizing import LONG_CHARACTERS, MAX_TOKEN_CHARACTERS, PromptTokenizer
from ragblend.engine.prompts.tools import CallFormat, call_format
from ragblend.engine.scheduling.background import BackgroundTasks, end_at_exit
from ragblend.kvstore.codec import RAW, Codec, codec_named
from ragblend.kvstore.errors import PromptTooLongError, StoreError
from ragblend.kvstore.files import replace_durably
from ragblend.kvstore.fingerprint import ModelFingerprint, chunk_key
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.memory import MemoryTier
from ragblend.kvstore.nodes import NodeIndex, Scope
from ragblend.kvstore.store import KVStore

log = logging.getLogger("ragblend")
_TYPICAL_TOKENS = 512
T = TypeVar("T")
_runtimes: dict[tuple[Any, ...], Any] = {}
_runtimes_lock = threading.Lock()


class once(Generic[T]):
    """A property that the first thread computes while others wait; `close` drops its value."""

    lock = "_loading_lock"

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name = make, make.__name__

    def __get__(self, runtime: "RuntimeBase | None", owner: object = None) -> T:
        if runtime is None:  # asked of the class
            return self  # type: ignore[return-value]
        with getattr(runtime, self.lock):
            if self._name not in vars(runtime):
                vars(runtime)[self._name] = self._make(runtime)
            found: T = vars(runtime)[self._name]
            return found


class light_once(once[T]):
    """A `once` that does not wait while a model is converted or loaded."""

    lock = "_light_lock"


class RuntimeBase(ABC):
    """Expensive parts, created on first use. `close` frees them; the next use creates them again.

    store_lock: guards store and node index outside of device turns. background: see `BackgroundTasks`.
    """

    def __init__(self, config: EngineConfig, home: Path) -> None:
        self.config, self.home = config, home
        self.device = pick_device(config.device)
        self.dtype = pick_dtype(self.device, config.dtype)
        self.store_lock, self.background = threading.Lock(), BackgroundTasks(self._note_unstored)
        self._loading_lock, self._light_lock = threading.RLock(), threading.RLock()
        self.codec: Codec = RAW  # for new KV
        self._budgets: dict[str, int] = {}
        self._remote: str | None = None
        self._store_policy: str | None = None
        self.has_noted_shared_copies = False  # see `NodeEncoder`
        self.load = "auto"  # as in `EngineConfig`
        self._digests = home / "models" / "digests.json"
        self._adopt(config)
        end_at_exit(self)

    @classmethod
    def shared(cls, config: EngineConfig, home: Path) -> Self:
        """The process's runtime for that model, url, device, dtype, home and fuse, with this config's budgets."""
        device = pick_device(config.device)
        loaded = config.model, config.url, str(device), pick_dtype(device, config.dtype), config.fuse == "all"
        key = (cls, *loaded, home)
        with _runtimes_lock:
            if key in _runtimes:
                _runtimes[key]._adopt(config)
            else:
                _runtimes[key] = cls(config, home)
            found: Self = _runtimes[key]
            return found

    def _adopt(self, config: EngineConfig) -> None:
        """Apply budgets, codec, policy, shared store and way of loading of a config (None: unchanged).

        After a budget was lowered, the next puts evict. Tiers, policy and shared store of an open store change only
        when it is opened again.
        """
        budgets = config.store_budget_bytes, config.memory_budget_bytes, config.device_budget_bytes
        wanted = dict(zip(("disk", "memory", "device"), budgets, strict=True))
        with self._light_lock:
            self._budgets |= {name: budget for name, budget in wanted.items() if budget is not None}
            self._remote = config.remote or self._remote
            self._store_policy = config.store_policy or self._store_policy
            self.load = config.load or self.load
            if config.kv_codec is not None:
                self.codec = codec_named(config.kv_codec)
            if "store" in vars(self):
                tiers: list[KVStore | MemoryTier] = [self.store, *self.store.tiers]
                for tier in tiers:
                    tier.budget_bytes = self._budgets.get(tier.name, tier.budget_bytes)

    def end(self) -> None:
        """When the process exits: store what was requested, and save which values were used."""
        self.background.end()
        with suppress(StoreError):  # the home may be gone
            if "store" in vars(self):
                self.store.save_ledger(is_last=True)

    def close(self) -> None:
        """End background tasks as at the process's exit, and free everything that was loaded or opened."""
        self.background.end()
        with self.store_lock:
            self._free()

    def _free(self) -> None:
        """Drop every part. The caller holds the locks."""
        with self._loading_lock, self._light_lock:
            names = [
                name
                for each in type(self).__mro__
                for name, part in vars(each).items()
                if isinstance(part, once)
            ]
            parts = {name: vars(self).pop(name) for name in names if name in vars(self)}
        if "loader_threads" in parts:
            parts["loader_threads"].shutdown()
        for name in {"store", "nodes"} & set(parts):
            parts[name].close()

    # --- the model

    @property
    @abstractmethod
    def gate(self) -> GateVerdict:
        """Whether the model's KV may be fused."""

    def gate_verdict(self) -> GateVerdict:
        """The gate's verdict, for callers that do not hold the device."""
        return self.gate

    @property
    @abstractmethod
    def fingerprint(self) -> ModelFingerprint:
        """The fingerprint in the keys of the model's KV. Raises UnsupportedModelError."""

    @property
    @abstractmethod
    def model_name(self) -> str: ...

    @property
    @abstractmethod
    def context_window(self) -> int: ...

    @property
    @abstractmethod
    def needs_conversion(self) -> bool:
        """Whether the first use of the model converts it, which takes a minute."""

    @abstractmethod
    def refusal(self, tokens: int) -> str | None:
        """The reason why a prompt of that length must not be fused; None if it may be."""

    @property
    def is_ready(self) -> bool:
        """Whether the model may be fused, as far as that is known without waiting."""
        return True

    @property
    def profile(self) -> DeviceProfile | None:
        """What was measured of the model on this device; None if nothing was."""
        return None

    # --- passages whose KV an earlier process did not store

    @property
    def _unstored_path(self) -> Path:
        return self.home / f"unstored-{self.fingerprint.digest[:16]}.json"

    def _note_unstored(self, names: Sequence[Hashable]) -> None:
        """Log passages, (collection, node id, token ids), that have no KV; save their ids for the next process."""
        unstored: dict[str, list[str]] = {}
        passages = [name for name in names if isinstance(name, tuple)]
        if not passages:
            return
        for collection, node_id, _ in passages:
            if node_id is not None:  # a framework's passage may have none
                unstored.setdefault(collection, []).append(node_id)
        log.warning(
            "%d requested passages have no KV yet, because the process ends. Those of a library are encoded first by "
            "the next process. `ragblend ingest`, or `engine.finish_background()` before the end, encodes all.",
            len(passages),
        )
        if unstored and "fingerprint" in vars(self):
            with suppress(OSError):  # they are encoded at their next request
                replace_durably(self._unstored_path, json.dumps(unstored))

    def take_unstored(self) -> dict[str, list[str]]:
        """Node ids by collection that an earlier process left without KV. Returns them only once."""
        if not self.is_ready:  # a model that is not fused needs no KV, and some have no fingerprint
            return {}
        try:
            found = json.loads(self._unstored_path.read_text(encoding="utf-8"))
            self._unstored_path.unlink()
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {str(name): [str(each) for each in ids] for name, ids in found.items()}

    def forget_unstored(self) -> None:
        """Drop the saved ids of unstored passages: some may belong to passages that are being deleted."""
        for path in self.home.glob("unstored-*.json"):
            path.unlink(missing_ok=True)

    # --- the tokenizer, which needs no weights: those of a GGUF would have to be converted first

    @light_once
    def _tokenizer_folder(self) -> Path:
        return model.locate_tokenizer(self.config.model, self.home, self.dtype)

    @light_once
    def tokenizing(self) -> PromptTokenizer:
        return PromptTokenizer(model.load_tokenizer(self._tokenizer_folder))

    @light_once
    def call_format(self) -> CallFormat:
        return call_format(self.tokenizing.tokenizer, self.config.model)

    @light_once
    def canonical_prefix(self) -> tuple[int, ...]:
        return self.tokenizing.prefix_ids()

    # --- the store

    @light_once
    def store(self) -> KVStore:
        disk, policy = self._budgets.get("disk") or store_budget_of(self.home), self._store_policy
        return KVStore.open(self.home / "kv", disk, self._tiers(), policy, self._token_cost, self._remote)

    def _tiers(self) -> list[MemoryTier]:
        """The store's tiers above the disk."""
        return []

    @light_once
    def nodes(self) -> NodeIndex:
        return NodeIndex.open(self.home / "nodes.sqlite")

    def scope(self, collection: str) -> Scope:
        """The scope of a collection's node ids."""
        return Scope(collection, self._tokenizer_digest)

    @light_once
    def _tokenizer_digest(self) -> str:
        return tokenizer_digest(self._tokenizer_folder, self._digests)

    def key_of(self, prefix: tuple[int, ...], token_ids: tuple[int, ...], collection: str) -> ChunkKey:
        return chunk_key(self.fingerprint, prefix, collection, token_ids)

    def _token_cost(self, cached_tokens: int, new_tokens: int) -> float:
        """Cost of computing one token, relative to a token of a first passage of 512; 1 without a profile.

        Relative costs can be compared between models, and with values stored before the profile.
        """
        profile = self.profile
        typical = profile.prefill.ms_per_token(0, _TYPICAL_TOKENS) if profile is not None else 0.0
        if profile is None or not typical:
            return 1.0
        return profile.prefill.ms_per_token(cached_tokens, new_tokens) / typical

    # --- the window

    def fits_window(self, tokens: int) -> bool:
        """Whether the window has room for an answer after this many tokens."""
        return tokens < self.context_window

    def check_text(self, characters: int) -> None:
        """Raises PromptTooLongError for text that cannot fit the window in any tokenization."""
        if characters > LONG_CHARACTERS and characters > MAX_TOKEN_CHARACTERS * self.context_window:
            raise self._too_long(f"the prompt has {characters:,} characters")

    def check_length(self, tokens: int, what: str) -> None:
        """Raises PromptTooLongError if the window has no room for an answer after these tokens of `what`."""
        if not self.fits_window(tokens):
            raise self._too_long(f"{what} has {tokens} tokens")

    def _too_long(self, what: str) -> PromptTooLongError:
        return PromptTooLongError(
            f"{what}; {self.model_name} reads at most {self.context_window - 1} tokens and answers in the remaining "
            "ones: use fewer or shorter passages, or a model with a longer window"
        )
