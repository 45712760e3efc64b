"""Runtime: one model on one device and in one home, each part of it made on first use and shared by all engines."""

import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from ragblend.engine.config import EngineConfig
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.decoding.constrained import token_grammars
from ragblend.engine.decoding.implementations import DecodeSelector
from ragblend.engine.model import load as model
from ragblend.engine.model.checkpoints import tokenizer_digest
from ragblend.engine.model.decoder import Decoder, constant_rope_tokens
from ragblend.engine.model.device import (
    TransferStream,
    memory_tiers,
    pick_device,
    pick_dtype,
    reads_at_once,
    release_cached_memory,
    transfer_stream,
)
from ragblend.engine.model.gate import TEXT, GateVerdict, cached_verdict, run_gate
from ragblend.engine.model.load import LoadedModel
from ragblend.engine.prompts.session import Session
from ragblend.engine.prompts.tokenizing import LONG_CHARACTERS, MAX_TOKEN_CHARACTERS, PromptTokenizer
from ragblend.engine.prompts.tools import CallFormat, call_format
from ragblend.engine.scheduling.queue import Asking, Cancel, Chores, DeviceQueue, Worth, patient
from ragblend.kvstore.codec import RAW, Codec, codec_named
from ragblend.kvstore.errors import Cancelled, PromptTooLongError, UsageError
from ragblend.kvstore.files import replace_durably
from ragblend.kvstore.keys import ChunkKey, ModelFingerprint, chunk_key
from ragblend.kvstore.memory import MemoryTier
from ragblend.kvstore.nodes import NodeIndex, Scope
from ragblend.kvstore.store import KVStore

log = logging.getLogger("ragblend")
_TYPICAL_TOKENS = 512
T = TypeVar("T")
_runtimes: dict[tuple[Any, ...], "Runtime"] = {}
_sharing = threading.Lock()


class once(Generic[T]):
    """A property that the first thread to ask computes while others wait; `Runtime.close` forgets it."""

    lock = "_loading"

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name = make, make.__name__

    def __get__(self, runtime: "Runtime | None", owner: object = None) -> T:
        if runtime is None:  # asked of the class
            return self  # type: ignore[return-value]
        with getattr(runtime, self.lock):
            if self._name not in vars(runtime):
                vars(runtime)[self._name] = self._make(runtime)
            found: T = vars(runtime)[self._name]
            return found


class light(once[T]):
    """The same for what does not wait while a model is converted or loaded."""

    lock = "_light"


