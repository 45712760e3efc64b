"""What an engine holds, each loaded on first use: tokenizer, model, gate's verdict, store, node index."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ragblend.engine.config import EngineConfig
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.decoder import Decoder, regime_tokens
from ragblend.engine.device import make_lane, memory_tiers, pick_device, pick_dtype
from ragblend.engine.files import tokenizer_digest
from ragblend.engine.gate import TEXT, GateVerdict, kept_verdict, run_gate
from ragblend.engine.model import Checkpoint, LoadedModel, fingerprint, load, locate
from ragblend.engine.serving import Server
from ragblend.engine.tokenizing import Tokenizing
from ragblend.kvstore.chunks import ChunkKey
from ragblend.kvstore.codec import RAW, Codec, codec_named
from ragblend.kvstore.errors import PromptTooLongError, UsageError
from ragblend.kvstore.keys import ModelFingerprint, chunk_key
from ragblend.kvstore.memory import MemoryTier
from ragblend.kvstore.nodes import NodeIndex, Scope
from ragblend.kvstore.policy import DEFAULT_POLICY
from ragblend.kvstore.store import KVStore

log = logging.getLogger("ragblend")
_USUAL_TOKENS = 512


class Resources:
    """Everything that costs time or memory. `close` forgets it all; the next use loads it again."""

    def __init__(self, config: EngineConfig, home: Path) -> None:
        self.config, self.home = config, home
        self._loading = threading.RLock()
        self._held: dict[str, Any] = {}
        self._codec = RAW
        self.set_codec(config.kv_codec)
        self._budgets: dict[str, int | None] = {
            "disk": config.store_budget_bytes,
            "memory": config.memory_budget_bytes,
            "device": config.device_budget_bytes,
        }

    def _once(self, name: str, make: Any) -> Any:
        with self._loading:
            if name not in self._held:
                self._held[name] = make()
            return self._held[name]

    @cached_property
    def device(self) -> torch.device:
        return pick_device(self.config.device)

    @cached_property
    def dtype(self) -> str:
        return pick_dtype(self.device, self.config.dtype)

    @property
    def checkpoint(self) -> Checkpoint:
        found: Checkpoint = self._once("checkpoint", lambda: locate(self.config.model, self.home, self.dtype))
        return found

    @property
    def model_name(self) -> str:
        name = self.checkpoint.folder.name
        return f"{self.config.model} ({name})" if self.config.model == "default" else self.config.model

    @property
    def tokenizing(self) -> Tokenizing:
        found: Tokenizing = self._once("tokenizing", lambda: Tokenizing(self.checkpoint.tokenizer()))
        return found

    @property
    def model_config(self) -> Any:
        return self._once("config", self.checkpoint.config)

    @property
    def context_window(self) -> int:
        return int(getattr(self.model_config, "max_position_embeddings", None) or 1 << 20)

    @property
    def canonical_prefix(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self._once("prefix", self.tokenizing.prefix_ids)
        return found

    @property
    def store(self) -> KVStore:
        def opened() -> KVStore:
            policy, budgets = self.config.store_policy, self._budgets
            tiers = memory_tiers(self.device, budgets["memory"], budgets["device"], policy or DEFAULT_POLICY)
            return KVStore.open(self.home / "kv", budgets["disk"], tiers, policy, self._cost)

        found: KVStore = self._once("store", opened)
        return found

    def _cost(self, cached_tokens: int, new_tokens: int) -> float:
        """Of computing a token, as a multiple of one of 512 behind nothing; 1 before anything was measured.

        A multiple, so that what is stored before and after the measuring, and by several models, can be compared.
        """
        profile: DeviceProfile | None = self._once("costs", lambda: self.profile)
        usual = profile.prefill.ms_per_token(0, _USUAL_TOKENS) if profile is not None else 0.0
        if profile is None or not usual:
            return 1.0
        return profile.prefill.ms_per_token(cached_tokens, new_tokens) / usual

    @property
    def codec(self) -> Codec:
        """How KV is packed that is stored from now on."""
        return self._codec

    def set_codec(self, name: str | None) -> None:
        """Pack KV so from now on (None: as before); what is stored stays as it is, and is read all the same."""
        if name is not None:
            self._codec = codec_named(name)

    def set_budgets(self, store: int | None, memory: int | None, device: int | None) -> None:
        """From now on a tier keeps at most that many bytes (None: as before); what is too much goes at its next put.

        A tier that an open store does not have is there when it is opened again.
        """
        with self._loading:
            self._budgets = {
                name: self._budgets[name] if wanted is None else wanted
                for name, wanted in (("disk", store), ("memory", memory), ("device", device))
            }
            if "store" not in self._held:
                return
            opened: KVStore = self._held["store"]
            tiers: list[KVStore | MemoryTier] = [opened, *opened.tiers]
            for tier in tiers:
                if (budget := self._budgets[tier.name]) is not None:
                    tier.budget_bytes = budget

    @property
    def nodes(self) -> NodeIndex:
        found: NodeIndex = self._once("nodes", lambda: NodeIndex.open(self.home / "nodes.sqlite"))
        return found

    def scope(self, collection: str) -> Scope:
        """What the node ids of a collection are looked up under."""
        checkpoint = self.checkpoint
        digest: str = self._once("tokenizer", lambda: tokenizer_digest(checkpoint.folder, checkpoint.ledger))
        return Scope(collection, digest)

    @property
    def loaded(self) -> LoadedModel:
        found: LoadedModel = self._once("loaded", lambda: load(self.checkpoint, self.device, self.dtype))
        return found

    @property
    def decoder(self) -> Decoder:
        decoder = self.loaded.decoder
        assert decoder is not None, "only asked for after the gate"
        return decoder

    @property
    def fingerprint(self) -> ModelFingerprint:
        found: ModelFingerprint = self._once(
            "fingerprint", lambda: fingerprint(self.checkpoint, self.model_config, self.dtype)
        )
        return found

    @property
    def gate(self) -> GateVerdict:
        found: GateVerdict = self._once("gate", self._judge)
        return found

    @property
    def profile_path(self) -> Path:
        """Where the profile of this model on this device is kept."""
        return self.home / "profiles" / f"{self.fingerprint.digest[:16]}-{self.device.type}.json"

    @property
    def profile(self) -> DeviceProfile | None:
        """What was measured of it; None before that, or if the file is of no use."""
        try:
            found = DeviceProfile.read(self.profile_path)
            return found.priced(self.config.prices) if found else None
        except UsageError as error:
            log.warning("%s", error)
            return None

    @property
    def server(self) -> Server:
        found: Server = self._once("server", self._serve)
        return found

    def key_of(self, prefix: tuple[int, ...], token_ids: tuple[int, ...], collection: str) -> ChunkKey:
        return chunk_key(self.fingerprint, prefix, collection, token_ids)

    def refusal(self, tokens: int) -> str | None:
        """Why a prompt of that length must not be fused; None if it may be."""
        if not self.gate.passed:
            return f"{self.model_name} is served by full prefill: {self.gate.reason}"
        regime = regime_tokens(self.model_config)
        if regime is not None and tokens > regime:
            return (
                f"this prompt of {tokens} tokens is served by full prefill: beyond {regime} tokens the model's RoPE "
                "changes its frequencies with the length, and stored keys would be rotated wrongly"
            )
        return None

    def check_length(self, tokens: int, what: str) -> None:
        """Raises PromptTooLongError where nothing of the window would be left to answer in."""
        if tokens >= self.context_window:
            raise PromptTooLongError(
                f"{what} has {tokens} tokens; {self.model_name} reads at most {self.context_window - 1} and answers in "
                "what is left: use fewer or shorter passages, or a model with a longer window"
            )

    def close(self) -> None:
        with self._loading:
            held, self._held = self._held, {}
        if "server" in held:
            held["server"].pool.shutdown()
        for name in ("store", "nodes"):
            if name in held:
                held[name].close()

    def _judge(self) -> GateVerdict:
        loaded = self.loaded
        if loaded.decoder is None:
            verdict = GateVerdict(False, (), loaded.unsupported)
        else:
            decoder = loaded.decoder
            ids = self.tokenizing.passage_ids(TEXT)
            folder = self.home / "models"
            verdict = kept_verdict(folder, self.fingerprint.digest, lambda: run_gate(decoder, ids))
            decoder.layouts = list(verdict.layouts) or decoder.layouts
        if not verdict.passed:
            log.warning(
                "%s cannot be fused and is served by full prefill: %s", self.model_name, verdict.reason
            )
        return verdict

    def _serve(self) -> Server:
        assert self.gate.passed
        threads = ThreadPoolExecutor(self.config.loader_threads, thread_name_prefix="ragblend-loader")
        return Server(
            self.decoder,
            self.store,
            make_lane(self.device),
            threads,
            self.key_of,
            self.canonical_prefix,
            self.profile,
        )
