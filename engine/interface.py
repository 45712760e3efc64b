"""The interface of an engine: what the app and the integrations call, wherever the model runs.

`Engine` implements it with a model that is loaded in this process, and the client of a vLLM server
(`integrations/vllm/client.py`) with a model that a server has. Their docstrings say what each method does.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.model.gate import GateVerdict
from ragblend.engine.nodes import Progress
from ragblend.engine.prompts.segments import Chunk, Message, Prompt
from ragblend.engine.prompts.session import Session
from ragblend.engine.prompts.tools import CallFormat, Tool
from ragblend.engine.results import EncodeReport, Missing, OnText, Prefilled, Result, Stream
from ragblend.engine.scheduling.queue import Cancel, DeviceQueue
from ragblend.engine.selection import Policy
from ragblend.kvstore.store import KVStore


class EngineInterface(Protocol):
    """Encodes chunks, and answers prompts made of them. Safe for threads."""

    @property
    def model_name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def token_bytes(self) -> int: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def call_format(self) -> CallFormat: ...
    @property
    def context_window(self) -> int: ...
    @property
    def store(self) -> KVStore: ...
    @property
    def gate(self) -> GateVerdict: ...
    @property
    def needs_conversion(self) -> bool: ...
    @property
    def known_profile(self) -> DeviceProfile | None: ...
    @property
    def measures_answers(self) -> bool: ...
    @property
    def queues(self) -> tuple[DeviceQueue, ...]: ...

    def count_tokens(self, text: str) -> int: ...
    def check_text(self, characters: int) -> None: ...
    def control_tokens(self, text: str) -> list[int]: ...
    def encode(
        self,
        texts: Sequence[str],
        node_ids: Sequence[str] | None = None,
        progress: Progress | None = None,
        prefix: str | None = None,
    ) -> EncodeReport: ...
    def enter(self, texts: Sequence[str], node_ids: Sequence[str]) -> None: ...
    def missing(self, node_ids: Sequence[str]) -> Missing: ...
    def encode_nodes(self, node_ids: Sequence[str], cancel: Cancel | None = None) -> Iterator[int]: ...
    def forget(self, node_ids: Sequence[str]) -> int: ...
    def forget_all(self) -> int: ...
    def prefetch(self, chunks: Sequence[Chunk]) -> None: ...
    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt: ...
    def chat_prompt(
        self,
        system: str | None,
        passages: Sequence[Chunk],
        question: str,
        history: Sequence[tuple[str, str]] = (),
    ) -> Prompt: ...
    def tokenize(self, prompt: Prompt) -> Prompt: ...
    def prefill(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        seed: int = 0,
        cancel: Cancel | None = None,
    ) -> Prefilled: ...
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
    ) -> Result: ...
    def stream(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        session: Session | None = None,
        client: str = "",
        **options: Any,
    ) -> Stream: ...
    def stream_staged(
        self,
        prompts: Iterable[Prompt],
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        session: Session | None = None,
        client: str = "",
        **options: Any,
    ) -> Stream: ...
    def finish_background(self, timeout_s: float | None = None) -> bool: ...
    def close(self) -> None: ...
