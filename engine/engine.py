"""Engine: one model on one device, with the KV of the chunks that it has encoded. Start here.

The main path: `Engine.stream` -> `_answer` -> `prefill` (find, plan, decide, report) -> `Fusion.prefill` (layers) ->
policy. `EngineInterface` turns the caller's arguments into requests.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import Tensor

from ragblend.engine.background_work import queue_background_work
from ragblend.engine.config import (
    DEFAULT_METHOD,
    DEFAULT_RATIO,
    DecodeOptions,
    EngineConfig,
    resolve_home,
    server_url,
)
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.decoding.loop import continue_logits, decode_answer
from ragblend.engine.interface import NO_PROMPT, EngineInterface
from ragblend.engine.model.decoder import kv_geometry
from ragblend.engine.node_encoder import LocalNodeEncoder
from ragblend.engine.nodes import Progress
from ragblend.engine.prefill import prefill
from ragblend.engine.profiling import measure
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.request import Request, claim_of
from ragblend.engine.results import OnText, Prefilled, Result
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import Cancel, DeviceQueue
from ragblend.engine.scheduling.recovery import retry_after_device_failure
from ragblend.engine.scheduling.speculation import Speculation
from ragblend.engine.selection import Policy
from ragblend.kvstore.errors import UnsupportedModelError, UsageError

# Engines whose model runs in another process, by their name in `Engine.open`: module and class. Imported when opened,
# because integrations import the engine and not the other way round.
BACKENDS = {"vllm": ("ragblend.integrations.vllm.client", "VllmEngine")}


class Engine(EngineInterface):
    """Encodes chunks, and answers prompts made of them. Thread-safe: requests queue for the device.

    Nothing is loaded before it is needed. Use `Engine.open`, which shares one engine per (model, home) in a process.
    """

    runtime_type: ClassVar[type[Runtime]] = Runtime
    runtime: Runtime
    _nodes: LocalNodeEncoder

    def __init__(self, config: EngineConfig, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        self._nodes = LocalNodeEncoder(runtime, config.collection)

    @staticmethod
    def open(
        model: str = "default",
        home: str | Path | None = None,
        device: str | None = None,
        dtype: str | None = None,
        collection: str = "default",
        store_budget_bytes: int | None = None,
        memory_budget_bytes: int | None = None,
        device_budget_bytes: int | None = None,
        store_policy: str | None = None,
        kv_codec: str | None = None,
        backend: str | None = None,
        url: str | None = None,
        remote: str | None = None,
        load: str | None = None,
        fuse: str | None = None,
    ) -> EngineInterface:
        """The engine for that model, home and collection; the same object for the same arguments.

        model: `default` (the bundled SmolLM2), a hub id, a local folder or a `.gguf` file; home: where data lives
        (RAGBLEND_HOME, or the user's data folder); collection: a namespace; the others are those of `EngineConfig`.
        backend, url: `vllm` and the address of the server that has the model, by default vLLM's own; None to load it
        here. Engines of one model and home share its weights, its queue and its store, whatever their collections.
        Raises UsageError; a model's own errors come on first use.
        """
        budgets = store_budget_bytes, memory_budget_bytes, device_budget_bytes
        server = server_url(backend, url)
        given = *budgets, store_policy, kv_codec, remote, server, load, fuse
        config = EngineConfig(str(model), device, dtype, collection, *given)
        if server is None:
            return Engine.shared(config, resolve_home(home))
        module, name = BACKENDS[backend or "vllm"]
        engine: EngineInterface = getattr(import_module(module), name).shared(config, resolve_home(home))
        return engine

    @property
    def device(self) -> str:
        return str(self.runtime.device)

    @property
    def dtype(self) -> str:
        return self.runtime.dtype

    @property
    def token_bytes(self) -> int:
        geometry = kv_geometry(self.runtime.model_config, self.dtype)
        return round(self.runtime.codec.token_nbytes(geometry))

    @property
    def queues(self) -> tuple[DeviceQueue, ...]:
        return (self.runtime.queue,)

    @property
    def needs_measurement(self) -> bool:
        return self.runtime.gate.passed and self.runtime.decode_selector.needs_measurement

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        def tokenized() -> Sequence[Chunk]:
            return self.tokenize(Prompt(chunks)).chunks

        self.runtime.background.add(partial(self._nodes.prefetch, tokenized), ("prefetch", *chunks))

    def prefill(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        seed: int = 0,
        cancel: Cancel | None = None,
    ) -> Prefilled:
        request = self._request(prompt, method, ratio, DecodeOptions(max_new_tokens=64, seed=seed))

        def work(_: OnText | None, cancel: Cancel | None) -> Prefilled:
            with self.runtime.queue.turn(cancel) as turn:
                prefilled = prefill(self.runtime, request, turn)
                queue_background_work(self.runtime, request, prefilled)
                return prefilled

        return retry_after_device_failure(self.runtime, work, None, cancel)

    def decode(self, prefilled: Prefilled, **options: Any) -> Result:
        """Answer a prefilled prompt; each call starts again after the prompt."""
        chosen = DecodeOptions.of(options)
        with self.runtime.queue.turn() as turn:
            return decode_answer(self.runtime, prefilled, chosen, turn)

    def continue_logits(self, prefilled: Prefilled, token_ids: Sequence[int]) -> Tensor:
        """(n, vocab) float32 logits that predict each of the tokens, given the prompt and the tokens before it."""
        with self.runtime.queue.turn():
            return continue_logits(self.runtime, prefilled, token_ids)

    def profile(self, progress: Progress | None = None) -> DeviceProfile:
        """Measure this model on this device and save the profile for the loading controller (`ratio="auto"`)."""
        with self.runtime.queue.turn():
            if not self.runtime.gate.passed:
                raise UsageError(f"{self.model_name} is not fused, so there is nothing to profile")
            self.runtime.save_profile(measure(self.runtime, progress))
            assert self.runtime.profile is not None
            return self.runtime.profile

    def _connect(self, cancel: Cancel | None, deadline: float) -> None:
        """Nothing: the model is in this process."""

    def _answer_function(
        self, request: Request, options: DecodeOptions, speculation: Speculation | None = None
    ) -> Callable[[OnText | None, Cancel | None], Result]:
        return partial(
            retry_after_device_failure, self.runtime, partial(self._answer, request, options, speculation)
        )

    def _answer_last(
        self, requests: Iterator[Request], options: DecodeOptions, on_text: OnText, cancel: Cancel
    ) -> Result:
        """Prefills requests ahead while the device is idle."""
        request: Request | None = None
        with Speculation(self.runtime) as speculation:
            for request in requests:
                speculation.offer(request)
            if request is None:
                raise UsageError(NO_PROMPT)
            return self._answer_function(request, options, speculation)(on_text, cancel)

    def _answer(
        self,
        request: Request,
        options: DecodeOptions,
        speculation: Speculation | None,
        on_text: OnText | None,
        cancel: Cancel | None,
    ) -> Result:
        """Prefill, decode, and keep the context for the request's session. ttft_ms counts from the start of the turn.

        Other requests get the device between its layers and tokens; `claim_of` decides which goes first.
        """
        prefilled_ahead = None if speculation is None else speculation.take_result(cancel)
        claim = claim_of(self.runtime, request)
        if prefilled_ahead is not None:
            claim = replace(claim, cached={}, new_tokens=1)
        with self.runtime.queue.turn(cancel, claim=claim) as turn:
            begun, answer = time.perf_counter(), tuple[int, ...]()
            prefilled = prefilled_ahead or prefill(self.runtime, request, turn, answering=True)
            try:
                result = decode_answer(self.runtime, prefilled, options, turn, on_text, cancel, begun)
                answer = result.token_ids
                return result
            finally:  # also after a cancelled answer, because its prompt was prefilled
                queue_background_work(self.runtime, request, prefilled)
                if request.session is not None and prefilled.cache is not None:
                    ids = (*request.prompt.token_ids, *answer)
                    request.session.keep(ids, prefilled.cache, self.runtime.decoder)
                    self.runtime.sessions.add(request.session)


def require_local_engine(engine: EngineInterface, what: str) -> Engine:
    """Return the engine. Raises UnsupportedModelError if its model is not loaded in this process. what: the operation,
    for the message.
    """
    if not hasattr(engine, "continue_logits"):
        raise UnsupportedModelError(
            f"{what} is not possible with {engine.device}; load the model in this process for that"
        )
    return cast(Engine, engine)
