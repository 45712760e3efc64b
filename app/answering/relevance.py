"""Decides which passages are relevant to a question: one rule for the command line, the page and the servers.

The relevance of a passage is its similarity beyond that of unrelated texts, plus a share for the question's words that
it has: embedders know few languages, and no codes or names. If the best passage is not relevant enough, nothing is
found; otherwise passages much less relevant than the best one are left out. A passage with a code, quoted phrase or
rare term of the question is always relevant. A passage in a language that the embedder does not know is judged by its
words alone. `python -m benchmarks.measure_search` measures the numbers here and in `library/similarity.py`.
"""

from collections.abc import Mapping, Set

from ragblend.app.library.registry import UnrelatedSimilarity
from ragblend.app.library.word_search import WordMatch

MIN_RELEVANCE = 0.4  # the best passage has less for a question about other things
# Of the best passage's relevance; 0.6 lost 3 of the samples' 22, whose facts are in several passages.
MIN_OF_BEST = 0.4
WORDS_WEIGHT, MIN_WORDS = 0.3, 2  # one word may be shared by chance


def relevant_nodes(
    scores: Mapping[str, float],
    words: Mapping[str, WordMatch],
    unrelated: UnrelatedSimilarity | None,
    foreign: Set[str] = frozenset(),
) -> set[str]:
    """The node ids of the passages that are relevant to the question.

    scores: cosine similarities; words: the result of `by_words`; unrelated: None if unknown, then all are relevant.
    foreign: passages in a language that the embedder does not know, which are judged by their words alone.
    """
    if foreign:
        known = {node: score for node, score in scores.items() if node not in foreign}
        return relevant_nodes(known, words, unrelated) | _relevant_by_words(foreign, words)
    if unrelated is None:
        return set(scores)
    scale = MIN_RELEVANCE / max(unrelated.best - unrelated.typical, 0.01)
    relevances = {node: scale * (score - unrelated.typical) for node, score in scores.items()}
    for node, match in words.items():
        if node in relevances and match.words >= MIN_WORDS:
            relevances[node] += WORDS_WEIGHT * match.share
    always = {node for node in relevances if node in words and (words[node].is_exact or words[node].has_term)}
    best = max(relevances.values(), default=0.0)
    if best < MIN_RELEVANCE:
        return always
    return always | {node for node, relevance in relevances.items() if relevance >= MIN_OF_BEST * best}


def _relevant_by_words(foreign: Set[str], words: Mapping[str, WordMatch]) -> set[str]:
    """Passages with a code or phrase of the question, or with not much fewer of its words than the best match."""
    best = max((match.share for match in words.values() if match.words), default=0.0)
    matches = ((node, words[node]) for node in foreign if node in words)
    return {
        node
        for node, match in matches
        if match.is_exact or (match.words and match.share >= MIN_OF_BEST * best)
    }
