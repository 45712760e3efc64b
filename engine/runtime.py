"""Runtime: one model on one device and in one home; its parts are created on first use and shared by all engines."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ragblend.engine.config import EngineConfig
from ragblend.engine.controller import DeviceProfile, MeasuredSpeeds
from ragblend.engine.decoding.constrained import token_grammars
from ragblend.engine.decoding.implementations import DecodeSelector
from ragblend.engine.model import load as model
from ragblend.engine.model.decoder import CONVOLUTION, Decoder, constant_rope_tokens
from ragblend.engine.model.device import (
    TransferStream,
    memory_tiers,
    reader_count,
    release_cached_memory,
    transfer_stream,
)
from ragblend.engine.model.gate import GATE_TEXT, GateVerdict, cached_verdict, run_gate
from ragblend.engine.model.load import LoadedModel
from ragblend.engine.prompts.session import Session
from ragblend.engine.runtime_base import RuntimeBase, log, once
from ragblend.engine.scheduling.background import Priority
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.scheduling.queue import CallbackCancel, Cancel, DeviceQueue
from ragblend.kvstore.errors import Cancelled, UsageError
from ragblend.kvstore.fingerprint import ModelFingerprint
from ragblend.kvstore.memory import MemoryTier

# `Runtime.measure_decoding` yields to requests in its first attempts; in the next ones, requests wait for it so long.
YIELDING_ATTEMPTS, BLOCKING_ATTEMPTS, BLOCKING_S = 3, 2, 8.0
BLOCKING_WAIT_S = 0.1  # how long it then waits for the device, and requests after it
UNMEASURED = (
    "no real model with convolution layers was measured with fused KV; to fuse it nevertheless, set `fuse` to `all` "
    '(RAGBLEND_FUSE=all, or Engine.open(fuse="all"))'
)


class Runtime(RuntimeBase):
    """The parts of an engine whose model is loaded in this process.

    queue: orders requests for the device; speeds: what they showed of it. sessions: those that hold a context; changed
    only in a device turn.
    """

    def __init__(self, config: EngineConfig, home: Path) -> None:
        self.queue, self.speeds = DeviceQueue(), MeasuredSpeeds()
        self._cancelled_measurements = 0  # of decode implementations
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        super().__init__(config, home)

    def close(self) -> None:
        """End background tasks as at the process's exit, and free model and store. A running `encode` waits between two
        chunks.
        """
        self.background.end()
        with self.queue.turn(), self.store_lock:
            self._free()
            self._forget_sessions()

    def _forget_sessions(self) -> None:
        """Drop the sessions' contexts, which a reloaded model cannot use."""
        for session in list(self.sessions):
            session.forget()

    @property
    def loaded_now(self) -> LoadedModel | None:
        """The model, if it is loaded."""
        return vars(self).get("loaded")

    @property
    def loaded_ref(self) -> "weakref.ref[LoadedModel] | None":
        """A weak reference to the loaded model."""
        found = self.loaded_now
        return None if found is None else weakref.ref(found)

    def rebuild(self, failed: "weakref.ref[LoadedModel] | None", cancel: Cancel | None = None) -> None:
        """Drop a model whose device failed, once for all requests that failed with it, and free its memory.

        Does not wait for background tasks; stored KV stays, except on the device. Raises Cancelled as a turn does.
        """
        if failed is not None and self.loaded_now is failed():
            with self.queue.turn(cancel):
                if self.loaded_now is failed():  # no other request has done it
                    with self._loading_lock:
                        for name in ("loaded", "gate", "decode_selector", "token_grammars", "transfers"):
                            vars(self).pop(name, None)
                    for tier in self.store.tiers if "store" in vars(self) else ():
                        if tier.name == "device":
                            tier.clear()
                    self._forget_sessions()
        gc.collect()
        release_cached_memory(self.device)

    # --- the model

    @once
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return model.locate(self.config.model, self.home, self.dtype)

    @property
    def needs_conversion(self) -> bool:
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
        """llguidance's tables for compiling grammars. Raises UsageError if that library is not installed."""
        loaded, tokenizer = self.loaded.model, self.tokenizing.tokenizer
        vocabulary = loaded.get_output_embeddings().weight.shape[0]
        return token_grammars(tokenizer, vocabulary, self.end_ids)

    @once
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end an answer. A GGUF names only one, which need not be that of the chat template."""
        named = self.loaded.model.generation_config.eos_token_id
        ids = [*(named if isinstance(named, list) else [named]), *self.tokenizing.end_ids()]
        return [each for each in dict.fromkeys(ids) if each is not None]

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and has passed the gate."""
        gate = vars(self).get("gate")
        return gate is not None and gate.passed

    @property
    def decoder(self) -> Decoder:
        _ = self.gate  # it sets what the decoder may do, also after it was loaded again
        decoder = self.loaded.decoder
        assert decoder is not None, "used only for models that passed the gate"
        return decoder

    @once
    def gate(self) -> GateVerdict:
        loaded, decoder = self.loaded, self.loaded.decoder
        if decoder is None:
            verdict = GateVerdict(False, (), loaded.unsupported)
        elif CONVOLUTION in decoder.layer_types and self.config.fuse != "all":
            verdict = GateVerdict(False, (), UNMEASURED)
        else:
            ids, folder = self.tokenizing.passage_ids(GATE_TEXT), self.home / "models"
            verdict = cached_verdict(
                folder,
                self.fingerprint.digest,
                decoder.device,
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

    def gate_verdict(self) -> GateVerdict:
        """The gate's verdict, for callers that do not hold the device. Takes a device turn only if there is no verdict
        yet, because all requests wait for such a turn.
        """
        known: GateVerdict | None = vars(self).get("gate")
        if known is not None:
            return known
        with self.queue.turn():
            return self.gate

    @once
    def decode_selector(self) -> DecodeSelector:
        """The selector of the decode implementation."""
        return DecodeSelector(
            self.decoder, self.home / "models", self.fingerprint.digest, self.has_quantized_weights
        )

    @property
    def has_quantized_weights(self) -> bool:
        """Whether the weights were numbers of a few bits before they were unpacked."""
        return model.was_quantized(self.config.model, self.loaded.model.num_parameters())

    def measure_decoding(self) -> None:
        """In the background, measure which decode implementation is fastest, unless the model was closed meanwhile.

        Raises Cancelled if a request arrives, KV must be stored, or the device is never idle: the next answer queues it
        again. A program that sends requests without a pause would cancel it forever. So after YIELDING_ATTEMPTS it
        begins as soon as the device is free, and lets the next request wait for up to BLOCKING_S; it does so at most
        BLOCKING_ATTEMPTS times in a process.
        """
        cancel = CallbackCancel(lambda: self.background.should_stop(Priority.MEASURE))
        is_blocking = 0 <= self._cancelled_measurements - YIELDING_ATTEMPTS < BLOCKING_ATTEMPTS
        claim = Claim(deadline=time.monotonic() + BLOCKING_WAIT_S) if is_blocking else None
        try:
            with self.queue.turn(cancel, background=not is_blocking, claim=claim) as turn:
                until = time.monotonic() + (BLOCKING_S if is_blocking else 0.0)
                selector: DecodeSelector | None = vars(self).get("decode_selector")
                if selector is not None and selector.needs_measurement:
                    text = self.tokenizing.passage_ids(GATE_TEXT)
                    selector.measure(text, lambda: turn.should_stop() and time.monotonic() >= until)
        except Cancelled:
            self._cancelled_measurements += 1
            raise

    def _tiers(self) -> list[MemoryTier]:
        memory, device = self._budgets.get("memory"), self._budgets.get("device")
        return memory_tiers(self.device, memory, device, self._store_policy)

    @once
    def loader_threads(self) -> ThreadPoolExecutor:
        """The loader's threads."""
        return ThreadPoolExecutor(reader_count(self.device), thread_name_prefix="ragblend-loader")

    @once
    def transfers(self) -> TransferStream:
        """Copies KV to the device beside the compute."""
        return transfer_stream(self.device)

    # --- the profile and the gate

    @property
    def profile_path(self) -> Path:
        """The file with the profile of this model on this device."""
        return self.home / "profiles" / f"{self.fingerprint.digest[:16]}-{self.device.type}.json"

    @once
    def profile(self) -> DeviceProfile | None:
        try:
            return DeviceProfile.read(self.profile_path)
        except UsageError as error:
            log.warning("%s", error)
            return None

    def save_profile(self, measured: DeviceProfile) -> None:
        """Use this profile from now on, in this process and later ones."""
        measured.save(self.profile_path)
        vars(self)["profile"] = measured

    def refusal(self, tokens: int) -> str | None:
        if not self.gate.passed:
            return f"{self.model_name} is served by full prefill: {self.gate.reason}"
        regime = constant_rope_tokens(self.model_config)
        if regime is not None and tokens > regime:
            return (
                f"this prompt of {tokens} tokens is served by full prefill: beyond {regime} tokens the model's RoPE "
                "changes its frequencies with the length, and stored keys would be rotated wrongly"
            )
        return None
