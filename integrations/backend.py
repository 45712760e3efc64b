"""What both frameworks' adapters stand on: an engine, the passages it knows, and prompts with both."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ragblend.integrations.passages import Found, Passage, PassageRegistry, learnt_id, node_id_of
from ragblend.integrations.resolve import Piece, cut, found_in, segments
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
INSTRUCTIONS = 1000  # characters; of a system message below that nothing is a passage because it came back


@dataclass(frozen=True)
class Turn:
    """One message; role: `system`, `user`, `assistant`, `tool`, or what else the model's template knows.

    calls, call_id and name: as in the engine's `Message`.
    """

    role: str
    pieces: tuple[Piece, ...]
    calls: "tuple[ToolCall, ...]" = ()
    call_id: str | None = None
    name: str | None = None


def checked_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Without an assistant's empty ones, which a template would print. Raises UsageError where there is none at all."""
    if not turns:
        raise UsageError("there is no message to answer: the list of messages is empty; give at least one")
    return [turn for turn in turns if turn.pieces or turn.calls or turn.role != "assistant"]


@dataclass(frozen=True)
class Backend:
    """One model and one collection of passages. Making one loads nothing; equal ones share an engine in a process.

    url: of the vLLM server that has the model; None: it is loaded here.
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

    # --- passages

    def remember(
        self, passages: Sequence[Passage], encode: bool = False, progress: Progress | None = None
    ) -> None:
        """Have these texts found in prompts from now on; encode: store their KV now, not after their first use.

        progress(done, total) is called after each that was encoded.
        """
        self.registry.add(passages)
        if encode and passages:
            self.engine.encode([p.text for p in passages], [node_id_of(p) for p in passages], progress)

    def encode(self, passages: Sequence[Passage], show_progress: bool) -> int:
        """The same with a bar on stderr; how many passages there are. May be interrupted: what is done stays."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not show_progress) as bars:
            bar = bars.add_task("Encoding passages", total=len(passages))
            self.remember(passages, True, lambda done, _: bars.update(bar, completed=done))
        return len(passages)

    def forget(self, node_ids: Sequence[str]) -> int:
        """Find them in no prompt any more, and remove their KV. Returns the bytes freed."""
        self.registry.remove(node_ids)
        return self.engine.forget(node_ids)

    def prefetch(self, passages: Sequence[Passage]) -> None:
        """Returns at once; loads the model if need be and has these passages' KV read, in the background."""
        from ragblend.engine.prompts.segments import Chunk

        self.engine.prefetch([Chunk(p.text, p.node_id) for p in passages])

    # --- prompts

    def chat_prompt(
        self,
        turns: Sequence[Turn],
        named: Sequence[Passage] = (),
        learn: bool = False,
        tools: "Sequence[Tool]" = (),
    ) -> "Prompt":
        """The turns in the model's chat template, with the chunks that were found in them. Raises PromptError, and
        PromptTooLongError.

        tools: that the model is shown; raises UnsupportedModelError where it calls none.
        learn: what comes back from an earlier prompt that was learnt from is a passage from now on.
        """
        self.engine.check_text(sum(len(_text_of(turn)) for turn in turns))  # before it is looked through
        found = [list(found_in(turn.pieces, self.registry, named)) for turn in turns]
        if learn and turns:  # what the model said before comes back with every question, and is no passage
            others = [number for number, turn in enumerate(turns) if turn.role != "assistant"]
            said = [_text_of(turn) for turn in turns if turn.role == "system"]
            orders = "\0".join(text for text in said if len(text) < INSTRUCTIONS)
            learnt = self._learn(
                [found[number] for number in others],
                turns[-1].role != "tool",
                lambda words: words not in orders,
            )
            found = [learnt.pop(0) if number in others else pieces for number, pieces in enumerate(found)]
        messages = self._messages(turns, [segments(pieces) for pieces in found])
        return self.engine.tokenize(self.engine.chat(messages, tools))

    def _messages(self, turns: Sequence[Turn], found: "Sequence[tuple[Segment, ...]]") -> "list[Message]":
        """To a model without tools calls are not shown, and a message that holds nothing else is left out."""
        from ragblend.engine.prompts.segments import Message

        called = any(turn.calls for turn in turns)
        shows = called and self.calls_tools
        return [
            Message(turn.role, said, turn.calls if shows else (), turn.call_id, turn.name)
            for turn, said in zip(turns, found, strict=True)
            if said or shows or not turn.calls
        ]

    @property
    def calls_tools(self) -> bool:
        """Whether the model's chat template has tools; reads the tokenizer, not the weights."""
        try:
            return bool(self.engine.call_format)
        except UnsupportedModelError:
            return False

    def text_prompt(
        self, text: str, named: Sequence[Passage] = (), parts: Sequence[str] = (), learn: bool = False
    ) -> "Prompt":
        """The text as it is, with the chunks that were found in it; it is trusted, so its control tokens count.

        parts: the same as `parts_of` has it; where that is known, only the control tokens of the template count.
        learn: as in `chat_prompt`.
        """
        from ragblend.engine.prompts.segments import Prompt

        controls = self.engine.control_tokens
        if not parts or controls(text) == [i for words in parts[::2] for i in controls(words)]:
            parts = [text]  # a template may have done more with what it was given than to put it somewhere
        found = [list(found_in([part], self.registry, named)) for part in parts]
        if learn:
            found = self._learn(found, True, lambda words: not controls(words))
        said: list[Segment] = []
        for number, pieces in enumerate(found):
            made = segments(pieces)
            said += made if number % 2 else [_trusted(segment) for segment in made]
        return self.engine.tokenize(Prompt(said))

    def _learn(
        self,
        prompt: Sequence[Sequence[Piece]],
        is_asking: bool,
        may: Callable[[str], bool] = lambda _: True,
    ) -> list[list[Piece]]:
        """The same with what came back from earlier prompts as passages, registered; `may` says what can be one."""
        texts = [piece for pieces in prompt for piece in pieces if isinstance(piece, str)]
        places = iter(self.registry.recurring.recall(texts, is_asking))
        came: list[str] = []

        def parts(piece: Piece) -> Iterable[Piece]:
            if not isinstance(piece, str):
                return [piece]
            found = [place for place in next(places) if may(piece[slice(*place)])]
            came.extend(piece[slice(*place)] for place in found)
            return cut(piece, [Found(*place, learnt_id(piece[slice(*place)])) for place in found])

        result = [[part for piece in pieces for part in parts(piece)] for pieces in prompt]
        if came:
            try:
                if too_many := self.registry.learn(came):
                    self.forget(too_many)
            except StoreError as error:
                log.warning("what came back in this prompt is not kept for the next: %s", error)
        return result


