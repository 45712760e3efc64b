"""Which passages have to do with a question: one rule for every way to ask.

A passage is found if it is near enough (`least_score`), or has enough of the question's words, weighed by their
rarity: embedders know few languages, and no codes and names. Of these only those count that are not much farther away
than the best one.
"""

from collections.abc import Mapping

from ragblend.app.library.registry import WordMatch

# A passage with a lower cosine similarity is unrelated to the question, by embedder (a part of its name). Measured by
# `python -m benchmarks.measure_least_score`.
LEAST_SCORES = {"all-MiniLM-L6-v2": 0.25}
LEAST_SHARE, LEAST_WORDS = 0.5, 2  # of the question's words
FARTHEST = 0.5  # from the least score (0) to the best one (1): what is farther away is left out


def known_least_score(embedder: str) -> float | None:
    """The recorded least score of an embedder, by its name or the end of its folder's; None if there is none."""
    return next((score for name, score in LEAST_SCORES.items() if name.lower() in embedder.lower()), None)


def relevant(
    scores: Mapping[str, float], words: Mapping[str, WordMatch], least_score: float | None
) -> set[str]:
    """The node ids that have to do with the question.

    scores: cosine similarities; words: what `Library.by_words` found; least_score None: not known, any will do.
    """
    least = -1.0 if least_score is None else least_score
    best = max(scores.values(), default=least)
    nearest = max(least, least + FARTHEST * (best - least)) if least_score is not None else least
    by_words = {
        node
        for node, match in words.items()
        if match.is_exact or (match.words >= LEAST_WORDS and match.share >= LEAST_SHARE)
    }
    return {node for node, score in scores.items() if score >= nearest or node in by_words}
