"""Tokenizes prompts by segment: control tokens count in literals, never in passages or verbatim literals."""

import copy
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ragblend.engine.prompts.chat import chat
from ragblend.engine.prompts.segments import Chunk, Literal, Message, Prompt, Segment, with_ids
from ragblend.engine.prompts.tools import rendered_conversation
from ragblend.kvstore.errors import PromptError

if TYPE_CHECKING:
    from ragblend.engine.prompts.figure_rows import FigureFinder, FigureRows

SYSTEM_MESSAGE = (
    "You answer questions about the passages you are given. If they do not hold the answer, say so."
)
PASSAGES_HEADING = "Passages:\n\n"
# No "Question: ..." follows: after it, small models continue with questions of their own.
INSTRUCTION = "\n\nUsing only the passages above, answer in one or two short sentences: "
SEPARATOR = "\n\n"
_PLACEHOLDER = "ragblend_answer"
MAX_TOKEN_CHARACTERS = 128  # no model has longer tokens
LONG_CHARACTERS = 1 << 18  # longer texts take seconds to tokenize, and a hundred times their own memory

# Token ids by collection (None: the engine's) and node id.
NodeTokenIds = dict[tuple[str | None, str], tuple[int, ...]]


class PromptTokenizer:
    """Tokenizes prompts with a tokenizer of transformers, segment by segment."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._control_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        # A document that contains "<|im_end|>" must not end the user's turn, so in passages it is plain text.
        self._plain_tokenizer = copy.deepcopy(tokenizer)
        self._plain_tokenizer.split_special_tokens = True
        if getattr(self._plain_tokenizer, "backend_tokenizer", None) is not None:
            self._plain_tokenizer.backend_tokenizer.encode_special_tokens = True

    def literal_ids(self, text: str) -> list[int]:
        """Ids of a literal; control tokens in it count as control tokens."""
        return _encode(self.tokenizer, text)

    def passage_ids(self, text: str) -> list[int]:
        """Ids of a passage; control tokens in it are plain text."""
        return _encode(self._plain_tokenizer, text)

    def control_ids(self, text: str) -> list[int]:
        """Ids of the control tokens in the text, read as a literal, in order."""
        return [i for i in self.literal_ids(text) if i in self._control_ids]

    def tokenize(self, prompt: Prompt, node_token_ids: NodeTokenIds) -> Prompt:
        """The prompt with token ids in every segment. node_token_ids: for chunks that have only a node id."""
        segments: list[Segment] = []
        for _, group in groupby(prompt.segments, key=_is_untokenized_literal):
            run = list(group)
            literals = [each for each in run if _is_untokenized_literal(each)]
            if len({isinstance(each, Literal) and each.verbatim for each in literals}) > 1:
                segments.append(self._tokenize_jointly(run))
            else:
                segments += [with_ids(each, self._segment_ids(each, node_token_ids)) for each in run]
        bos = self._bos_ids(segments)
        return Prompt([Literal("", bos), *segments] if bos else segments)

    def figure_rows(self, prompt: Prompt) -> "FigureRows":
        """The figures and lines of a tokenized prompt; each segment begins a line."""
        return self._figure_finder(prompt.token_ids, prompt.offsets)

    @cached_property
    def _figure_finder(self) -> "FigureFinder":
        from ragblend.engine.prompts.figure_rows import FigureFinder  # needs torch; this module does not

        return FigureFinder(self.tokenizer)

    def _bos_ids(self, segments: list[Segment]) -> tuple[int, ...]:
        """The begin token, if the tokenizer adds one and the prompt lacks it."""
        bos = self.tokenizer.bos_token_id
        if bos is None or self.tokenizer("a", add_special_tokens=True)["input_ids"][:1] != [bos]:
            return ()
        first = next((ids[0] for s in segments if (ids := s.token_ids)), None)
        return () if first == bos else (bos,)

    def _segment_ids(self, segment: Segment, node_token_ids: NodeTokenIds) -> tuple[int, ...]:
        if segment.token_ids is not None:
            return segment.token_ids
        if isinstance(segment, Literal):
            return tuple((self.passage_ids if segment.verbatim else self.literal_ids)(segment.text))
        if segment.text is not None:
            return tuple(self.passage_ids(segment.text))
        assert segment.node_id is not None
        return node_token_ids[segment.collection, segment.node_id]

    def _tokenize_jointly(self, run: list[Segment]) -> Literal:
        """Tokenize the template's literals and verbatim ones as one text, because a token may span two of them.

        If that yields control tokens that the template did not write, each is tokenized separately.
        """
        literals = [each for each in run if isinstance(each, Literal)]
        text = "".join(each.text for each in literals)
        ids = self.literal_ids(text)
        written = [i for each in literals if not each.verbatim for i in self.control_ids(each.text)]
        if [i for i in ids if i in self._control_ids] != written:
            ids = [i for each in literals for i in self._segment_ids(each, {})]
        return Literal(text, tuple(ids))

    def chat_prompt(
        self, system: str | None, passages: list[Chunk], question: str, history: list[tuple[str, str]]
    ) -> Prompt:
        """A chat prompt with passages first and the question last."""
        system_message = SYSTEM_MESSAGE if system is None else system
        messages = [Message("system", (Literal(system_message),))] if system_message else []
        for earlier_question, answer in history:
            messages.append(Message("user", (Literal(earlier_question),)))
            messages.append(Message("assistant", (Literal(answer),)))
        return chat(self.tokenizer, [*messages, Message("user", tuple(_user_segments(passages, question)))])

    def prefix_ids(self) -> tuple[int, ...]:
        """Ids of `chat_prompt` before the first passage, with a fixed date: the canonical encoding prefix.

        It is part of every chunk's key: with today's date, no stored KV would be found after midnight.
        """
        user_message = Message("user", tuple(_user_segments([Chunk(token_ids=())], "")))
        prompt = chat(
            self.tokenizer, [Message("system", (Literal(SYSTEM_MESSAGE),)), user_message], has_fixed_date=True
        )
        return self.tokenize(prompt, {}).prefix_ids

    def end_ids(self) -> list[int | None]:
        """Ids of the tokens that end an answer: the tokenizer's end token or None, and the chat template's, if any."""
        _, _, after = rendered_conversation(self.tokenizer, text=_PLACEHOLDER).partition(_PLACEHOLDER)
        return [self.tokenizer.eos_token_id, *self.control_ids(after)[:1]]


def _user_segments(passages: list[Chunk], question: str) -> list[Segment]:
    if not passages:
        return [Literal(question)]
    between = [part for passage in passages for part in (Literal(SEPARATOR), passage)]
    return [Literal(PASSAGES_HEADING), *between[1:], Literal(INSTRUCTION + question)]


def _is_untokenized_literal(segment: Segment) -> bool:
    return isinstance(segment, Literal) and segment.token_ids is None


def _encode(tokenizer: Any, text: str) -> list[int]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return list(tokenizer.encode(text, add_special_tokens=False))
    try:  # call the tokenizers library directly: it shares no state between threads
        return list(backend.encode(text, add_special_tokens=False).ids)
    except TypeError as error:
        raise PromptError(
            "tokenizing a text: it holds half of a surrogate pair, which is no character. Decode its bytes with "
            'errors="replace".'
        ) from error