class Runtime:
    """What costs time or memory. `close` forgets it all; the next use loads it again.

    queue: before the device; chores: for when nobody waits; use: before store and node index where they are used
    outside the device's turn, and before all is closed (behind the queue). sessions: changed in the device's turn.
    """

    def __init__(self, config: EngineConfig, home: Path) -> None:
        self.config, self.home = config, home
        self.device = pick_device(config.device)
        self.dtype = pick_dtype(self.device, config.dtype)
        self.queue, self.use, self.chores = DeviceQueue(), DeviceQueue(), Chores(self._note_unstored)
        self._loading, self._light = threading.RLock(), threading.RLock()
        self.codec: Codec = RAW  # how KV is packed that is stored from now on
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()  # that hold a context
        self._budgets: dict[str, int] = {}
        self._remote: str | None = None
        self._store_policy: str | None = None
        self._digests = home / "models" / "digests.json"
        self._adopt(config)

    @classmethod
    def shared(cls, config: EngineConfig, home: Path) -> "Runtime":
        """The process's one for that model, url, device, dtype and home; an older one takes what `_adopt` says."""
        device = pick_device(config.device)
        key = (config.model, config.url, str(device), pick_dtype(device, config.dtype), home)
        with _sharing:
            if key in _runtimes:
                _runtimes[key]._adopt(config)
            else:
                _runtimes[key] = cls(config, home)
            return _runtimes[key]

    def _adopt(self, config: EngineConfig) -> None:
        """Budgets, codec, policy and shared store from now on (None: as before). What is too much goes with a
        tier's next puts.

        A tier that an open store does not have is there when it is opened again; so is another policy or shared store.
        """
        budgets = config.store_budget_bytes, config.memory_budget_bytes, config.device_budget_bytes
        wanted = dict(zip(("disk", "memory", "device"), budgets, strict=True))
        with self._light:
            self._budgets |= {name: budget for name, budget in wanted.items() if budget is not None}
            self._remote = config.remote or self._remote
            self._store_policy = config.store_policy or self._store_policy
            if config.kv_codec is not None:
                self.codec = codec_named(config.kv_codec)
            if "store" in vars(self):
                tiers: list[KVStore | MemoryTier] = [self.store, *self.store.tiers]
                for tier in tiers:
                    tier.budget_bytes = self._budgets.get(tier.name, tier.budget_bytes)

    def close(self) -> None:
        """End background work and free model and store. An `encode` under way waits between two chunks, and goes on."""
        self.chores.finish(hurried=True)
        with self.queue.turn(), self.use.turn():
            with self._loading, self._light:
                names = [name for name, part in vars(Runtime).items() if isinstance(part, once)]
                parts = {name: vars(self).pop(name) for name in names if name in vars(self)}
            if "readers" in parts:
                parts["readers"].shutdown()
            for name in {"store", "nodes"} & set(parts):
                parts[name].close()
            for session in list(self.sessions):  # of no use to a model that is loaded anew
                session.forget()

    @property
    def loaded_now(self) -> LoadedModel | None:
        """The model, if it is loaded."""
        return vars(self).get("loaded")

    @property
    def loaded_ref(self) -> "weakref.ref[LoadedModel] | None":
        """The same, for who must not keep its memory."""
        found = self.loaded_now
        return None if found is None else weakref.ref(found)

    def rebuild(self, failed: "weakref.ref[LoadedModel] | None", cancel: Cancel | None = None) -> None:
        """Forget a model whose device failed, once for all who saw it fail, and give back its memory.

        Chores are not waited for; what is stored stays, but on the device. Raises Cancelled as a turn does.
        """
        if failed is not None and self.loaded_now is failed():
            with self.queue.turn(cancel):
                if self.loaded_now is failed():  # nobody else has done it
                    with self._loading:
                        for name in ("loaded", "gate", "choice", "token_grammars", "transfers"):
                            vars(self).pop(name, None)
                    for tier in self.store.tiers if "store" in vars(self) else ():
                        if tier.name == "device":
                            tier.clear()
                    for session in list(self.sessions):  # of no use to another model
                        session.forget()
        gc.collect()
        release_cached_memory(self.device)

    # --- the model

    @once
    def folder(self) -> Path:
        """Of the checkpoint."""
        return model.locate(self.config.model, self.home, self.dtype)

    @property
    def needs_conversion(self) -> bool:
        """Whether loading the model will take a minute, this once."""
        return "folder" not in vars(self) and model.needs_conversion(self.config.model, self.home, self.dtype)

    @property
    def model_name(self) -> str:
        name = self.config.model
        return f"{name} ({self.folder.name})" if name == "default" else name

    @once
    def model_config(self) -> Any:
        return model.read_config(self.folder)

    @property
    def context_window(self) -> int:
        return int(getattr(self.model_config, "max_position_embeddings", None) or 1 << 20)

    @once
    def fingerprint(self) -> ModelFingerprint:
        return model.fingerprint(self.folder, self._digests, self.model_config, self.dtype)

    @once
    def loaded(self) -> LoadedModel:
        return model.load(self.folder, self.device, self.dtype)

    @once
    def token_grammars(self) -> Any:
        """What grammars are compiled with. Raises UsageError where the library for that is not installed."""
        loaded, tokenizer = self.loaded.model, self.tokenizing.tokenizer
        vocabulary = loaded.get_output_embeddings().weight.shape[0]
        return token_grammars(tokenizer, vocabulary, model.end_ids(loaded))

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded, judged, and may be fused."""
        gate = vars(self).get("gate")
        return gate is not None and gate.passed

    @property
    def decoder(self) -> Decoder:
        assert self.gate is not None, "it says what the decoder may do, also of one that was loaded anew"
        decoder = self.loaded.decoder
        assert decoder is not None, "only asked for after the gate"
        return decoder

    @once
    def gate(self) -> GateVerdict:
        loaded, decoder = self.loaded, self.loaded.decoder
        if decoder is None:
            verdict = GateVerdict(False, (), loaded.unsupported)
        else:
            ids, folder = self.tokenizing.passage_ids(TEXT), self.home / "models"
            verdict = cached_verdict(
                folder,
                self.fingerprint.digest,
                decoder.device.type,
                decoder.geometry.layers,
                lambda: run_gate(decoder, ids),
            )
            decoder.layouts = list(verdict.layouts) or decoder.layouts
            if not verdict.shows_attention:
                decoder.disable_attention_collection()
        if not verdict.passed:
            log.warning(
                "%s cannot be fused, and is served by full prefill: %s", self.model_name, verdict.reason
            )
        return verdict

    def judged(self) -> GateVerdict:
        """The gate's verdict, for who has not the device. A turn is taken only where there is none yet: all
        others wait behind one that is not shared."""
        known: GateVerdict | None = vars(self).get("gate")
        if known is not None:
            return known
        with self.queue.turn():
            return self.gate

    @once
    def choice(self) -> DecodeSelector:
        """Of what computes the tokens of an answer."""
        return DecodeSelector(
            self.decoder, self.home / "models", self.fingerprint.digest, self.has_quantized_weights
        )

    @property
    def has_quantized_weights(self) -> bool:
        """Whether the weights were numbers of a few bits before they were unpacked."""
        return model.was_quantized(self.config.model, self.loaded.model.num_parameters())

    def choose_steps(self) -> None:
        """Measure that when nobody needs the device.

        Raises Cancelled when the model is to be closed, where there is no pause, and when something is to be stored.
        """
        ids, claim = self.tokenizing.passage_ids(TEXT), patient()

        def given_up() -> bool:
            return self.chores.gives_up(Worth.MEASURE)

        while not given_up() and time.monotonic() < claim.deadline:
            with suppress(Cancelled), self.queue.turn(Asking(given_up), background=True, claim=claim) as turn:
                choice: DecodeSelector | None = vars(self).get(
                    "choice"
                )  # None: the model was let go meanwhile
                if choice is not None and choice.needs_measurement:
                    choice.measure(ids, lambda: turn.is_wanted() or given_up())
                return
        raise Cancelled("there was no pause in which to measure")

    # --- what the end of a process left without KV

    @property
    def _unstored_path(self) -> Path:
        return self.home / f"unstored-{self.fingerprint.digest[:16]}.json"

    def _note_unstored(self, names: Sequence[Hashable]) -> None:
        """Say which passages, (collection, node id, token ids), have no KV; keep their ids for the next process."""
        left: dict[str, list[str]] = {}
        for name in names:
            match name:
                case (str(collection), str(node_id), _):
                    left.setdefault(collection, []).append(node_id)
        log.warning(
            "%d passages that were asked for have no KV yet: the process ends. Those of a library are encoded first "
            "the next time; `ragblend ingest`, or `engine.finish_background()` at the end, encodes all.",
            len(names),
        )
        if left and "fingerprint" in vars(self):
            with suppress(OSError):  # they are encoded when they are asked for again
                replace_durably(self._unstored_path, json.dumps(left))

    def take_unstored(self) -> dict[str, list[str]]:
        """Node ids by collection that an earlier process left without KV, once."""
        if not self.is_ready:  # a model that is not fused has no use for KV, and some have no fingerprint
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
        """Something is deleted, and its id may be among them. They are encoded when they are asked for again."""
        for path in self.home.glob("unstored-*.json"):
            path.unlink(missing_ok=True)

    # --- the tokenizer, which does not need the weights: a GGUF's would have to be converted first

    @light
    def _tokenizer_folder(self) -> Path:
        return model.locate_tokenizer(self.config.model, self.home, self.dtype)

    @light
    def tokenizing(self) -> PromptTokenizer:
        return PromptTokenizer(model.load_tokenizer(self._tokenizer_folder))

    @light
    def call_format(self) -> CallFormat:
        return call_format(self.tokenizing.tokenizer, self.config.model)

    @light
    def canonical_prefix(self) -> tuple[int, ...]:
        return self.tokenizing.prefix_ids()

    # --- the store

    @light
    def store(self) -> KVStore:
        disk, policy = self._budgets.get("disk"), self._store_policy
        return KVStore.open(self.home / "kv", disk, self._tiers(), policy, self._token_cost, self._remote)

    def _tiers(self) -> list[MemoryTier]:
        """Above the disk."""
        memory, device = self._budgets.get("memory"), self._budgets.get("device")
        return memory_tiers(self.device, memory, device, self._store_policy)

    @light
    def nodes(self) -> NodeIndex:
        return NodeIndex.open(self.home / "nodes.sqlite")

    def scope(self, collection: str) -> Scope:
        """What the node ids of a collection are looked up under."""
        return Scope(collection, self._tokenizer_digest)

    @light
    def _tokenizer_digest(self) -> str:
        return tokenizer_digest(self._tokenizer_folder, self._digests)

    def key_of(self, prefix: tuple[int, ...], token_ids: tuple[int, ...], collection: str) -> ChunkKey:
        return chunk_key(self.fingerprint, prefix, collection, token_ids)

    @once
    def readers(self) -> ThreadPoolExecutor:
        """The loader's threads."""
        return ThreadPoolExecutor(reads_at_once(self.device), thread_name_prefix="ragblend-loader")

    @once
    def transfers(self) -> TransferStream:
        """What takes KV to the device beside the compute."""
        return transfer_stream(self.device)

    # --- what was measured, and what may be served

    @property
    def profile_path(self) -> Path:
        """Where the profile of this model on this device is kept."""
        return self.home / "profiles" / f"{self.fingerprint.digest[:16]}-{self.device.type}.json"

    @once
    def profile(self) -> DeviceProfile | None:
        """What was measured, now or earlier; None before that, or if the file is of no use."""
        try:
            return DeviceProfile.read(self.profile_path)
        except UsageError as error:
            log.warning("%s", error)
            return None

    def keep_profile(self, measured: DeviceProfile) -> None:
        """Use it from now on, in this process and those to come."""
        measured.save(self.profile_path)
        vars(self)["profile"] = measured

    def _token_cost(self, cached_tokens: int, new_tokens: int) -> float:
        """Of computing a token, as a multiple of one of 512 behind nothing; 1 before anything was measured.

        A multiple, so that what is stored before and after the measuring, and by several models, can be compared.
        """
        profile = self.profile
        typical = profile.prefill.ms_per_token(0, _TYPICAL_TOKENS) if profile is not None else 0.0
        if profile is None or not typical:
            return 1.0
        return profile.prefill.ms_per_token(cached_tokens, new_tokens) / typical

    def refusal(self, tokens: int) -> str | None:
        """Why a prompt of that length must not be fused; None if it may be."""
        if not self.gate.passed:
            return f"{self.model_name} is served by full prefill: {self.gate.reason}"
        regime = constant_rope_tokens(self.model_config)
        if regime is not None and tokens > regime:
            return (
                f"this prompt of {tokens} tokens is served by full prefill: beyond {regime} tokens the model's RoPE "
                "changes its frequencies with the length, and stored keys would be rotated wrongly"
            )
        return None

    def reads(self, tokens: int) -> bool:
        """Whether something of the window would be left to answer in."""
        return tokens < self.context_window

    def check_text(self, characters: int) -> None:
        """Raises PromptTooLongError for what is not worth tokenizing: too long for the window, whatever it says."""
        if characters > LONG_CHARACTERS and characters > MAX_TOKEN_CHARACTERS * self.context_window:
            raise self._too_long(f"the prompt has {characters:,} characters")

    def check_length(self, tokens: int, what: str) -> None:
        """Raises PromptTooLongError for what it cannot read."""
        if not self.reads(tokens):
            raise self._too_long(f"{what} has {tokens} tokens")

    def _too_long(self, said: str) -> PromptTooLongError:
        return PromptTooLongError(
            f"{said}; {self.model_name} reads at most {self.context_window - 1} tokens and answers in what is left: "
            "use fewer or shorter passages, or a model with a longer window"
        )
