"""Whether the bundled embedder knows the language of a collection's documents: it knows English only."""

from ragblend.app.library.stop_words import ENGLISH, languages_of_prose, prose_words, words_without_numbers
from ragblend.app.workspace import Workspace
from ragblend.integrations.embeddings import DEFAULT

SAMPLED_PASSAGES = 200
MIN_WORDS = 10  # of a text, to judge its language
NOTICE = (
    "Many documents in {collection!r} are not in English, which is the only language that the bundled embedder knows: "
    "passages are found by their words, hardly by their meaning. A multilingual embedder finds both, such as "
    "`ragblend ingest --embedder intfloat/multilingual-e5-small`, or Embedder in the page's settings."
)


def language_notice(workspace: Workspace) -> str:
    """What to tell the user if the embedder does not know the documents' language; "" if it does, or they were told."""
    collection = workspace.settings.collection
    if knows_language(workspace) or not workspace.library.mark_told(collection):
        return ""
    return NOTICE.format(collection=collection)


def knows_language(workspace: Workspace) -> bool:
    """Whether two thirds of a sample of passages are in English; True for an embedder whose languages are unknown."""
    if workspace.embedder_name != DEFAULT:
        return True
    nodes = list(workspace.library.nodes(workspace.settings.collection))
    sample = workspace.library.passages(nodes[:: max(1, len(nodes) // SAMPLED_PASSAGES)])
    return 3 * sum(not is_english(passage.text) for passage in sample.values()) <= len(sample)


def is_english(text: str) -> bool:
    """Whether a text is in English; also true for a table, and for a text that is too short to tell."""
    if not prose_words(text) or len(words_without_numbers(text)) < MIN_WORDS:
        return True
    return ENGLISH in languages_of_prose(text)
