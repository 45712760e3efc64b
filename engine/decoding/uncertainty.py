"""Detects figures and names that reused KV may have got wrong, so that the answer continues from a full prefill.

If the model is not sure of a figure, it is asked again with only the passage that matches the question: alone, that
passage's stored KV is exact, and no other passage misleads (docs/methods.md). If that rules the figure out and has
another, the answer continues from a full prefill, at most once. The first token is not delayed, and the rest of the
answer is full prefill's. Where neither is sure, full prefill is not either, and would nearly always choose the same.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ragblend.engine.prompts.figure_rows import text_of_token
from ragblend.engine.prompts.passage_match import matching_passage, with_passage_alone
from ragblend.engine.prompts.segments import Prompt

Likely = Sequence[tuple[int, float]]  # the most likely next tokens, with their probabilities
View = Callable[[Sequence[int]], Likely]  # after these tokens of the answer
CONTEXT_TOKENS = 12  # of the answer before a token, to recognise citations and beginnings of sentences
LIKELY_TOKENS = 20  # how many are compared
# Probabilities. The passage alone contradicts the token if another figure has at least MIN_OTHER there, and the token
# at most MAX_RULED_OUT. The token may have more if the whole prompt nearly chose the other figure: at most CLOSE_SHARE
# times the other figure's probability in the whole prompt, as a share of the most likely figure's.
MIN_OTHER, MAX_RULED_OUT, CLOSE_SHARE = 0.4, 0.03, 0.2
MIN_CONFIDENCE_WITHOUT_VIEW = 0.8  # if no passage can be viewed alone
# A prompt with one passage is used only if it has at most this share of the whole prompt's tokens.
MAX_VIEW_SHARE = 0.5
NUMBER_ENDS = -1  # stands for all tokens without a digit, after one with a digit
_ENDS_SENTENCE = re.compile(r"[.!?…:\n]\W*$")
_IN_CITATION = re.compile(r"\[[\d\s,;]*$")
_QUOTES = "\"'([{«„“”’‚"


def likely_tokens(logits: Tensor) -> Likely:
    """The `LIKELY_TOKENS` most likely tokens of logits (vocab,)."""
    likely, ids = logits.float().softmax(-1).topk(min(LIKELY_TOKENS, logits.numel()))
    return list(zip(ids.tolist(), likely.tolist(), strict=True))


@dataclass(frozen=True)
class UncertaintyCheck:
    """Decides whether the next token needs a full prefill.

    min_confidence: the share of the probability from which the model counts as sure. prompt: names in
    its question, after the last chunk, are never uncertain. view_of(prompt): opens another prompt, to continue it by
    the answer; None: not available.
    """

    tokenizer: Any
    prompt: Prompt
    min_confidence: float
    view_of: Callable[[Prompt], View] | None = None

    def needs_full_prefill(self, token: int, likely: Callable[[], Likely], before: Sequence[int]) -> bool:
        """Whether the token after the answer's tokens `before` belongs to a figure, ends one or begins a name, and the
        model is not sure of it, and the passage alone contradicts it.

        likely: returns the model's own probabilities. The token's is compared only with those of likely tokens of the
        same kind: a choice between a figure and a word says nothing about the figure. But after a digit the model
        chooses between further digits and the end of the number. Citation numbers do not count as figures.
        """
        kind = self._kind(token)
        in_number = kind != "name" and self._ends_with_digit(before)
        kind = "figure" if in_number else kind
        if not kind or not self._is_checkable(token, kind, before):
            return False
        in_prompt = self._probabilities_of_kind(likely(), kind, in_number)
        best = max(in_prompt.values(), default=0.0)
        confidence = best / sum(in_prompt.values()) if best else 1.0
        if confidence >= self.min_confidence:
            return False
        if self._view is None:
            return confidence < MIN_CONFIDENCE_WITHOUT_VIEW
        alone = self._probabilities_of_kind(self._view(before), kind, in_number)
        probability = alone.pop(token if self._kind(token) == kind else NUMBER_ENDS, 0.0)
        other = max(alone, key=alone.__getitem__, default=NUMBER_ENDS)
        if alone.get(other, 0.0) < MIN_OTHER:
            return False
        return probability <= max(MAX_RULED_OUT, CLOSE_SHARE * in_prompt.get(other, 0.0) / best)

    def _is_checkable(self, token: int, kind: str, before: Sequence[int]) -> bool:
        """Whether it is a figure but no citation number, or a name that neither begins a sentence nor occurs in the
        question.
        """
        context = self.tokenizer.decode(list(before)[-CONTEXT_TOKENS:])
        if kind == "figure":
            return _IN_CITATION.search(context) is None
        begins_sentence = not context.strip() or _ENDS_SENTENCE.search(context) is not None
        text = self.tokenizer.decode([token]).strip().casefold()
        return not begins_sentence and not any(word.startswith(text) for word in self._question_words)

    def _probabilities_of_kind(self, likely: Likely, kind: str, in_number: bool) -> dict[int, float]:
        """The probabilities of the tokens of this kind. in_number: all other tokens count as well, together."""
        probabilities: dict[int, float] = {}
        for token, probability in likely:
            if self._kind(token) == kind:
                probabilities[token] = probability
            elif in_number:
                probabilities[NUMBER_ENDS] = probabilities.get(NUMBER_ENDS, 0.0) + probability
        return probabilities

    def _ends_with_digit(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and text_of_token(self.tokenizer, tokens[-1])[0][-1:].isdigit()

    @cached_property
    def _view(self) -> View | None:
        """The view of the best matching passage, opened on first use."""
        number = matching_passage(self.prompt)
        if self.view_of is None or number is None:
            return None
        alone = with_passage_alone(self.prompt, number)
        if len(alone.token_ids) > MAX_VIEW_SHARE * len(self.prompt.token_ids):
            return None
        return self.view_of(alone)

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
