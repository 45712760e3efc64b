"""Detects uncertain figures and names, before which the answer switches to a full prefill.

If reused KV leads to another figure than full prefill, the model is hardly ever confident of it (docs/methods.md). So
before such a token the answer continues from a full prefill, at most once: time to first token stays, and the rest of
the answer is full prefill's.
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
LIKELY = 20  # the most likely tokens that are compared
_ENDS_SENTENCE = re.compile(r"[.!?…:\n]\W*$")
_IN_CITATION = re.compile(r"\[[\d\s,;]*$")
_QUOTES = "\"'([{«„“”’‚"


@dataclass(frozen=True)
class UncertaintyCheck:
    """Decides whether the next token needs a full prefill. sure: the share from which the model counts as confident.

    prompt: names in its question, after the last chunk, are never uncertain.
    """

    tokenizer: Any
    prompt: Prompt
    sure: float

    def needs_full_prefill(self, token: int, logits: Tensor, before: Sequence[int]) -> bool:
        """Whether this token, after the answer's tokens `before` it, is of a figure or begins a name, and is uncertain.

        logits (vocab,): the model's own. Its probability is compared with those of likely tokens of the same kind only:
        a choice between a figure and a word says nothing about the figure. Citation numbers are no figures.
        """
        kind = self._kind(token)
        if not kind:
            return False
        likely, ids = logits.float().softmax(-1).topk(min(LIKELY, logits.numel()))
        alike = [p for p, i in zip(likely.tolist(), ids.tolist(), strict=True) if self._kind(i) == kind]
        if alike and alike[0] >= self.sure * sum(alike):
            return False
        context = self.tokenizer.decode(list(before)[-NEAR_TOKENS:])
        if kind == "figure":
            return _IN_CITATION.search(context) is None
        begins_sentence = not context.strip() or _ENDS_SENTENCE.search(context) is not None
        text = self.tokenizer.decode([token]).strip().casefold()
        return not begins_sentence and not any(word.startswith(text) for word in self._question_words)

    def _kind(self, token: int) -> str:
        """`figure` for a token with digits, `name` for one that begins a capitalised word, else the empty string."""
        text, begins_word = text_of_token(self.tokenizer, token)
        if any(letter.isdigit() for letter in text):
            return "figure"
        return "name" if begins_word and text.strip()[:1].isupper() else ""

    @cached_property
    def _question_words(self) -> frozenset[str]:
        stop = max((stop for _, stop in self.prompt.places), default=0)
        words = self.tokenizer.decode(self.prompt.token_ids[stop:]).casefold().split()
        return frozenset(word.lstrip(_QUOTES) for word in words)
