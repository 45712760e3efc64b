"""Which passages have to do with a question: one rule for every way to ask.

The relevance of a passage is its similarity beyond that of unrelated texts, and more for each of the question's words
that it has: embedders know few languages, and no codes and names. If the best passage is too little relevant, nothing
was found; else what is much less relevant than the best one is left out. A code or quoted phrase of the question is
always relevant. `python -m benchmarks.measure_relevance` measures the numbers below.
"""

from collections.abc import Mapping

import numpy as np

from ragblend.app.library.registry import WordMatch
from ragblend.app.workspace import Workspace
from ragblend.integrations.embeddings import BUNDLED

# The cosine similarity of unrelated texts, by a part of the embedder's name.
RECORDED_NOISE = {BUNDLED: 0.12}
LEAST_RELEVANCE = 0.4  # of the best passage
LEAST_OF_BEST = 0.4  # of the best passage's relevance
WORDS_WEIGHT, LEAST_WORDS = 0.3, 2  # one word may be shared by chance
MEASURED_PASSAGES, LEAST_PASSAGES = 40, 20
QUESTION_CHARACTERS = 100
FOREIGN = (
    "Who won the football match?",
    "How do I boil an egg?",
    "What is the square root of nine?",
    "Hello!",
)


def relevant(scores: Mapping[str, float], words: Mapping[str, WordMatch], noise: float | None) -> set[str]:
    """The node ids that have to do with the question.

    scores: cosine similarities; words: what `Library.by_words` found; noise: the similarity of unrelated texts (None:
    unknown, then all are relevant).
    """
    if noise is None:
        return set(scores)
    found = {node: (score - noise) / (1 - noise) for node, score in scores.items()}
    for node, match in words.items():
        if node in found and match.words >= LEAST_WORDS:
            found[node] += WORDS_WEIGHT * match.share
    exact = {node for node in found if node in words and words[node].is_exact}
    best = max(found.values(), default=0.0)
    if best < LEAST_RELEVANCE:
        return exact
    return exact | {node for node, relevance in found.items() if relevance >= LEAST_OF_BEST * best}


def recorded_noise(embedder: str) -> float | None:
    """By the embedder's name; None if it was not measured by us."""
    return next((noise for name, noise in RECORDED_NOISE.items() if name in embedder), None)


def measure_noise(workspace: Workspace) -> None:
    """Store the similarity of unrelated texts in a collection whose embedder is not recorded, as it grows twofold.

    Measured from random pairs of its passages, one of them as a question: a tenth of the pairs are less similar. Where
    all passages are about one thing that is too much, so what they have in common with FOREIGN counts if it is less.
    """
    library, collection = workspace.library, workspace.settings.collection
    known, count = library.embedder(collection), library.count_passages(collection)
    is_measured = known is not None and count < 2 * known.measured
    if recorded_noise(workspace.embedder.name) is not None or is_measured or count < LEAST_PASSAGES:
        return
    nodes = list(library.nodes(collection))
    chosen = np.random.default_rng(0).permutation(len(nodes))[:MEASURED_PASSAGES]
    sample = library.passages([nodes[at] for at in chosen])
    own, foreign = list[float](), list[float]()
    for node, passage in sample.items():
        question = workspace.embedder.embed_question(passage.text[:QUESTION_CHARACTERS])
        own += library.scores([other for other in sample if other != node], question).values()
    for text in FOREIGN:
        foreign += library.scores([*sample], workspace.embedder.embed_question(text)).values()
    if own and foreign:
        noise = min(float(np.quantile(own, 0.1)), float(np.median(foreign)))
        library.keep_noise(collection, noise, count)
