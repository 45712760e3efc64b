"""Builds the prompt of a conversation: earlier turns with their passages, then the new passages and the question.

A prompt only grows at its end, so the KV of one question is reused for the next: from the store, or from memory while
the conversation is recent (`engine/prompts/session.py`). If it does not fit, the oldest turns are left out,
enough of them to leave room for the next questions.
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
from ragblend.engine.prompts.tokenizing import PASSAGES_HEADING, SEPARATOR, SYSTEM_MESSAGE
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import Cancelled, PromptTooLongError

if TYPE_CHECKING:
    from ragblend.engine.interface import EngineInterface

CHAT_SYSTEM_MESSAGE = "You are a helpful assistant. If you do not know something, say so."
MORE_PASSAGES_HEADING = "More passages:\n\n"
ONLY_PASSAGES_INSTRUCTION = "Using only the passages above, answer in one or two short sentences:"
WITH_PASSAGES_INSTRUCTION = "Using the passages above where they help, answer:"
REFILL_SHARE = 0.6  # of the window that the prompt may fill after turns had to be left out


@dataclass(frozen=True)
class PastTurn:
    """An earlier question with its answer and its new passages. id: that of the question's message."""

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
    """A tokenized prompt that fits the window. sources: the passages in it that were found for this question.

    all_sources: all passages in it, with those of earlier questions; first_id: the id of the first question in it;
    notice: what had to be left out.
    """

    prompt: Prompt
    wording: PromptWording
    sources: tuple[AnswerSource, ...]
    all_sources: tuple[AnswerSource, ...]
    first_id: int
    notice: str | None


def wording_for(mode: str, system: str | None, has_passages: bool) -> PromptWording:
    """The wording for a mode: `documents` answers from passages only, `chat` with passages if there are any.

    system: replaces the default system message; "" for none.
    """
    if mode == "documents":
        return PromptWording(SYSTEM_MESSAGE if system is None else system, ONLY_PASSAGES_INSTRUCTION)
    default = SYSTEM_MESSAGE if has_passages else CHAT_SYSTEM_MESSAGE
    return PromptWording(default if system is None else system, WITH_PASSAGES_INSTRUCTION)


def past_turns(messages: Sequence[ChatMessage]) -> list[PastTurn]:
    """The questions that the model answered, oldest first, without those that failed or found nothing."""
    turns: dict[int, PastTurn] = {}
    for asked, answer in questions_with_answers(messages):
        if answer.text and not {"error", "found"} & answer.report.keys():
            turns.setdefault(asked.id, PastTurn(asked.id, asked.text, answer.text, new_sources(answer)))
    return [turns[key] for key in sorted(turns)]


def questions_with_answers(messages: Sequence[ChatMessage]) -> Iterator[tuple[ChatMessage, ChatMessage]]:
    """Each answer with its question: the one named in its report, as two may be asked at once, or else the last."""
    asked: dict[int, ChatMessage] = {}
    last = None
    for message in messages:
        if message.role == "user":
            asked[message.id] = last = message
        elif (question := asked.get(message.report.get("question", 0), last)) is not None:
            yield question, message


def new_sources(answer: ChatMessage) -> tuple[AnswerSource, ...]:
    """The passages that this answer's question added to the prompt, without deleted ones."""
    return tuple(s for s in answer.sources if not s.earlier and s.text != DELETED_TEXT)


def with_numbers(
    found: Sequence[AnswerSource], messages: Sequence[ChatMessage], turns: Sequence[PastTurn]
) -> list[AnswerSource]:
    """The passages with numbers: known passages keep theirs, new ones get the next numbers.

    `earlier` is set for a passage that is in the prompt already, with one of these turns.
    """
    numbers = _distinct_numbers(
        [*(each for message in reversed(messages) for each in message.sources), *found]
    )
    in_turns = {source.node_id for turn in turns for source in turn.sources}
    return [replace(s, number=numbers[s.node_id], earlier=s.node_id in in_turns) for s in found]


def _distinct_numbers(sources: Sequence[AnswerSource]) -> dict[str, int]:
    """A number for each passage: the next one if it has none, or if a passage before it has the same.

    Two have the same if they were found for two questions asked at once.
    """
    numbers, new = dict[str, int](), count(1 + max((source.number for source in sources), default=0))
    taken = {0}
    for source in sources:
        if source.node_id not in numbers:
            numbers[source.node_id] = next(new) if source.number in taken else source.number
            taken.add(source.number)
    return numbers


class _Draft(NamedTuple):
    """A prompt with some of the turns and passages, and its length in tokens."""

    prompt: Prompt
    sources: list[AnswerSource]
    tokens: int


