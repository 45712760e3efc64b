"""A figure or a name of which the model is not sure is read again in full before it is said.

Where reused KV leads to another figure than full prefill does, the model hardly ever says it with confidence
(docs/methods.md). So the answer goes on from a full prefill once such a token is about to come, at most once: the first
token comes as soon as it did, and the rest of the answer is full prefill's.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ragblend.engine.prompts.segments import Prompt

NEAR_TOKENS = 12
_ENDS_SENTENCE = re.compile(r"[.!?…:\n]\W*$")
_IN_CITATION = re.compile(r"\[[\d\s,;]*$")
_QUOTES = "\"'([{«„“”’‚"


@dataclass(frozen=True)
class SecondLook:
    """Which tokens of an answer are to be read again. sure: the probability from which on the model counts as sure.

    prompt: a name that stands behind its last chunk, in the question, is no news.
    """

    tokenizer: Any
    prompt: Prompt
    sure: float

    def is_wanted(self, token: int, logits: Tensor, before: Sequence[int]) -> bool:
        """Whether that token, behind the answer's tokens so far, is of a figure or begins a name, and is not sure.

        logits (vocab,): the model's own. The number of a citation is no figure.
        """
        text, begins_word = self._told(token)
        if not any(letter.isdigit() for letter in text) and not (begins_word and text[:1].isupper()):
            return False
        if float(logits.float().softmax(-1).max()) >= self.sure:
            return False
        said = self.tokenizer.decode(list(before)[-NEAR_TOKENS:])
        if any(letter.isdigit() for letter in text):
            return _IN_CITATION.search(said) is None
        begins_sentence = not said.strip() or _ENDS_SENTENCE.search(said) is not None
        return not begins_sentence and not any(word.startswith(text.casefold()) for word in self._asked)

    def _told(self, token: int) -> tuple[str, bool]:
        """The text of a token, and whether it stands behind a blank: a decoder drops that of the first token."""
        text, piece = self.tokenizer.decode([token]), self.tokenizer.convert_ids_to_tokens(token) or ""
        return text.strip(), text[:1].isspace() or piece[:1] in ("▁", "Ġ")

    @cached_property
    def _asked(self) -> frozenset[str]:
        """The words of the question."""
        stop = max((stop for _, stop in self.prompt.places), default=0)
        words = self.tokenizer.decode(self.prompt.token_ids[stop:]).casefold().split()
        return frozenset(word.lstrip(_QUOTES) for word in words)
