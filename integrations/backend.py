"""The backend of both frameworks' adapters: opens the engine, registers passages, and builds prompts from them."""

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ragblend.integrations.passages import (
    LEARNED_PREFIX,
    Passage,
    PassageRegistry,
    PassageSpan,
    learned_node_id,
    node_id_of,
)
from ragblend.integrations.resolve import Piece, segments, split_at_passages, split_at_spans
from ragblend.kvstore.errors import StoreError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from ragblend.engine.config import Report
    from ragblend.engine.interface import EngineInterface
    from ragblend.engine.prompts.segments import Message, Prompt, Segment, ToolCall
    from ragblend.engine.prompts.tools import Tool
    from ragblend.engine.results import Result

log = logging.getLogger("ragblend")
Progress = Callable[[int, int], None]
T = TypeVar("T")
SHORT_SYSTEM_CHARS = 1000  # a shorter system message never becomes a passage by recurring


@dataclass(frozen=True)
class ChatTurn:
    """One message of a conversation, as text and passages.

    role: `system`, `user`, `assistant`, `tool`, or another that the model's template knows. calls, call_id, name: as in
    the engine's `Message`.
    """

    role: str
    pieces: tuple[Piece, ...]
    calls: "tuple[ToolCall, ...]" = ()
    call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        return "".join(piece if isinstance(piece, str) else piece.text for piece in self.pieces)


def drop_empty_turns(turns: Sequence[ChatTurn]) -> list[ChatTurn]:
    """Drop an assistant's empty turns, which a template would print. Raises UsageError if no turn is given."""
    if not turns:
        raise UsageError("there is no message to answer: the list of messages is empty; give at least one")
    return [turn for turn in turns if turn.pieces or turn.calls or turn.role != "assistant"]