def fit(
    engine: "EngineInterface",
    room_tokens: int,
    wording: PromptWording,
    messages: Sequence[ChatMessage],
    question: str,
    found: Sequence[AnswerSource],
    cancel: Cancel | None = None,
) -> PromptContext:
    """Build the longest prompt that fits. If it is too long, the oldest turns are left out, then the worst passages.

    room_tokens: the window without the answer's tokens. found: best first. Raises Cancelled, and PromptTooLongError if
    the question alone does not fit.
    """
    turns = past_turns(messages)
    # The first turn of the last prompt: turns that were left out once stay out.
    first_id = next((int(m.report["first_id"]) for m in reversed(messages) if "first_id" in m.report), 0)
    kept, best = [turn for turn in turns if turn.id >= first_id], list(found)

    def build_draft(oldest: int = 0) -> _Draft:
        """Build the prompt with the kept turns from this index on."""
        if cancel is not None and cancel.is_set():
            raise Cancelled("The question was cancelled.")
        sources = with_numbers(best, messages, kept[oldest:])
        try:
            prompt = build_prompt(engine, wording, kept[oldest:], question, sources)
        except PromptTooLongError:  # too long to be tokenized
            if not kept[oldest:]:
                raise
            return _Draft(Prompt(()), sources, sys.maxsize)
        return _Draft(prompt, sources, len(prompt.token_ids))

    draft = build_draft()
    if draft.tokens > room_tokens:
        # Bisect: a client may send thousands of turns, and the prompt is tokenized each time.
        refill_tokens = REFILL_SHARE * room_tokens
        oldest_kept = bisect_left(
            range(len(kept)), True, key=lambda oldest: build_draft(oldest).tokens <= refill_tokens
        )
        kept = kept[oldest_kept:]
        draft = build_draft()
    while draft.tokens > room_tokens:
        if not best:
            raise PromptTooLongError(_too_long_message(engine, draft.tokens, room_tokens))
        best = _without_lowest_ranked(best, draft, room_tokens)
        draft = build_draft()
    earlier = [source for turn in kept for source in turn.sources]
    all_sources = {
        source.node_id: source for source in [*with_numbers(earlier, messages, kept), *draft.sources]
    }
    first_id = kept[0].id if kept else (turns[-1].id + 1 if turns else 0)
    notice = _left_out_notice(len(turns) - len(kept), len(turns), len(found) - len(best), len(found))
    return PromptContext(
        draft.prompt, wording, tuple(draft.sources), tuple(all_sources.values()), first_id, notice
    )


def _without_lowest_ranked(
    best: Sequence[AnswerSource], draft: _Draft, room_tokens: int
) -> list[AnswerSource]:
    """Drop the last passages until the draft would fit, judging by the passages' lengths in it.

    Drafting again after each passage would tokenize a thousand passages a thousand times.
    """
    lengths = {chunk.node_id: len(chunk.token_ids or ()) for chunk in draft.prompt.chunks}
    kept, tokens = list(best), draft.tokens
    while kept and tokens > room_tokens:
        tokens -= lengths[kept.pop().node_id]
    return kept


def _too_long_message(engine: "EngineInterface", tokens: int, room_tokens: int) -> str:
    window = engine.context_window
    return (
        f"Asking: the question alone makes a prompt of {tokens} tokens; the window of {engine.model_name} is {window}, "
        f"of which {window - room_tokens} are kept for the answer. Shorten the question, or allow a shorter answer."
    )


def build_prompt(
    engine: "EngineInterface",
    wording: PromptWording,
    turns: Sequence[PastTurn],
    question: str,
    sources: Sequence[AnswerSource],
) -> Prompt:
    """The tokenized prompt. Each turn has its passages that are not in an earlier turn, with the best one last."""
    messages = [PromptMessage("system", (Literal(wording.system),))] if wording.system else []
    seen: set[str] = set()
    for turn in turns:
        messages.append(
            PromptMessage("user", tuple(_user_segments(wording, turn.question, turn.sources, seen)))
        )
        messages.append(PromptMessage("assistant", (Literal(turn.answer, verbatim=True),)))
    messages.append(PromptMessage("user", tuple(_user_segments(wording, question, sources, seen))))
    return engine.tokenize(engine.chat(messages))


def _user_segments(
    wording: PromptWording, question: str, sources: Sequence[AnswerSource], seen: set[str]
) -> list[Segment]:
    """A user's message. Its question is verbatim: it cannot end the turn, whatever it contains."""
    new = [source for source in sources if source.node_id not in seen]
    segments: list[Segment] = []
    for source in sorted(new, key=lambda source: -source.number):
        segments.append(
            Literal(SEPARATOR if segments else MORE_PASSAGES_HEADING if seen else PASSAGES_HEADING)
        )
        segments.append(Chunk(source.text, source.node_id, collection=source.collection, entered=True))
    if segments:
        segments.append(Literal(SEPARATOR))
    seen |= {source.node_id for source in new}
    if not seen:
        return [Literal(question, verbatim=True)]
    return [*segments, Literal(wording.closing), Literal(" " + question, verbatim=True)]


def _left_out_notice(turns: int, all_turns: int, passages: int, all_passages: int) -> str | None:
    parts = [f"the first {turns} of {all_turns} earlier questions"] if turns else []
    parts += [f"the {passages} lowest-ranked of {all_passages} passages"] if passages else []
    return f"The model's window is full. Left out: {', '.join(parts)}." if parts else None
