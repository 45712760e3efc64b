"""Prompts as sequences of segments: literals and chunks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from ragblend.kvstore.errors import PromptError


@dataclass(frozen=True)
class Literal:
    """Text that is always computed fresh: instructions, separators, history, the question.

    verbatim: control tokens in it are plain text, as in passages; for text by users. In messages (`Engine.chat`) every
    literal is verbatim.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    verbatim: bool = False


@dataclass(frozen=True)
class Chunk:
    """A passage whose KV may be stored; given by its text, its node id, or its token ids.

    collection: that of its KV, by default the engine's. entered: its node was entered (`Engine.enter`); if the node has
    been deleted since, no KV is stored for it. whole: all token ids that were encoded together, if token_ids are only a
    part of them, from index `skipped` on.
    """

    text: str | None = None
    node_id: str | None = None
    token_ids: tuple[int, ...] | None = None
    collection: str | None = None
    entered: bool = False
    whole: tuple[int, ...] | None = None
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.text is None and self.node_id is None and self.token_ids is None:
            raise PromptError("a chunk needs a text, a node_id or token_ids")
        if (
            self.whole is not None
            and self.encoded_ids[self.skipped :][: len(self.token_ids or ())] != self.token_ids
        ):
            raise PromptError("a chunk's token_ids are not the part of `whole` from index `skipped` on")

    @property
    def encoded_ids(self) -> tuple[int, ...]:
        """The token ids that its KV is encoded from."""
        return self.whole or self.token_ids or ()


Segment = Literal | Chunk


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the assistant. id: the tool's answer refers to the call by it."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class Message:
    """One message of a chat, before the chat template is applied.

    role: `system`, `user`, `assistant`, `tool`, or another one that the template knows. calls: the tool calls of an
    assistant's message. call_id, name: in a tool's answer, the call that it answers, and the tool.
    """

    role: str
    segments: tuple[Segment, ...]
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A tuple of segments. Its token ids are the segments' ids, concatenated; text is never tokenized again."""

    segments: tuple[Segment, ...] = field(default=())

    def __init__(self, segments: Iterable[Segment]) -> None:
        object.__setattr__(self, "segments", tuple(segments))
        for segment in self.segments:
            if not isinstance(segment, Literal | Chunk):
                raise PromptError(f"a prompt is made of Literal and Chunk, not {type(segment).__name__}")

    @property
    def is_tokenized(self) -> bool:
        return all(segment.token_ids is not None for segment in self.segments)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """The sequence that every method runs on. Raises PromptError before `Engine.tokenize`."""
        return tuple(i for ids in self.segment_ids for i in ids)

    @property
    def segment_ids(self) -> list[tuple[int, ...]]:
        if not self.is_tokenized:
            raise PromptError(
                "this prompt has no token ids yet; pass it through engine.tokenize(prompt) first"
            )
        return [segment.token_ids or () for segment in self.segments]

    @property
    def offsets(self) -> list[int]:
        """Position of each segment's first token."""
        lengths = [len(ids) for ids in self.segment_ids]
        return [0, *accumulate(lengths)][: len(lengths)]

    @property
    def places(self) -> list[tuple[int, int]]:
        """(start, stop) of each chunk in the prompt's token ids."""
        starts = zip(self.segments, self.offsets, strict=True)
        return [(at, at + len(s.token_ids or ())) for s, at in starts if isinstance(s, Chunk)]

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Token ids before the first chunk; all if there is no chunk."""
        return self.token_ids[: self.places[0][0]] if self.chunks else self.token_ids

    @property
    def chunks(self) -> list[Chunk]:
        return [segment for segment in self.segments if isinstance(segment, Chunk)]


def with_ids(segment: Segment, token_ids: Sequence[int]) -> Segment:
    """The segment with these token ids."""
    ids = tuple(int(i) for i in token_ids)
    if isinstance(segment, Literal):
        return Literal(segment.text, ids, segment.verbatim)
    return replace(segment, token_ids=ids)
