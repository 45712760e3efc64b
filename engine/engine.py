"""Engine: one model on one device, with the KV of the chunks it has read. Start here.

The main path: `stream` or `generate` -> `prefill` (find, plan, decide, fuse, count) -> `Fusion` (the layer loop)
-> policy.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ragblend.engine.config import (
    DEFAULT_METHOD,
    DEFAULT_RATIO,
    DecodeOptions,
    EngineConfig,
    resolve_home,
    server_url,
)
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.decoding.loop import OnText, continue_logits, decode_answer
from ragblend.engine.model.decoder import kv_geometry
from ragblend.engine.model.gate import GateVerdict
from ragblend.engine.nodes import Nodes, Progress
from ragblend.engine.prefill import Request, claim_of, follow_up, prefill
from ragblend.engine.profiling import measure
from ragblend.engine.prompts.chat import chat
from ragblend.engine.prompts.segments import Chunk, Literal, Message, Prompt
from ragblend.engine.prompts.session import Session
from ragblend.engine.prompts.tools import CallFormat, Tool
from ragblend.engine.results import EncodeReport, Missing, Prefilled, Result, Stream
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.recovery import twice
from ragblend.engine.scheduling.speculation import Speculation
from ragblend.engine.selection import Policy, policy_named
from ragblend.kvstore.errors import Cancelled, UsageError
from ragblend.kvstore.store import KVStore

_engines: dict[tuple[Runtime, str], "Engine"] = {}
_opening = threading.Lock()


class Engine:
    """Encodes chunks, and answers prompts made of them. Safe for threads: requests queue before the device.

    Nothing is loaded before it is needed. Use `Engine.open`, which shares one engine per (model, home) in a process.
    runtime: what engines of other collections share with it.
    """

    def __init__(self, config: EngineConfig, runtime: Runtime) -> None:
        self.config, self.home, self.runtime = config, runtime.home, runtime
        self._nodes = Nodes(runtime, config.collection)

    @classmethod
    def open(
        cls,
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
    ) -> "Engine":
        """The engine for that model, home and collection; the same object for the same arguments.

        model: `default` (the bundled SmolLM2), a hub id, a local folder or a `.gguf` file; home: where data lives
        (RAGBLEND_HOME, or the user's data folder); collection: a namespace; the others are those of `EngineConfig`.
        backend, url: `vllm` and the address of the server that has the model (`served.py`), by default vLLM's own;
        None to load it here.
        Engines of one model and home share its weights, its queue and its store, whatever their collections. Raises
        UsageError; a model's own errors come on first use.
        """
        budgets = store_budget_bytes, memory_budget_bytes, device_budget_bytes
        where = server_url(backend, url)
        config = EngineConfig(
            str(model), device, dtype, collection, *budgets, store_policy, kv_codec, remote, url=where
        )
        folder, kind, parts = resolve_home(home), cls, Runtime
        if where is not None:
            from ragblend.engine.served import ServedRuntime, VllmEngine

            kind, parts = VllmEngine, ServedRuntime
        with _opening:
            runtime = parts.shared(config, folder)
            if (runtime, collection) not in _engines:
                _engines[runtime, collection] = kind(config, runtime)
            return _engines[runtime, collection]

    # --- what it is

    @property
    def model_name(self) -> str:
        return self.runtime.model_name

    @property
    def device(self) -> str:
        return str(self.runtime.device)

    @property
    def dtype(self) -> str:
        return self.runtime.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes that the KV of one token takes on the disk, with this device's dtype and this codec.

        Raises UnsupportedModelError where KV cannot be stored.
        """
        geometry = kv_geometry(self.runtime.model_config, self.dtype)
        return geometry.layers * self.runtime.codec.layer_nbytes(geometry, 1)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; loading it does not load the weights."""
        return self.runtime.tokenizing.tokenizer

    @property
    def call_format(self) -> CallFormat:
        """How this model calls tools. Raises UnsupportedModelError, with the reason, where it calls none."""
        return self.runtime.call_format

    @property
    def context_window(self) -> int:
        """Tokens of prompt and answer together that the model was made for."""
        return self.runtime.context_window

    @property
    def store(self) -> KVStore:
        return self.runtime.store

    @property
    def gate(self) -> GateVerdict:
        """Whether this model's KV may be fused (loads the model)."""
        return self.runtime.judged()

    def count_tokens(self, text: str) -> int:
        """Tokens of a passage."""
        return len(self.runtime.tokenizing.passage_ids(text))

    def check_text(self, characters: int) -> None:
        """Raises PromptTooLongError for so long a text that tokenizing it would only take memory and time."""
        self.runtime.check_text(characters)

    def control_tokens(self, text: str) -> list[int]:
        """Ids of the control tokens that the text holds as a literal, in order: what it must not hold as a message.

        Raises PromptTooLongError.
        """
        self.check_text(len(text))
        return self.runtime.tokenizing.controls(text)

    @property
    def kv_codec(self) -> str:
        """How KV is packed that is stored from now on: a row of `kvstore.codec.CODECS`."""
        return self.runtime.codec.name

    # --- chunks

    def encode(
        self,
        texts: Sequence[str],
        node_ids: Sequence[str] | None = None,
        progress: Progress | None = None,
        prefix: str | None = None,
    ) -> EncodeReport:
        """Store the KV of each passage, behind the canonical prefix or the given one; what is stored is skipped.

        node_ids: a name for each text, by which `Chunk(node_id=...)` finds it; progress(done, total) is called after
        each chunk. May be interrupted between chunks: what is done stays. Raises StoreFullError.
        """
        if node_ids is not None and len(node_ids) != len(texts):
            raise UsageError(f"{len(texts)} texts came with {len(node_ids)} node ids; each needs one")
        tokenizing = self.runtime.tokenizing
        ids = [tuple(tokenizing.passage_ids(text)) for text in texts]
        behind = (
            self.runtime.canonical_prefix
            if prefix is None
            else tokenizing.prompt(Prompt([Literal(prefix)]), {}).token_ids
        )
        for passage in ids:
            self.runtime.check_length(len(behind) + len(passage), "a passage behind its prefix")
        keys = self._nodes.keys_of(ids, behind)
        if node_ids is not None:  # before there is any KV: whoever stops in between can still `forget` it
            self._nodes.enter(node_ids, ids, keys)
        tokens, encoded = self._nodes.encode(ids, keys, behind, progress, node_ids)
        return EncodeReport(encoded, len(texts) - encoded, tokens, tuple(keys))

    def enter(self, texts: Sequence[str], node_ids: Sequence[str]) -> None:
        """Name passages by their node ids, for `encode_nodes` and whoever asks first; needs the tokenizer alone."""
        ids = [tuple(self.runtime.tokenizing.passage_ids(text)) for text in texts]
        self._nodes.enter(node_ids, ids, [None] * len(ids))

    def missing(self, node_ids: Sequence[str]) -> Missing:
        """What of these nodes has no KV yet (a GGUF is converted for that, if it was not; weights are not loaded)."""
        return self._nodes.missing(node_ids)

    def encode_nodes(
        self, node_ids: Sequence[str], leave: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        """Encode nodes that were entered, giving way to every question; yields for each the tokens encoded.

        Nodes that are there no more, or have KV, give 0. Nothing is evicted: it ends early when the budget is used.
        leave() is asked between two layers: Cancelled is raised then. Raises StoreFullError.
        """
        return self._nodes.encode_missing(node_ids, leave)

    @property
    def needs_conversion(self) -> bool:
        """Whether the model's first use will take a minute, in which it is converted."""
        return self.runtime.needs_conversion

    def forget(self, node_ids: Sequence[str]) -> int:
        """Remove nodes and the KV that no other node shares. Returns the bytes freed."""
        return self._nodes.forget(node_ids)

    def forget_all(self) -> int:
        """Remove this collection's nodes with their KV, and what is looked for in prompts. Bytes freed."""
        return self._nodes.forget_all()

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        """Returns at once; in the background the model is loaded if need be, and the chunks' KV is read ahead.

        For when it is known what will be asked about, and not yet what: chunks of the last retrieval, say.
        """

        def tokenized() -> Sequence[Chunk]:
            return self.tokenize(Prompt(chunks)).chunks

        self.runtime.chores.add(partial(self._nodes.prefetch, tokenized), ("prefetch", *chunks))

    # --- prompts

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """Any messages in the model's chat template; chunks may stand anywhere in them. Raises PromptError.

        tools: what the model may call, which it is shown. Raises UnsupportedModelError where it calls none.
        """
        if tools:
            assert self.call_format
        return chat(self.tokenizer, messages, tools)

    def chat_prompt(
        self,
        system: str | None,
        passages: Sequence[Chunk],
        question: str,
        history: Sequence[tuple[str, str]] = (),
    ) -> Prompt:
        """The model's chat template: passages first, the question last.

        system: None for the engine's own words, "" for none; history: (question, answer) pairs, oldest first.
        """
        return self.runtime.tokenizing.chat_prompt(system, list(passages), question, list(history))

    def tokenize(self, prompt: Prompt) -> Prompt:
        """The same prompt with token ids in every segment. Raises UnknownChunkError for a node never encoded here, and
        PromptTooLongError for text that cannot fit the window; passages of a library are as short as they were cut.
        """
        if prompt.is_tokenized:
            return prompt
        given = (each for each in prompt.segments if isinstance(each, Literal) or not each.entered)
        self.check_text(sum(len(each.text or "") for each in given if each.token_ids is None))
        return self.runtime.tokenizing.prompt(prompt, self._nodes.find(prompt.chunks))

    def prefill(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        seed: int = 0,
        cancel: threading.Event | None = None,
    ) -> Prefilled:
        """Read the prompt. ratio: a share, or `auto` for what loading hides, the default at least.

        Raises PromptTooLongError, UsageError, Cancelled, DeviceError.
        """
        request = self._request(prompt, method, ratio, seed)

        def work(_: OnText | None) -> Prefilled:
            with self.runtime.queue.turn(cancel) as turn:
                prefilled = prefill(self.runtime, request, turn)
                follow_up(self.runtime, request, prefilled)
                return prefilled

        return twice(self.runtime, work, None, cancel)

    def generate(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        cancel: threading.Event | None = None,
        on_text: OnText | None = None,
        session: Session | None = None,
        client: str = "",
        deadline: float = math.inf,
        **options: Any,
    ) -> Result:
        """Answer the prompt. options are those of `DecodeOptions`. Raises as `prefill` does.

        on_text is called with each piece of text as it comes; what it raises ends the answer. session: as in `stream`.
        client: the device's time is fair between them; deadline: of `time.monotonic`; past it nothing is begun.
        """
        chosen = DecodeOptions.of(options)
        given = prompt, method, ratio, chosen.seed, chosen.max_new_tokens
        request = replace(self._request(*given, cancel, deadline), session=session)
        return self._answer(request, chosen, on_text, cancel, client, deadline)

    def stream(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        session: Session | None = None,
        client: str = "",
        **options: Any,
    ) -> Stream:
        """Answer the prompt, piece by piece. Wrong arguments raise here, what goes wrong later in the iteration.

        session: what it holds of the prompt's beginning is not read again, and it holds this prompt and answer next.
        client: as in `generate`.
        """
        chosen = DecodeOptions.of(options)
        request = self._request(prompt, method, ratio, chosen.seed, chosen.max_new_tokens)
        return Stream(partial(self._answer, replace(request, session=session), chosen, client=client))

    def stream_staged(
        self,
        prompts: Iterable[Prompt],
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        session: Session | None = None,
        client: str = "",
        **options: Any,
    ) -> Stream:
        """Answer the last of the prompts, which come as retrieval finds more; until then the device reads ahead.

        For retrieval that takes as long as reading the prompt (RAGCache, §5.3). The answer is that of `stream` on the
        last one: what was read of another is dropped. prompts: iterated in the stream's thread. Raises as `stream`
        does, all of it in the iteration, and what `prompts` raises.
        """
        chosen = DecodeOptions.of(options)

        def work(on_text: OnText, cancel: threading.Event) -> Result:
            request: Request | None = None
            with Speculation(self.runtime, client) as speculation:
                for prompt in prompts:
                    if cancel.is_set():
                        raise Cancelled("the request was cancelled while passages were looked for")
                    given = prompt, method, ratio, chosen.seed, chosen.max_new_tokens
                    request = replace(self._request(*given, cancel), session=session)
                    speculation.offer(request)
                if request is None:
                    raise UsageError("no prompt came; yield one at least, the last one being answered")
                return self._answer(request, chosen, on_text, cancel, client, speculation=speculation)

        return Stream(work)

    def decode(self, prefilled: Prefilled, **options: Any) -> Result:
        """Answer a prompt that has been read; may be called again, each time from the prompt's end."""
        chosen = DecodeOptions.of(options)
        with self.runtime.queue.turn() as turn:
            return decode_answer(self.runtime, prefilled, chosen, turn)

    def continue_logits(self, prefilled: Prefilled, token_ids: Sequence[int]) -> Tensor:
        """(n, vocab) float32 logits that predict each of the tokens, given the prompt and the tokens before it."""
        with self.runtime.queue.turn():
            return continue_logits(self.runtime, prefilled, token_ids)

    def profile(self, progress: Progress | None = None) -> DeviceProfile:
        """Measure this model on this device, and keep that for the loading controller: `ratio="auto"` needs it."""
        with self.runtime.queue.turn():
            if not self.runtime.gate.passed:
                raise UsageError(f"{self.model_name} is not fused, so there is nothing to profile")
            self.runtime.keep_profile(measure(self.runtime, progress))
            assert self.runtime.profile is not None
            return self.runtime.profile

    @property
    def known_profile(self) -> DeviceProfile | None:
        """What `profile` measured, now or earlier; None before that."""
        return self.runtime.profile

    @property
    def measures_answers(self) -> bool:
        """Whether, since the last answer, it is being measured how answers of this model are computed fastest."""
        return self.runtime.gate.passed and self.runtime.choice.needs_measurement

    def finish_background(self, timeout_s: float | None = None) -> bool:
        """Wait until missing chunks have been encoded and all is measured; False if that took too long."""
        return self.runtime.chores.finish(timeout_s)

    def close(self) -> None:
        """End background work and free model and store, for all collections; the next use loads them again."""
        self.runtime.close()

    # --- inside

    def _answer(
        self,
        request: Request,
        options: DecodeOptions,
        on_text: OnText | None,
        cancel: threading.Event | None,
        client: str = "",
        deadline: float = math.inf,
        speculation: Speculation | None = None,
    ) -> Result:
        """Prefill, decode, and keep what was read for the request's session; ttft_ms is from the turn's begin.

        Others have the device between its layers and tokens; `claim_of` says who goes first.
        """

        def work(on_text: OnText | None) -> Result:
            read = None if speculation is None else speculation.settle(cancel)
            claim = claim_of(self.runtime, request, client, deadline)
            claim = claim if read is None else replace(claim, cached={}, new_tokens=1)
            with self.runtime.queue.turn(cancel, claim=claim) as turn:
                begun, answer = time.perf_counter(), tuple[int, ...]()
                prefilled = read or prefill(self.runtime, request, turn, answering=True)
                try:
                    result = decode_answer(self.runtime, prefilled, options, turn, on_text, cancel, begun)
                    answer = result.token_ids
                    return result
                finally:  # also of an answer that was stopped: its prompt has been read
                    follow_up(self.runtime, request, prefilled)
                    if request.session is not None and prefilled.cache is not None:
                        ids = (*request.prompt.token_ids, *answer)
                        request.session.keep(ids, prefilled.cache, self.runtime.decoder)
                        self.runtime.sessions.add(request.session)

        return twice(self.runtime, work, on_text, cancel)

    def _meet(self, cancel: threading.Event | None, deadline: float) -> None:
        """Find out what the model is, where that has to be asked elsewhere (`served.py`). Raises Cancelled."""

    def _request(
        self,
        prompt: Prompt,
        method: str | Policy,
        ratio: float | str,
        seed: int | None,
        new_tokens: int = 64,
        cancel: threading.Event | None = None,
        deadline: float = math.inf,
    ) -> Request:
        self._meet(cancel, deadline)
        policy = policy_named(method)
        share = None if ratio == "auto" else policy.check_ratio(ratio)
        tokenized = self.tokenize(prompt)
        if not tokenized.token_ids:
            raise UsageError("the prompt is empty; give it at least one token")
        self.runtime.check_length(len(tokenized.token_ids), "the prompt")
        return Request(tokenized, policy, share, self.config.collection, seed or 0, min(new_tokens, 256))
