"""How near one answer, or one run of next-token distributions, is to another. Pure functions.

Text against gold: SQuAD's normalisation, exact match and F1 (Rajpurkar et al. 2016, evaluate-v1.1.py), and
ROUGE-L (Lin 2004, package rouge-score with the stemmer, as the CacheBlend artifact calls it).
Distributions against the reference: KL divergence and top-1 agreement over teacher-forced positions.
"""

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def gold_match(answer: str, gold: Sequence[str]) -> bool:
    """Whether the normalised answer equals one of the normalised gold answers."""
    return normalise(answer) in {normalise(text) for text in gold}


def found(answer: str, required: Sequence[str]) -> float | None:
    """The share of what is required that the answer holds, as whole words; None where nothing is.

    RULER's `string_match_all` (Hsieh et al. 2024) counts any substring: there 31 would be found in 1931.
    """
    words = f" {normalise(answer)} "
    return sum(f" {normalise(text)} " in words for text in required) / len(required) if required else None


def f1(answer: str, gold: Sequence[str]) -> float:
    """Token F1 against the nearest gold answer, in [0, 1]."""
    return max(_f1(normalise(answer).split(), normalise(text).split()) for text in gold)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    common = sum((Counter(answer) & Counter(gold)).values())
    return (
        2 * common / (len(answer) + len(gold))
    )  # 2PR/(P+R) with P = common/len(answer), R = common/len(gold)


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

    reference, other (n, vocab), any float dtype; computed in float64, where rounding is far below any
    bfloat16 floor. A token that the reference gives no probability counts nothing.
    """
    import torch

    assert reference.shape == other.shape and reference.ndim == 2, (reference.shape, other.shape)
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (reference, other))
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))  # (n, vocab)
    # Rounding can leave -1e-17 for equal distributions; KL is never negative.
    return max(0.0, float(terms.sum(-1).mean()))


def top1_agreement(reference: "Tensor", other: "Tensor") -> float:
    """The part of the positions (n, vocab) where both give the same most likely token, in [0, 1]."""
    assert reference.shape == other.shape and reference.ndim == 2, (reference.shape, other.shape)
    return float((reference.argmax(-1) == other.argmax(-1)).double().mean())


def recovery(kl: float, kl_reuse: float) -> float | None:
    """How much of reuse's divergence is gone: 1 is full prefill, 0 no better than reuse, below 0 worse.

    None where reuse itself does not diverge: there is nothing to recover.
    """
    return None if kl_reuse <= 0 else 1 - kl / kl_reuse
