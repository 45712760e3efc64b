"""Similarity of answers and of next-token distributions. Pure functions.

Text against gold: SQuAD's normalisation, exact match and F1 (Rajpurkar et al. 2016, evaluate-v1.1.py), and
ROUGE-L (Lin 2004, package rouge-score with the stemmer, as the CacheBlend artifact calls it).
Distributions against the reference: KL divergence and top-1 agreement over teacher-forced positions.
"""

import functools
import re
import string
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ragblend.engine.prompts.figures import contains, figures_in
from ragblend.measuring.data import Question

if TYPE_CHECKING:
    from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SEPARATORS = str.maketrans(",;/", "   ")
_IN_NUMBER = re.compile(r"(?<=\d)[.:](?=\d)")  # replaced before punctuation is removed: 4.5 would become 45
# 1,931 is one number, and 1234567,7654321 are two.
_THOUSANDS = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?!\d)")


def normalise(text: str) -> str:
    """Lower-case a text, and remove punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def gold_match(answer: str, gold: Sequence[str]) -> bool:
    """Whether the normalised answer equals one of the normalised gold answers."""
    return normalise(answer) in {normalise(text) for text in gold}


def found_share(answer: str, required: Sequence[str]) -> float | None:
    """The share of required strings that the answer contains as whole words; None if none are required.

    RULER's `string_match_all` (Hsieh et al. 2024) counts any substring: it would find 31 in 1931.
    """
    words = f" {_split_lists(answer)} "
    return sum(f" {_split_lists(text)} " in words for text in required) / len(required) if required else None


def _split_lists(text: str) -> str:
    """Normalise a text; the separators of list items separate words, also without a space after them."""
    joined = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return normalise(_IN_NUMBER.sub("·", joined).translate(_SEPARATORS))


def f1(answer: str, gold: Sequence[str]) -> float:
    """Token F1 against the nearest gold answer, in [0, 1]."""
    return max(_f1(normalise(answer).split(), normalise(text).split()) for text in gold)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    common = sum((Counter(answer) & Counter(gold)).values())
    # 2PR/(P+R) with P = common/len(answer), R = common/len(gold)
    return 2 * common / (len(answer) + len(gold))


def rouge_l(answer: str, gold: Sequence[str]) -> float:
    """ROUGE-L F-measure against the nearest gold answer, in [0, 1]."""
    score = _rouge_scorer()
    return max(float(score(text, answer)["rougeL"].fmeasure) for text in gold)


@functools.cache
def _rouge_scorer() -> Callable[[str, str], Any]:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True).score


def kl_divergence(reference: "Tensor", other: "Tensor") -> float:
    """Mean over positions of KL(reference || other), in nats, from logits.

    reference, other (n, vocab), any float dtype; computed in float64, where rounding is far below bfloat16's. Tokens
    with probability 0 in the reference count nothing. nan for logits with NaN; inf if a token is possible only in the
    reference.
    """
    import torch

    assert reference.shape == other.shape and reference.ndim == 2, (reference.shape, other.shape)
    p, q = (torch.log_softmax(logits.cpu().double(), dim=-1) for logits in (reference, other))
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))  # (n, vocab)
    kl = float(terms.sum(-1).mean())
    # Rounding can give -1e-17 for equal distributions. Not max(0.0, kl), which is 0.0 for nan.
    return 0.0 if kl < 0 else kl


def top1_agreement(reference: "Tensor", other: "Tensor") -> float:
    """The share of positions where both (n, vocab) have the same most likely token, in [0, 1]."""
    assert reference.shape == other.shape and reference.ndim == 2, (reference.shape, other.shape)
    return float((reference.argmax(-1) == other.argmax(-1)).float().mean())


def right_figures(question: Question, answer: str) -> tuple[str, ...]:
    """The figures of a right answer, if this answer has all of them; else none.

    If the question does not say what is required, these are the figures of its first gold answer.
    """
    wanted = question.required or tuple(figures_in(question.answers[0]))
    return wanted if all(contains(answer, each) for each in wanted) else ()


def has_other_figure(answer: str, question: Question, figures: Sequence[str]) -> bool:
    """Whether the answer has a figure that only passages without any of the right ones have."""
    others = [each for each in figures_in(answer) if not any(contains(figure, each) for figure in figures)]
    right = [text for text in question.passages if any(contains(text, figure) for figure in figures)]
    wrong = "\n".join(text for text in question.passages if text not in right)
    known = "\n".join((question.text, *right))
    return any(contains(wrong, each) and not contains(known, each) for each in others)


def figure_positions(pieces: Sequence[str], figures: Sequence[str]) -> list[int]:
    """Positions of an answer's tokens that belong to its figures. pieces: the text of each token."""
    folded = [piece.casefold() for piece in pieces]  # casefold can change the length, so piece by piece
    ends, found = list(accumulate(map(len, folded))), set[int]()
    text = "".join(pieces)
    # The figures as the answer spells them, such as 18642 for 18,642.
    spelled = [each for figure in figures for each in figures_in(text) if contains(figure, each)]
    for figure in (*figures, *spelled):
        place = re.search(rf"(?<!\w){re.escape(figure.casefold())}(?!\w)", "".join(folded))
        if place is not None:
            found.update(range(bisect_right(ends, place.start()), bisect_left(ends, place.end()) + 1))
    return sorted(found)


def recovery(kl: float, kl_reuse: float) -> float | None:
    """How much of reuse's divergence is removed: 1 is full prefill, 0 no better than reuse, below 0 worse.

    None if reuse itself does not diverge.
    """
    return None if kl_reuse <= 0 else 1 - kl / kl_reuse
