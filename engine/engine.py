"""Engine: one model on one device, with the KV of the chunks it has read. Start here.

The main path: `generate` -> `Machine.answer` -> `Server.prefill` (look up, plan, load) -> `fused_prefill` (the layer
loop) -> policy.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ragblend.engine import nodes
from ragblend.engine.chat import chat
from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO, DecodeOptions, EngineConfig
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.decode import continue_logits
from ragblend.engine.gate import GateVerdict
from ragblend.engine.generation import finish
from ragblend.engine.home import resolve_home
from ragblend.engine.machine import Machine, Progress
from ragblend.engine.prompt import Chunk, Literal, Message, Prompt
from ragblend.engine.results import EncodeReport, Prefilled, Result, Stream
from ragblend.engine.selection import Policy, policy_named
from ragblend.engine.serving import Request
from ragblend.engine.session import Session
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.store import KVStore

_engines: dict[tuple[Machine, str], "Engine"] = {}
_opening = threading.Lock()


class Engine:
    """Encodes chunks, and answers prompts made of them. Safe for threads: requests queue before the device.

    Nothing is loaded before it is needed. Use `Engine.open`, which shares one engine per (model, home) in a process.
    """

    def __init__(self, config: EngineConfig, home: Path, machine: Machine) -> None:
        self.config, self.home = config, home
        self._machine = machine
        self._resources, self._queue = self._machine.resources, self._machine.queue

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
        usd_per_gb_month: Mapping[str, float] | None = None,
    ) -> "Engine":
        """The engine for that model, home and collection; the same object for the same arguments.

        model: `default` (the bundled SmolLM2), a hub id, a local folder or a `.gguf` file; home: where data lives
        (RAGBLEND_HOME, or the user's data folder); collection: a namespace; the others are those of `EngineConfig`.
        Engines of one model and home share its weights, its queue and its store, whatever their collections. Raises
        UsageError; a model's own errors come on first use.
        """
        budgets = store_budget_bytes, memory_budget_bytes, device_budget_bytes
        prices = tuple(sorted((usd_per_gb_month or {}).items()))
        config = EngineConfig(str(model), device, dtype, collection, *budgets, store_policy, kv_codec, prices)
        folder = resolve_home(home)
        with _opening:
            machine = Machine.shared(config, folder)
            if (machine, collection) not in _engines:
                _engines[machine, collection] = cls(config, folder, machine)
            return _engines[machine, collection]

    # --- what it is

    @property
    def model_name(self) -> str:
        return self._resources.model_name

    @property
    def device(self) -> str:
        return str(self._resources.device)

    @property
    def dtype(self) -> str:
        return self._resources.dtype

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; loading it does not load the weights."""
        return self._resources.tokenizing.tokenizer

    @property
    def context_window(self) -> int:
        """Tokens of prompt and answer together that the model was made for."""
        return self._resources.context_window

    @property
    def store(self) -> KVStore:
        return self._resources.store

    @property
    def gate(self) -> GateVerdict:
        """Whether this model's KV may be fused (loads the model)."""
        with self._queue.turn():
            return self._resources.gate

    def count_tokens(self, text: str) -> int:
        """Tokens of a passage."""
        return len(self._resources.tokenizing.passage_ids(text))

    @property
    def kv_codec(self) -> str:
        """How KV is packed that is stored from now on: a row of `kvstore.codec.CODECS`."""
        return self._resources.codec.name

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
        tokenizing = self._resources.tokenizing
        ids = [tuple(tokenizing.passage_ids(text)) for text in texts]
        behind = self._resources.canonical_prefix if prefix is None else tokenizing.begun([Literal(prefix)])
        for passage in ids:
            self._resources.check_length(len(behind) + len(passage), "a passage behind its prefix")
        if node_ids is not None:  # before there is any KV: whoever stops in between can still `forget` it
            keys = self._machine.keys_of(ids, behind, self.config.collection)
            nodes.enter(self._resources, self.config.collection, node_ids, ids, keys)
        keys, tokens, encoded = self._machine.encode(ids, behind, self.config.collection, progress)
        return EncodeReport(encoded, len(texts) - encoded, tokens, tuple(keys))

    def forget(self, node_ids: Sequence[str]) -> int:
        """Remove nodes and the KV that no other node shares. Returns the bytes freed."""
        return nodes.forget(self._resources, self.config.collection, node_ids)

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        """Returns at once; in the background the model is loaded if need be, and the chunks' KV is read ahead.

        For when it is known what will be asked about, and not yet what: chunks of the last retrieval, say.
        """
        self._machine.prefetch(
            lambda: [c.token_ids or () for c in self.tokenize(Prompt(chunks)).chunks], self.config.collection
        )

    # --- prompts

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """Any messages in the model's chat template; chunks may stand anywhere in them. Raises PromptError."""
        return chat(self.tokenizer, messages)

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
        return self._resources.tokenizing.chat_prompt(system, list(passages), question, list(history))

    def tokenize(self, prompt: Prompt) -> Prompt:
        """The same prompt with token ids in every segment. Raises UnknownChunkError for a node never encoded here."""
        if prompt.is_tokenized:
            return prompt
        found = nodes.find(self._resources, self.config.collection, prompt.chunks)
        return self._resources.tokenizing.prompt(prompt, found)

    def prefill(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        seed: int = 0,
        cancel: threading.Event | None = None,
    ) -> Prefilled:
        """Read the prompt. ratio: a share, or `auto` for what loading hides, the default at least.

        Raises PromptTooLongError, UsageError, Cancelled.
        """
        request = self._request(prompt, method, ratio, seed)
        with self._queue.turn(cancel):
            return self._machine.prefill(request, cancel)

    def generate(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        cancel: threading.Event | None = None,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Result:
        """Answer the prompt. options are those of `DecodeOptions`. Raises as `prefill` does.

        on_text is called with each piece of text as it comes; what it raises ends the answer.
        """
        request, chosen = self._generation(prompt, method, ratio, options)
        with self._queue.turn(cancel):
            return self._machine.answer(request, chosen, on_text, cancel)

    def stream(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        session: Session | None = None,
        **options: Any,
    ) -> Stream:
        """Answer the prompt, piece by piece. Wrong arguments raise here, what goes wrong later in the iteration.

        session: what it holds of the prompt's beginning is not read again, and it holds this prompt and answer next.
        """
        request, chosen = self._generation(prompt, method, ratio, options, session)

        def work(on_text: Callable[[str], None], cancel: threading.Event) -> Result:
            with self._queue.turn(cancel):
                return self._machine.answer(request, chosen, on_text, cancel)

        return Stream(work)

    def decode(self, prefilled: Prefilled, **options: Any) -> Result:
        """Answer a prompt that has been read; may be called again, each time from the prompt's end."""
        chosen = DecodeOptions.of(options)
        with self._queue.turn():
            return finish(self._resources, prefilled, chosen)

    def continue_logits(self, prefilled: Prefilled, token_ids: Sequence[int]) -> Tensor:
        """(n, vocab) float32 logits that predict each of the tokens, given the prompt and the tokens before it."""
        with self._queue.turn():
            return continue_logits(self._resources.loaded.model, prefilled, token_ids)

    def profile(self, progress: Progress | None = None) -> DeviceProfile:
        """Measure this model on this device, and keep that for the loading controller: `ratio="auto"` needs it."""
        return self._machine.measure(progress)

    @property
    def known_profile(self) -> DeviceProfile | None:
        """What `profile` measured, now or earlier; None before that."""
        return self._resources.profile

    def finish_background(self, timeout_s: float | None = None) -> bool:
        """Wait until the chunks that were missing have been encoded; False if that took too long."""
        return self._machine.chores.finish(timeout_s)

    def close(self) -> None:
        """End background work and free model and store, for all collections; the next use loads them again."""
        self._machine.close()

    # --- inside

    def _request(
        self,
        prompt: Prompt,
        method: str | Policy,
        ratio: float | str,
        seed: int,
        room: int = 64,
        session: Session | None = None,
    ) -> Request:
        policy = policy_named(method)
        share = None if ratio == "auto" else policy.checked(ratio)
        tokenized = self.tokenize(prompt)
        tokens = len(tokenized.token_ids)
        if tokens == 0:
            raise UsageError("the prompt is empty; give it at least one token")
        self._resources.check_length(tokens, "the prompt")
        return Request(tokenized, policy, share, self.config.collection, seed, room, session)

    def _generation(
        self,
        prompt: Prompt,
        method: str | Policy,
        ratio: float | str,
        options: dict[str, Any],
        session: Session | None = None,
    ) -> tuple[Request, DecodeOptions]:
        chosen = DecodeOptions.of(options)
        room = min(chosen.max_new_tokens, 256)
        request = self._request(prompt, method, ratio, chosen.seed or 0, room, session)
        return request, chosen
