"""Which passages have to do with a question: one rule for every way to ask.

The relevance of a passage is its similarity beyond that of unrelated texts, and more for each of the question's words
that it has: embedders know few languages, and no codes and names. If the best passage is too little relevant, nothing
was found; else what is much less relevant than the best one is left out. A passage with a code, quoted phrase or rare
term of the question is always relevant. Of passages in a language that the embedder does not know, codes, phrases and
the other words alone decide. `python -m benchmarks.measure_search` measures the numbers here and in
`library/similarity.py`.
"""

from collections.abc import Mapping, Set

from ragblend.app.library.registry import UnrelatedSimilarity
from ragblend.app.library.word_search import WordMatch

LEAST_RELEVANCE = 0.4  # that of a question about other things
LEAST_OF_BEST = 0.4  # of the best passage's relevance
WORDS_WEIGHT, LEAST_WORDS = 0.3, 2  # one word may be shared by chance


def relevant(
    scores: Mapping[str, float],
    words: Mapping[str, WordMatch],
    unrelated: UnrelatedSimilarity | None,
    foreign: Set[str] = frozenset(),
) -> set[str]:
    """The node ids that have to do with the question.

    scores: cosine similarities; words: what `by_words` found; unrelated None: unknown, then all are relevant.
    foreign: those in a language that the embedder does not know, of which the words alone decide.
    """
    if foreign:
        known = {node: score for node, score in scores.items() if node not in foreign}
        return relevant(known, words, unrelated) | _sharing_words(foreign, words)
    if unrelated is None:
        return set(scores)
    scale = LEAST_RELEVANCE / max(unrelated.best - unrelated.typical, 0.01)
    found = {node: scale * (score - unrelated.typical) for node, score in scores.items()}
    for node, match in words.items():
        if node in found and match.words >= LEAST_WORDS:
            found[node] += WORDS_WEIGHT * match.share
    exact = {node for node in found if node in words and (words[node].is_exact or words[node].has_term)}
    best = max(found.values(), default=0.0)
    if best < LEAST_RELEVANCE:
        return exact
    return exact | {node for node, relevance in found.items() if relevance >= LEAST_OF_BEST * best}


def _sharing_words(foreign: Set[str], words: Mapping[str, WordMatch]) -> set[str]:
    """Those with a word of the question, and not much fewer than the passage that has most, by rarity."""
    best = max((match.share for match in words.values() if match.words), default=0.0)
    matches = ((node, words[node]) for node in foreign if node in words)
    return {
        node
        for node, match in matches
        if match.is_exact or (match.words and match.share >= LEAST_OF_BEST * best)
    }