@dataclass(frozen=True)
class Backend:
    """One model and one collection of passages. Creating one loads nothing; equal backends share an engine per process.

    url: of the vLLM server that has the model; None to load it here.
    """

    model: str = "default"
    home: str | None = None
    collection: str = "default"
    device: str | None = None
    dtype: str | None = None
    url: str | None = None

    @cached_property
    def engine(self) -> "EngineInterface":
        from ragblend.engine.engine import Engine

        return Engine.open(
            self.model, self.home, self.device, self.dtype, collection=self.collection, url=self.url
        )

    @cached_property
    def registry(self) -> PassageRegistry:
        from ragblend.engine.config import resolve_home

        return PassageRegistry.open(resolve_home(self.home), self.collection)

    @property
    def supports_tools(self) -> bool:
        """Whether the model's chat template supports tools; reads the tokenizer, not the weights."""
        try:
            return bool(self.engine.call_format)
        except UnsupportedModelError:
            return False

    # --- passages

    def remember(
        self, passages: Sequence[Passage], encode: bool = False, progress: Progress | None = None
    ) -> None:
        """Register passages, so that their texts are found in prompts.

        encode: store their KV now instead of after first use. progress(done, total): called after each encoded passage.
        """
        self.registry.add(passages)
        if encode and passages:
            self.engine.encode([p.text for p in passages], [node_id_of(p) for p in passages], progress)

    def encode(self, passages: Sequence[Passage], show_progress: bool) -> int:
        """Register and encode passages, with a progress bar on stderr; returns their number.

        If it is interrupted, finished passages stay.
        """
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not show_progress) as bars:
            bar = bars.add_task("Encoding passages", total=len(passages))
            self.remember(passages, True, lambda done, _: bars.update(bar, completed=done))
        return len(passages)

    def forget(self, node_ids: Sequence[str]) -> int:
        """Unregister passages and delete their KV. Returns the bytes freed."""
        self.registry.remove(node_ids)
        return self.engine.forget(node_ids)

    def prefetch(self, passages: Sequence[Passage]) -> None:
        """Load the model and these passages' KV in the background; returns at once."""
        from ragblend.engine.prompts.segments import Chunk

        self.engine.prefetch([Chunk(p.text, p.node_id) for p in passages])

    # --- prompts

    def chat_prompt(
        self,
        turns: Sequence[ChatTurn],
        named: Sequence[Passage] = (),
        learn: bool = False,
        tools: "Sequence[Tool]" = (),
    ) -> "Prompt":
        """The turns in the model's chat template, with the passages in them as chunks.

        named: passages to look for besides the registered ones. learn: register text that recurs from an earlier
        prompt. tools: those that the model may call. Raises PromptError, PromptTooLongError, and UnsupportedModelError
        for tools and a model without tool support.
        """
        self.engine.check_text(sum(len(turn.text) for turn in turns))  # before it is searched
        found = [self._passages_in(turn, named) for turn in turns]
        if learn and turns:
            self._learn_from_turns(turns, found)
        messages = self._messages(turns, [segments(pieces) for pieces in found])
        return self.engine.tokenize(self.engine.chat(messages, tools))

    def _passages_in(self, turn: ChatTurn, named: Sequence[Passage]) -> list[Piece]:
        """Split a turn into text and passages. In a short system message, learned passages stay text."""
        found = split_at_passages(turn.pieces, self.registry, named)
        if turn.role != "system" or len(turn.text) >= SHORT_SYSTEM_CHARS:
            return list(found)
        return [
            piece.text
            if isinstance(piece, Passage) and (piece.node_id or "").startswith(LEARNED_PREFIX)
            else piece
            for piece in found
        ]

    def _learn_from_turns(self, turns: Sequence[ChatTurn], found: list[list[Piece]]) -> None:
        """Replace recurring text in `found` by passages, except in the assistant's answers, which every later prompt
        of the conversation repeats, and except text of short system messages.
        """
        numbers = [number for number, turn in enumerate(turns) if turn.role != "assistant"]
        system = [turn.text for turn in turns if turn.role == "system"]
        short_system = "\0".join(text for text in system if len(text) < SHORT_SYSTEM_CHARS)
        learned = self._learn(
            [found[number] for number in numbers],
            ends_with_question=turns[-1].role != "tool",
            is_allowed=lambda text: text not in short_system,
        )
        for number, pieces in zip(numbers, learned, strict=True):
            found[number] = pieces

    def _messages(self, turns: Sequence[ChatTurn], found: "Sequence[tuple[Segment, ...]]") -> "list[Message]":
        """The engine's messages. For a model without tool support, tool calls are left out, and so are messages that
        consist of nothing else.
        """
        from ragblend.engine.prompts.segments import Message

        shows_calls = any(turn.calls for turn in turns) and self.supports_tools
        return [
            Message(turn.role, text, turn.calls if shows_calls else (), turn.call_id, turn.name)
            for turn, text in zip(turns, found, strict=True)
            if text or shows_calls or not turn.calls
        ]

    def text_prompt(
        self, text: str, named: Sequence[Passage] = (), parts: Sequence[str] = (), learn: bool = False
    ) -> "Prompt":
        """The plain text as a prompt, with the passages in it as chunks; control tokens in it take effect.

        parts: the text as split by `split_at_placeholders`; then only control tokens of the template take effect.
        named, learn: as in `chat_prompt`.
        """
        from ragblend.engine.prompts.segments import Literal, Prompt

        controls = self.engine.control_tokens
        if not parts or controls(text) == [i for words in parts[::2] for i in controls(words)]:
            # No inserted value has control tokens. So take the text itself: the template may have altered the values.
            parts = [text]
        found = [list(split_at_passages([part], self.registry, named)) for part in parts]
        if learn:
            found = self._learn(found, ends_with_question=True, is_allowed=lambda words: not controls(words))
        prompt: list[Segment] = []
        for number, pieces in enumerate(found):
            is_template = number % 2 == 0
            for segment in segments(pieces):
                if is_template and isinstance(segment, Literal):
                    segment = replace(segment, verbatim=False)
                prompt.append(segment)
        return self.engine.tokenize(Prompt(prompt))

    def _learn(
        self, prompt: Sequence[Sequence[Piece]], ends_with_question: bool, is_allowed: Callable[[str], bool]
    ) -> list[list[Piece]]:
        """Turn text that recurs from earlier prompts, and that `is_allowed`, into registered passages."""
        texts = [piece for pieces in prompt for piece in pieces if isinstance(piece, str)]
        recurring = iter(self.registry.recurring.recall(texts, ends_with_question))
        learned: list[str] = []

        def split(piece: Piece) -> Iterable[Piece]:
            if not isinstance(piece, str):
                return [piece]
            found = [(start, stop, piece[start:stop]) for start, stop in next(recurring)]
            spans = [PassageSpan(a, b, learned_node_id(text)) for a, b, text in found if is_allowed(text)]
            learned.extend(piece[span.start : span.stop] for span in spans)
            return split_at_spans(piece, spans)

        result = [[part for piece in pieces for part in split(piece)] for pieces in prompt]
        if learned:
            try:
                if over_limit := self.registry.learn(learned):
                    self.forget(over_limit)
            except StoreError as error:
                log.warning("text that recurs in this prompt is not registered as a passage: %s", error)
        return result


