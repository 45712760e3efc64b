"""Builds the prompt of a conversation: earlier turns with their passages, then the new passages and the question.

A prompt only grows at its end, so the KV of one question is reused for the next: from the store, or from memory while
the conversation is recent (`engine/prompts/session.py`). If it does not fit, the oldest turns are left out, enough of
them that this does not happen again with every question.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.chats import DELETED_TEXT, ChatMessage
from ragblend.engine.prompts.segments import Chunk, Literal, Prompt, Segment
from ragblend.engine.prompts.segments import Message as PromptMessage
from ragblend.engine.prompts.tokenizing import OPENING, SEPARATOR, SYSTEM
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import Cancelled, PromptTooLongError

if TYPE_CHECKING:
    from ragblend.engine.interface import EngineInterface

PLAIN_SYSTEM = "You are a helpful assistant. If you do not know something, say so."
MORE = "More passages:\n\n"
ONLY_PASSAGES = "Using only the passages above, answer in one or two short sentences:"
WITH_PASSAGES = "Using the passages above where they help, answer:"
REFILL_SHARE = 0.6  # of the window, after turns had to be left out


@dataclass(frozen=True)
class PastTurn:
    """An earlier question with its answer, and the passages that came with it. id: the question's message."""

    id: int
    question: str
    answer: str
    sources: tuple[AnswerSource, ...]


@dataclass(frozen=True)
class PromptWording:
    """system: the system message; closing: the instruction before the question."""

    system: str
    closing: str


@dataclass(frozen=True)
class PromptContext:
    """A tokenized prompt that fits the window. sources: the passages found for this question that are in it.

    all_sources: those, and the passages of earlier questions; first_id: the first question in it; notice: what had to
    be left out.
    """

    prompt: Prompt
    words: PromptWording
    sources: tuple[AnswerSource, ...]
    all_sources: tuple[AnswerSource, ...]
    first_id: int
    notice: str | None


def wording_for(mode: str, system: str | None, passages: bool) -> PromptWording:
    """mode `documents`: answer from the passages only; `chat`: with passages if there are any."""
    if mode == "documents":
        return PromptWording(SYSTEM if system is None else system, ONLY_PASSAGES)
    default = SYSTEM if passages else PLAIN_SYSTEM
    return PromptWording(default if system is None else system, WITH_PASSAGES)


def past_turns(messages: Sequence[ChatMessage]) -> list[PastTurn]:
    """Questions that the model answered, oldest first; those that failed or found nothing are left out."""
    turns: dict[int, PastTurn] = {}
    for asked, answer in answered(messages):
        if answer.text and not {"error", "found"} & answer.report.keys():
            turns.setdefault(asked.id, PastTurn(asked.id, asked.text, answer.text, new_sources(answer)))
    return [turns[key] for key in sorted(turns)]


def answered(messages: Sequence[ChatMessage]) -> Iterator[tuple[ChatMessage, ChatMessage]]:
    """Each answer with its question: the one that its report names, as two may be asked at once, or else the last."""
    asked: dict[int, ChatMessage] = {}
    last = None
    for message in messages:
        if message.role == "user":
            asked[message.id] = last = message
        elif (question := asked.get(message.report.get("question", 0), last)) is not None:
            yield question, message


def new_sources(answer: ChatMessage) -> tuple[AnswerSource, ...]:
    """The passages that came into the prompt with this answer's question, without deleted ones."""
    return tuple(s for s in answer.sources if not s.earlier and s.text != DELETED_TEXT)


def numbered(
    found: Sequence[AnswerSource], messages: Sequence[ChatMessage], turns: Sequence[PastTurn]
) -> list[AnswerSource]:
    """The passages with numbers: known ones keep theirs, new ones get the next.

    earlier is set if the passage is in the prompt already, with one of these turns.
    """
    known = {source.node_id: source.number for message in messages for source in message.sources}
    all_sources = {source.node_id for turn in turns for source in turn.sources}
    following = count(1 + max(known.values(), default=0))
    numbers = (known[s.node_id] if s.node_id in known else next(following) for s in found)
    pairs = zip(found, numbers, strict=True)
    return [replace(s, number=number, earlier=s.node_id in all_sources) for s, number in pairs]


class _Draft(NamedTuple):
    """A prompt with some of the turns and passages, and its length."""

    prompt: Prompt
    sources: list[AnswerSource]
    tokens: int


