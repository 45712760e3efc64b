"""How similar a question is to passages about other things: recorded for the bundled embedder, measured for others."""

import numpy as np

from ragblend.app.library.language import knows_language
from ragblend.app.library.registry import UnrelatedSimilarity
from ragblend.app.workspace import Workspace
from ragblend.integrations.embeddings import BUNDLED

# By a part of the embedder's name. Valid for documents in a language that the embedder knows.
RECORDED = {BUNDLED: UnrelatedSimilarity(0.12, 0.49)}
MEASURED_PASSAGES, MIN_PASSAGES = 40, 20  # at most, at least
UNRELATED_QUESTIONS = (
    "Who won the football match?", "How do I boil an egg?", "What is the square root of nine?", "Hello, how are you?",
    "Which vitamins are in spinach?", "Who painted the Mona Lisa?", "Is it raining today?", "Tell me a joke.",
    "How far away is the moon?",
)  # fmt: skip


def recorded_similarity(embedder: str) -> UnrelatedSimilarity | None:
    """The recorded similarity for an embedder's name; None if there is none."""
    return next((each for name, each in RECORDED.items() if name in embedder), None)


def measure_similarity(workspace: Workspace) -> None:
    """Store how similar unrelated questions are to a collection's passages; again each time that it has doubled.

    Not for embedders in RECORDED, if they know the documents' language. Measuring pairs of the collection's own
    passages was rejected: they are about one thing and so much more similar that with multilingual-e5-small all
    questions in five languages were refused.
    """
    library, collection = workspace.library, workspace.settings.collection
    known, count = library.embedder(collection), library.count_passages(collection)
    is_measured = known is not None and count < 2 * known.measured
    if is_measured or count < MIN_PASSAGES:
        return
    if recorded_similarity(workspace.embedder.name) is not None and knows_language(workspace):
        return
    nodes = list(library.nodes(collection))
    sample = [nodes[at] for at in np.random.default_rng(0).permutation(len(nodes))[:MEASURED_PASSAGES]]
    questions = [workspace.embedder.embed_question(text) for text in UNRELATED_QUESTIONS]
    found = [scores for each in questions if (scores := [*library.scores(sample, each).values()])]
    if found:
        typical, best = (
            float(np.median([summary(scores) for scores in found])) for summary in (np.median, np.max)
        )
        library.store_similarity(collection, UnrelatedSimilarity(typical, best), count)