def marks(count: int) -> list[str]:
    """What stands in a template for texts, until it has been filled in; nothing that people write."""
    return [f"\x00text {number}\x00" for number in range(count)]


def parts_of(marked: str, texts: Sequence[T]) -> list[str | T]:
    """A template that was filled in with `marks`, in parts: its own words at even places, of the texts at odd ones."""
    known = "|".join(map(str, range(len(texts)))) or "(?!)"
    parts = re.split(f"\x00text ({known})\x00", marked)
    return [texts[int(part)] if number % 2 else part for number, part in enumerate(parts)]


def _text_of(turn: Turn) -> str:
    return "".join(piece if isinstance(piece, str) else piece.text for piece in turn.pieces)


def _trusted(segment: "Segment") -> "Segment":
    from ragblend.engine.prompts.segments import Literal

    return replace(segment, verbatim=False) if isinstance(segment, Literal) else segment


def usage(report: "Report") -> dict[str, int]:
    """Token counts by the names that both frameworks know from OpenAI's interface."""
    prompt, completion = report.tokens.prompt, report.tokens.generated
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def logprobs(result: "Result", tokenizer: Any) -> list[dict[str, Any]] | None:
    """Of every token, in the form of OpenAI's interface; None where nobody asked. The end token is left out.

    bytes: None for a token that is part of a character.
    """
    if result.logprobs is None:
        return None

    def said(token_id: int, logprob: float) -> dict[str, Any]:
        token = tokenizer.decode([token_id])
        return {
            "token": token,
            "logprob": logprob,
            "bytes": None if "\ufffd" in token else list(token.encode()),
        }

    return [
        said(each.token_id, each.logprob) | {"top_logprobs": [said(*likely) for likely in each.most_likely]}
        for each in result.logprobs
    ]


def kv_statistics(result: "Result") -> dict[str, Any]:
    """What was reused for this answer, and what that took; fit for JSON. chunks: node ids, in the prompt's order."""
    report = result.report
    tokens, timings = report.tokens, report.timings
    counted = ("reused", "recomputed", "fresh", "missing")
    timed = ("ttft_ms", "prefill_ms", "load_ms", "stall_ms", "total_ms", "tokens_per_s")
    return {
        "method": report.method,
        "ratio": report.ratio,
        "recomputed_fraction": report.recomputed_fraction,
        **{name: getattr(tokens, name) for name in counted},
        "hits": report.hits,
        "misses": report.misses,
        "chunks": [chunk.node_id for chunk in result.prompt.chunks],
        **{name: round(getattr(timings, name), 2) for name in timed},
        "warning": report.warning,
        "unsupported_figures": list(report.unsupported_figures),
        "read_again_at": report.read_again_at,
    }