def placeholders(count: int) -> list[str]:
    """Unique texts to render a template with, which show where it puts its variables."""
    return [f"\x00text {number}\x00" for number in range(count)]


def split_at_placeholders(filled: str, values: Sequence[T]) -> list[str | T]:
    """Split a template rendered with `placeholders`: its own text at even indices, the values at odd ones."""
    numbers = "|".join(map(str, range(len(values)))) or "(?!)"  # which matches nothing
    parts = re.split(f"\x00text ({numbers})\x00", filled)
    return [values[int(part)] if index % 2 else part for index, part in enumerate(parts)]


def usage(report: "Report") -> dict[str, int]:
    """Token counts by OpenAI's names, which both frameworks know."""
    prompt, completion = report.tokens.prompt, report.tokens.generated
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def logprobs(result: "Result", tokenizer: Any) -> list[dict[str, Any]] | None:
    """Each token's log-probability, as in OpenAI's interface; None if not requested.

    The end token and the tokens of a stop string are left out, because the text does not contain them. bytes: of a
    token that is only part of a character, too; None if the tokenizer does not tell them.
    """
    if result.logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = tokenizer.decode([token_id])
        return {
            "token": token,
            "logprob": logprob,
            "bytes": _bytes_of_part(tokenizer, token_id) if "\ufffd" in token else list(token.encode()),
        }

    ids = [each.token_id for each in result.logprobs]

    def has_whole_text(count: int) -> bool:
        text: str = tokenizer.decode(ids[:count], skip_special_tokens=True)
        return text.startswith(result.text)

    count = bisect_left(range(len(ids)), True, key=has_whole_text) if result.stopped else len(ids)
    return [
        entry(each.token_id, each.logprob) | {"top_logprobs": [entry(*pair) for pair in each.most_likely]}
        for each in result.logprobs[:count]
    ]


def _bytes_of_part(tokenizer: Any, token_id: int) -> list[int] | None:
    """The bytes of a token that is only part of a character; None if the vocabulary has neither bytes nor `<0x0A>`."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    text = str(tokenizer.convert_ids_to_tokens(token_id))
    if fallback := re.fullmatch("<0x([0-9A-F]{2})>", text):
        return [int(fallback[1], 16)]
    known = {character: byte for byte, character in bytes_to_unicode().items()}
    return [known[each] for each in text] if set(text) <= known.keys() else None


def kv_statistics(result: "Result") -> dict[str, Any]:
    """Reused tokens and times of this answer, as JSON. chunks: node ids, in the prompt's order."""
    report = result.report
    tokens, timings = report.tokens, report.timings
    counts = ("reused", "recomputed", "fresh", "missing", "not_loaded")
    times = ("ttft_ms", "prefill_ms", "load_ms", "stall_ms", "total_ms", "tokens_per_s")
    return {
        "method": report.method,
        "ratio": report.ratio,
        "recomputed_fraction": report.recomputed_fraction,
        **{name: getattr(tokens, name) for name in counts},
        "hits": report.hits,
        "misses": report.misses,
        "chunks": [chunk.node_id for chunk in result.prompt.chunks],
        **{name: round(getattr(timings, name), 2) for name in times},
        "warning": report.warning,
        "unsupported_figures": list(report.unsupported_figures),
        "read_again_at": report.read_again_at,
    }
