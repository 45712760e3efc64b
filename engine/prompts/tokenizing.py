"""Tokenizes prompts by segment: control tokens count in literals, never in passages or verbatim literals."""

import copy
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ragblend.engine.prompts.chat import chat
from ragblend.engine.prompts.segments import Chunk, Literal, Message, Prompt, Segment, with_ids
from ragblend.engine.prompts.tools import rendered_answer
from ragblend.kvstore.errors import PromptError

if TYPE_CHECKING:
    from ragblend.engine.prompts.figure_rows import FigureFinder, FigureRows

SYSTEM_MESSAGE = (
    "You answer questions about the passages you are given. If they do not hold the answer, say so."
)
PASSAGES_HEADING = "Passages:\n\n"
# Not "Question: ...": small models then continue with questions of their own after the answer.
INSTRUCTION = "\n\nUsing only the passages above, answer in one or two short sentences: "
SEPARATOR = "\n\n"
_ANSWER = "ragblend_answer"
MAX_TOKEN_CHARACTERS = 128  # no model has longer tokens
LONG_CHARACTERS = 1 << 18  # longer texts take seconds and a hundred times their memory

# Token ids by collection (None: the engine's) and node id.
NodeIds = dict[tuple[str | None, str], tuple[int, ...]]


class PromptTokenizer:
    """Tokenizes prompts with a tokenizer of transformers, segment by segment."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._control_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        # A document that contains "<|im_end|>" must not end the user's turn: there it is plain text.
        self._plain = copy.deepcopy(tokenizer)
        self._plain.split_special_tokens = True
        if getattr(self._plain, "backend_tokenizer", None) is not None:
            self._plain.backend_tokenizer.encode_special_tokens = True

    def literal_ids(self, text: str) -> list[int]:
        """Ids of a literal; control tokens in it count as control tokens."""
        return _encode(self.tokenizer, text)

    def passage_ids(self, text: str) -> list[int]:
        """Ids of a passage; control tokens in it are plain text."""
        return _encode(self._plain, text)

    def controls(self, text: str) -> list[int]:
        """Ids of the control tokens in the text, read as a literal, in order."""
        return [i for i in self.literal_ids(text) if i in self._control_ids]

    def prompt(self, prompt: Prompt, node_ids: NodeIds) -> Prompt:
        """The prompt with ids in every segment. node_ids: of chunks that are given by node id only."""
        segments: list[Segment] = []
        for _, group in groupby(prompt.segments, key=_is_text):
            run = list(group)
            if len({isinstance(each, Literal) and each.verbatim for each in run if _is_text(each)}) > 1:
                segments.append(self._tokenize_jointly(run))
            else:
                segments += [with_ids(each, self._segment_ids(each, node_ids)) for each in run]
        bos = self._begin_ids(segments)
        return Prompt([Literal("", bos), *segments] if bos else segments)

    def figure_rows(self, prompt: Prompt) -> "FigureRows":
        """The figures and lines of a tokenized prompt; each segment begins a line."""
        return self._figure_finder(prompt.token_ids, prompt.offsets)

    @cached_property
    def _figure_finder(self) -> "FigureFinder":
        from ragblend.engine.prompts.figure_rows import FigureFinder  # needs torch; this module does not

        return FigureFinder(self.tokenizer)

    def _begin_ids(self, segments: list[Segment]) -> tuple[int, ...]:
        """The begin token, if the tokenizer adds one and the prompt lacks it."""
        bos = self.tokenizer.bos_token_id
        if bos is None or self.tokenizer("a", add_special_tokens=True)["input_ids"][:1] != [bos]:
            return ()
        first = next((ids[0] for s in segments if (ids := s.token_ids)), None)
        return () if first == bos else (bos,)

    def _segment_ids(self, segment: Segment, node_ids: NodeIds) -> tuple[int, ...]:
        if segment.token_ids is not None:
            return segment.token_ids
        if isinstance(segment, Literal):
            return tuple((self.passage_ids if segment.verbatim else self.literal_ids)(segment.text))
        if segment.text is not None:
            return tuple(self.passage_ids(segment.text))
        assert segment.node_id is not None
        return node_ids[segment.collection, segment.node_id]

    def _tokenize_jointly(self, run: list[Segment]) -> Literal:
        """Tokenize the template's and verbatim literals as one text, because a token may span two of them.

        If that yields control tokens that the template did not write, each is tokenized separately.
        """
        literals = [each for each in run if isinstance(each, Literal)]
        text = "".join(each.text for each in literals)
        ids = self.literal_ids(text)
        written = [i for each in literals if not each.verbatim for i in self.controls(each.text)]
        if [i for i in ids if i in self._control_ids] != written:
            ids = [i for each in literals for i in self._segment_ids(each, {})]
        return Literal(text, tuple(ids))

    def chat_prompt(
        self, system: str | None, passages: list[Chunk], question: str, history: list[tuple[str, str]]
    ) -> Prompt:
        """A chat prompt with passages first and the question last."""
        words = SYSTEM_MESSAGE if system is None else system
        messages = [Message("system", (Literal(words),))] if words else []
        for asked, answered in history:
            messages += [Message("user", (Literal(asked),)), Message("assistant", (Literal(answered),))]
        return chat(self.tokenizer, [*messages, Message("user", tuple(_asked(passages, question)))])

    def prefix_ids(self) -> tuple[int, ...]:
        """Ids of `chat_prompt` before the first passage, with a fixed date: the canonical encoding prefix.

        It is part of every chunk's key: with today's date, all stored KV would be unreachable after midnight.
        """
        asked = Message("user", tuple(_asked([Chunk(token_ids=())], "")))
        prompt = chat(
            self.tokenizer, [Message("system", (Literal(SYSTEM_MESSAGE),)), asked], has_fixed_date=True
        )
        return self.prompt(prompt, {}).prefix_ids

    def end_ids(self) -> list[int | None]:
        """Ids of the tokenizer's end token, if it has one, and of the one that the chat template writes after an
        answer.
        """
        _, _, after = rendered_answer(self.tokenizer, words=_ANSWER).partition(_ANSWER)
        return [self.tokenizer.eos_token_id, *self.controls(after)[:1]]


def _asked(passages: list[Chunk], question: str) -> list[Segment]:
    if not passages:
        return [Literal(question)]
    between = [part for passage in passages for part in (Literal(SEPARATOR), passage)]
    return [Literal(PASSAGES_HEADING), *between[1:], Literal(INSTRUCTION + question)]


def _is_text(segment: Segment) -> bool:
    return isinstance(segment, Literal) and segment.token_ids is None


def _encode(tokenizer: Any, text: str) -> list[int]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return list(tokenizer.encode(text, add_special_tokens=False))
    try:  # straight to the tokenizers library, which shares no state between threads
        return list(backend.encode(text, add_special_tokens=False).ids)
    except TypeError as error:
        raise PromptError(
            "tokenizing a text: it holds half of a surrogate pair, which is no character. Decode its bytes with "
            'errors="replace".'
        ) from error