def fit(
    engine: "EngineInterface",
    room: int,
    words: PromptWording,
    messages: Sequence[ChatMessage],
    question: str,
    found: Sequence[AnswerSource],
    cancel: Cancel | None = None,
) -> PromptContext:
    """The most that fits: all turns since the last cut, fewer if need be, then fewer passages, the best ones kept.

    room: tokens of the window beside the answer. Raises Cancelled, and PromptTooLongError for too long a question.
    """
    turns = past_turns(messages)
    # The first turn of the last prompt: what was left out once stays out.
    first_id = next((int(m.report["first_id"]) for m in reversed(messages) if "first_id" in m.report), 0)
    kept, best = [turn for turn in turns if turn.id >= first_id], list(found)

    def draft(oldest: int = 0) -> _Draft:
        """With the kept turns from that one on."""
        if cancel is not None and cancel.is_set():
            raise Cancelled("The question was cancelled.")
        sources = numbered(best, messages, kept[oldest:])
        try:
            prompt = build(engine, words, kept[oldest:], question, sources)
        except PromptTooLongError:  # too long to be tokenized
            if not kept[oldest:]:
                raise
            return _Draft(Prompt(()), sources, sys.maxsize)
        return _Draft(prompt, sources, len(prompt.token_ids))

    made = draft()
    if made.tokens > room:
        # Bisect: a client may send thousands of turns, and the prompt is tokenized each time.
        least = REFILL_SHARE * room
        kept = kept[bisect_left(range(len(kept)), True, key=lambda oldest: draft(oldest).tokens <= least) :]
        made = draft()
    while made.tokens > room:
        if not best:
            raise PromptTooLongError(_too_long_question(engine, made.tokens, room))
        best = _without_worst(best, made, room)
        made = draft()
    all_sources = {s.number: replace(s, earlier=True) for turn in kept for s in turn.sources}
    all_sources |= {source.number: source for source in made.sources}
    first_id = kept[0].id if kept else (turns[-1].id + 1 if turns else 0)
    notice = _left_out_notice(len(turns) - len(kept), len(turns), len(found) - len(best), len(found))
    return PromptContext(
        made.prompt, words, tuple(made.sources), tuple(all_sources.values()), first_id, notice
    )


def _without_worst(best: Sequence[AnswerSource], made: _Draft, room: int) -> list[AnswerSource]:
    """The passages without as many of the last ones as the prompt is too long, by their lengths in it.

    This avoids tokenizing a thousand passages a thousand times.
    """
    lengths = {chunk.node_id: len(chunk.token_ids or ()) for chunk in made.prompt.chunks}
    left, tokens = list(best), made.tokens
    while left and tokens > room:
        tokens -= lengths[left.pop().node_id]
    return left


def _too_long_question(engine: "EngineInterface", tokens: int, room: int) -> str:
    window = engine.context_window
    return (
        f"Asking: the question alone makes a prompt of {tokens} tokens; the window of {engine.model_name} is {window}, "
        f"of which {window - room} are kept for the answer. Shorten the question, or allow a shorter answer."
    )


def build(
    engine: "EngineInterface",
    words: PromptWording,
    turns: Sequence[PastTurn],
    question: str,
    sources: Sequence[AnswerSource],
) -> Prompt:
    """The tokenized prompt. Each turn has its passages that are not in an earlier turn, the best one last."""
    messages = [PromptMessage("system", (Literal(words.system),))] if words.system else []
    seen: set[str] = set()
    for turn in turns:
        messages.append(
            PromptMessage("user", tuple(_user_segments(words, turn.question, turn.sources, seen)))
        )
        messages.append(PromptMessage("assistant", (Literal(turn.answer, verbatim=True),)))
    messages.append(PromptMessage("user", tuple(_user_segments(words, question, sources, seen))))
    return engine.tokenize(engine.chat(messages))


def _user_segments(
    words: PromptWording, question: str, sources: Sequence[AnswerSource], seen: set[str]
) -> list[Segment]:
    """A user's message. Its question is verbatim: it cannot end the turn, whatever it contains."""
    new = [source for source in sources if source.node_id not in seen]
    segments: list[Segment] = []
    for source in sorted(new, key=lambda source: -source.number):
        segments.append(Literal(SEPARATOR if segments else MORE if seen else OPENING))
        segments.append(Chunk(source.text, source.node_id, collection=source.collection, entered=True))
    if segments:
        segments.append(Literal(SEPARATOR))
    seen |= {source.node_id for source in new}
    if not seen:
        return [Literal(question, verbatim=True)]
    return [*segments, Literal(words.closing), Literal(" " + question, verbatim=True)]


def _left_out_notice(turns: int, all_turns: int, passages: int, all_passages: int) -> str | None:
    parts = [f"the first {turns} of {all_turns} earlier questions"] if turns else []
    parts += [f"the {passages} lowest-ranked of {all_passages} passages"] if passages else []
    return f"The model's window is full. Left out: {', '.join(parts)}." if parts else None
