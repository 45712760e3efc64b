"""The engine's interface for the app and the integrations, wherever the model runs.

It handles text, tokens, nodes, their KV on disk and requests. Two subclasses compute prompts: `Engine`, with a model
loaded in this process, and the client of a vLLM server (`integrations/vllm/client.py`).
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO, DecodeOptions, EngineConfig
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.model.gate import GateVerdict
from ragblend.engine.nodes import NodeEncoder, Progress
from ragblend.engine.prompts.chat import chat
from ragblend.engine.prompts.segments import Chunk, Literal, Message, Prompt
from ragblend.engine.prompts.session import Session
from ragblend.engine.prompts.tools import CallFormat, Tool
from ragblend.engine.request import Request
from ragblend.engine.results import EncodeReport, Missing, OnText, Prefilled, Result, Stream
from ragblend.engine.runtime_base import RuntimeBase
from ragblend.engine.scheduling.queue import Cancel, DeviceQueue
from ragblend.engine.selection import Policy, policy_named
from ragblend.kvstore.errors import Cancelled, UsageError
from ragblend.kvstore.store import KVStore

_engines: dict[tuple[RuntimeBase, str], Any] = {}
_engines_lock = threading.Lock()
MAX_ROOM_TOKENS = 256  # answer tokens for which memory is reserved at prefill; it grows later
NO_PROMPT = "there is no prompt to answer: `prompts` must yield at least one"


class EngineInterface(ABC):
    """Encodes chunks, and answers prompts made of them. Safe for threads.

    Nothing is loaded before it is needed. runtime: shared with the engines of other collections.
    """

    runtime_type: ClassVar[type[RuntimeBase]]
    runtime: RuntimeBase
    _nodes: NodeEncoder

    def __init__(self, config: EngineConfig, runtime: RuntimeBase) -> None:
        self.config, self.home, self.runtime = config, runtime.home, runtime

    @classmethod
    def shared(cls, config: EngineConfig, home: Path) -> Self:
        """The process's engine for that model, home and collection."""
        with _engines_lock:
            runtime = cls.runtime_type.shared(config, home)
            key = runtime, config.collection
            if key not in _engines:
                _engines[key] = cls(config, runtime)
            found: Self = _engines[key]
            return found

    # --- the model

    @property
    def model_name(self) -> str:
        return self.runtime.model_name

    @property
    @abstractmethod
    def device(self) -> str:
        """Where the model is."""

    @property
    @abstractmethod
    def dtype(self) -> str: ...

    @property
    @abstractmethod
    def token_bytes(self) -> int:
        """Bytes of one token's KV on the disk. Raises UnsupportedModelError if KV cannot be stored."""

    @property
    @abstractmethod
    def queues(self) -> tuple[DeviceQueue, ...]:
        """The queues for the devices of this process, for a watchdog."""

    @property
    @abstractmethod
    def needs_measurement(self) -> bool:
        """Whether a background measurement of decode implementations is due."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; loading it does not load the weights."""
        return self.runtime.tokenizing.tokenizer

    @property
    def call_format(self) -> CallFormat:
        """How this model calls tools. Raises UnsupportedModelError, with the reason, if it calls none."""
        return self.runtime.call_format

    @property
    def context_window(self) -> int:
        """The model's limit of tokens, prompt and answer together."""
        return self.runtime.context_window

    @property
    def store(self) -> KVStore:
        return self.runtime.store

    @property
    def kv_codec(self) -> str:
        """The encoding of new KV: a key of `kvstore.codec.CODECS`."""
        return self.runtime.codec.name

    @property
    def gate(self) -> GateVerdict:
        """Whether this model's KV may be fused."""
        return self.runtime.gate_verdict()

    @property
    def needs_conversion(self) -> bool:
        """Whether the first use of the model converts it, which takes a minute."""
        return self.runtime.needs_conversion

    @property
    def known_profile(self) -> DeviceProfile | None:
        """The measured profile of the model on this device; None if there is none."""
        return self.runtime.profile

    # --- chunks

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a passage."""
        return len(self.runtime.tokenizing.passage_ids(text))

    def check_text(self, characters: int) -> None:
        """Raises PromptTooLongError for a text so long that it cannot fit the window, without tokenizing it."""
        self.runtime.check_text(characters)

    def control_tokens(self, text: str) -> list[int]:
        """Ids of the control tokens that the text would be tokenized to, in order.

        Raises PromptTooLongError.
        """
        self.check_text(len(text))
        return self.runtime.tokenizing.control_ids(text)

    def encode(
        self,
        texts: Sequence[str],
        node_ids: Sequence[str] | None = None,
        progress: Progress | None = None,
        prefix: str | None = None,
    ) -> EncodeReport:
        """Encode and store each passage after the canonical prefix, or after the given one; stored ones are skipped.

        node_ids: a name for each text, for `Chunk(node_id=...)`; progress(done, total) is called after each chunk. If
        it is interrupted, finished chunks stay. Raises StoreFullError.
        """
        if node_ids is not None and len(node_ids) != len(texts):
            raise UsageError(f"got {len(texts)} texts and {len(node_ids)} node ids; each text needs one")
        tokenizing = self.runtime.tokenizing
        ids = [tuple(tokenizing.passage_ids(text)) for text in texts]
        before = self.runtime.canonical_prefix
        if prefix is not None:
            before = tokenizing.tokenize(Prompt([Literal(prefix)]), {}).token_ids
        for passage in ids:
            self.runtime.check_length(len(before) + len(passage), "a passage with its prefix")
        keys = self._nodes.keys_of(ids, before)
        if node_ids is not None:  # first, so that `forget` finds the nodes even after an interruption
            self._nodes.enter(node_ids, ids, keys)
        tokens, encoded = self._nodes.encode(ids, keys, before, progress, node_ids)
        return EncodeReport(encoded, len(texts) - encoded, tokens, tuple(keys))

    def enter(self, texts: Sequence[str], node_ids: Sequence[str]) -> None:
        """Enter passages under node ids, for prompts and `encode_nodes`. Needs only the tokenizer."""
        ids = [tuple(self.runtime.tokenizing.passage_ids(text)) for text in texts]
        self._nodes.enter(node_ids, ids, [None] * len(ids))

    def missing(self, node_ids: Sequence[str]) -> Missing:
        """The nodes without KV. Loads no weights, but converts a GGUF."""
        return self._nodes.missing(node_ids)

    def encode_nodes(self, node_ids: Sequence[str], cancel: Cancel | None = None) -> Iterator[int]:
        """Encode entered nodes while no question needs the model; yields the number of tokens encoded for each, 0 for
        nodes that were deleted or have KV.

        Nothing is evicted: it ends when the budget is used up. Raises Cancelled between two layers, and StoreFullError.
        """
        return self._nodes.encode_missing(node_ids, cancel)

    def forget(self, node_ids: Sequence[str]) -> int:
        """Delete nodes and the KV that no other node shares. Returns the bytes freed."""
        return self._nodes.forget(node_ids)

    def hide(self, node_ids: Sequence[str]) -> None:
        """Treat nodes as deleted, in the shared store too, but keep their KV here until `unhide` or `forget`."""
        self._nodes.hide(node_ids)

    def unhide(self, node_ids: Sequence[str]) -> None:
        """Use hidden nodes and their KV again, and offer it to the shared store."""
        self._nodes.unhide(node_ids)

    def forget_all(self) -> int:
        """Delete this collection's nodes, their KV, and its registered texts. Returns the bytes freed."""
        return self._nodes.forget_all()

    # --- prompts

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """A prompt from messages by the model's chat template; chunks may be anywhere in them. Raises PromptError.

        tools: shown to the model, which may call them. Raises UnsupportedModelError if it does not support tools.
        """
        if tools:
            _ = self.call_format  # raises if the model calls no tools
        return chat(self.tokenizer, messages, tools)

    def chat_prompt(
        self,
        system: str | None,
        passages: Sequence[Chunk],
        question: str,
        history: Sequence[tuple[str, str]] = (),
    ) -> Prompt:
        """A prompt by the model's chat template: passages first, the question last.

        system: None for the default text, "" for none; history: (question, answer) pairs, oldest first.
        """
        return self.runtime.tokenizing.chat_prompt(system, list(passages), question, list(history))

    def tokenize(self, prompt: Prompt) -> Prompt:
        """The same prompt with token ids in every segment. Raises UnknownChunkError for a node never encoded here, and
        PromptTooLongError for text that cannot fit the window.
        """
        if prompt.is_tokenized:
            return prompt
        given = (each for each in prompt.segments if isinstance(each, Literal) or not each.entered)
        self.check_text(sum(len(each.text or "") for each in given if each.token_ids is None))
        return self.runtime.tokenizing.tokenize(prompt, self._nodes.token_ids_of(prompt.chunks))

    # --- answers

    @abstractmethod
    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        """Load the model, and the chunks' KV, in the background.

        Call it as soon as the chunks of the next prompt are known.
        """

    @abstractmethod
    def prefill(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        seed: int = 0,
        cancel: Cancel | None = None,
    ) -> Prefilled:
        """Prefill the prompt. ratio: a share, or `auto` for what loading hides, but at least the default.

        Raises PromptTooLongError, UsageError, Cancelled, DeviceError.
        """

    def generate(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        cancel: Cancel | None = None,
        on_text: OnText | None = None,
        session: Session | None = None,
        client: str = "",
        deadline: float = math.inf,
        **options: Any,
    ) -> Result:
        """Answer the prompt. options are those of `DecodeOptions`. Raises as `prefill` does.

        on_text is called with each piece of text; an error that it raises ends the answer. session: as in `stream`.
        client: clients share the device's time fairly; deadline: by `time.monotonic`; an answer that has not begun by
        then is cancelled.
        """
        chosen = DecodeOptions.of(options)
        request = self._request(prompt, method, ratio, chosen, session, client, deadline, cancel)
        return self._answer_function(request, chosen)(on_text, cancel)

    def stream(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        session: Session | None = None,
        client: str = "",
        **options: Any,
    ) -> Stream:
        """Answer the prompt, piece by piece. Wrong arguments raise here, later errors in the iteration.

        session: its context is reused if the prompt begins with it, and then replaced by this prompt and answer.
        client: as in `generate`.
        """
        chosen = DecodeOptions.of(options)
        request = self._request(prompt, method, ratio, chosen, session, client)
        return Stream(self._answer_function(request, chosen))

    def stream_staged(
        self,
        prompts: Iterable[Prompt],
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        session: Session | None = None,
        client: str = "",
        **options: Any,
    ) -> Stream:
        """Answer the last of several prompts that retrieval yields in stages; earlier ones may be prefilled ahead.

        For retrieval that takes as long as the prefill (RAGCache, §5.3). The answer is that of `stream` on the last
        prompt. prompts: iterated in the stream's thread. Raises as `stream` does, but only in the iteration, and
        whatever `prompts` raises.
        """
        chosen = DecodeOptions.of(options)

        def answer(on_text: OnText, cancel: Cancel) -> Result:
            def requests() -> Iterator[Request]:
                for prompt in prompts:
                    if cancel.is_set():
                        raise Cancelled("the request was cancelled while passages were looked for")
                    yield self._request(prompt, method, ratio, chosen, session, client, cancel=cancel)

            return self._answer_last(requests(), chosen, on_text, cancel)

        return Stream(answer)

    def finish_background(self, timeout_s: float | None = None) -> bool:
        """Wait for background encoding and measurements; False if that took too long."""
        return self.runtime.background.finish(timeout_s)

    def close(self) -> None:
        """Stop background work and free model and store, for all collections; the next use loads them again."""
        self.runtime.close()

    @abstractmethod
    def _answer_function(
        self, request: Request, options: DecodeOptions
    ) -> Callable[[OnText | None, Cancel | None], Result]:
        """A function of (on_text, cancel) that computes the answer."""

    @abstractmethod
    def _answer_last(
        self, requests: Iterator[Request], options: DecodeOptions, on_text: OnText, cancel: Cancel
    ) -> Result:
        """The answer to the last request. Raises UsageError if there is none."""

    @abstractmethod
    def _connect(self, cancel: Cancel | None, deadline: float) -> None:
        """Query the server, if the engine is a client. Raises Cancelled after the deadline (by `time.monotonic`)."""

    def _request(
        self,
        prompt: Prompt,
        method: str | Policy,
        ratio: float | str,
        options: DecodeOptions,
        session: Session | None = None,
        client: str = "",
        deadline: float = math.inf,
        cancel: Cancel | None = None,
    ) -> Request:
        self._connect(cancel, deadline)
        policy = policy_named(method)
        share = None if ratio == "auto" else policy.check_ratio(ratio)
        tokenized = self.tokenize(prompt)
        if not tokenized.token_ids:
            raise UsageError("the prompt is empty; give it at least one token")
        self.runtime.check_length(len(tokenized.token_ids), "the prompt")
        if policy.name != "full":
            self._nodes.enter_named(tokenized.chunks)
        seed, room_tokens = options.seed or 0, min(options.max_new_tokens, MAX_ROOM_TOKENS)
        given = self.config.collection, seed, room_tokens, session, client, deadline
        return Request(tokenized, policy, share, *given)
