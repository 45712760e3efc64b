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

from ragblend.engine.prompts.figure_rows import text_of_token
from ragblend.engine.prompts.segments import Prompt

NEAR_TOKENS = 12
LIKELY = 20  # tokens, beyond which none counts
_ENDS_SENTENCE = re.compile(r"[.!?…:\n]\W*$")
_IN_CITATION = re.compile(r"\[[\d\s,;]*$")
_QUOTES = "\"'([{«„“”’‚"


@dataclass(frozen=True)
class UncertaintyCheck:
    """Which tokens of an answer are to be read again. sure: the share from which on the model counts as sure.

    prompt: a name that stands behind its last chunk, in the question, is no news.
    """

    tokenizer: Any
    prompt: Prompt
    sure: float

    def needs_full_prefill(self, token: int, logits: Tensor, before: Sequence[int]) -> bool:
        """Whether that token, behind the answer's tokens so far, is of a figure or begins a name, and is not sure.

        logits (vocab,): the model's own. What counts is its share of the likely tokens of its kind: whether the answer
        is to begin with the figure or with a word is no doubt about the figure. The number of a citation is no figure.
        """
        kind = self._kind(token)
        if not kind:
            return False
        likely, ids = logits.float().softmax(-1).topk(min(LIKELY, logits.numel()))
        alike = [p for p, i in zip(likely.tolist(), ids.tolist(), strict=True) if self._kind(i) == kind]
        if alike and alike[0] >= self.sure * sum(alike):
            return False
        said = self.tokenizer.decode(list(before)[-NEAR_TOKENS:])
        if kind == "figure":
            return _IN_CITATION.search(said) is None
        begins_sentence = not said.strip() or _ENDS_SENTENCE.search(said) is not None
        text = self.tokenizer.decode([token]).strip().casefold()
        return not begins_sentence and not any(word.startswith(text) for word in self._asked)

    def _kind(self, token: int) -> str:
        """`figure` for a token with digits, `name` for one that begins a word with a capital, nothing for others."""
        text, begins_word = text_of_token(self.tokenizer, token)
        if any(letter.isdigit() for letter in text):
            return "figure"
        return "name" if begins_word and text.strip()[:1].isupper() else ""

    @cached_property
    def _asked(self) -> frozenset[str]:
        """The words of the question."""
        stop = max((stop for _, stop in self.prompt.places), default=0)
        words = self.tokenizer.decode(self.prompt.token_ids[stop:]).casefold().split()
        return frozenset(word.lstrip(_QUOTES) for word in words)
