"""Whether the bundled embedder knows the language of a collection's documents: it knows English only."""

from ragblend.app.library.stop_words import ENGLISH, languages_of_prose, prose_words, words_without_numbers
from ragblend.app.workspace import Workspace
from ragblend.integrations.embeddings import DEFAULT

LOOKED_AT, LEAST_WORDS = 200, 10
NOTICE = (
    "Many documents in {collection!r} are not in English, which is the only language that the bundled embedder knows: "
    "passages are found by their words, hardly by their meaning. A multilingual embedder finds both, such as "
    "`ragblend ingest --embedder intfloat/multilingual-e5-small`, or Embedder in the page's settings."
)


def language_notice(workspace: Workspace) -> str:
    """What to tell the user of a collection whose language the embedder does not know; "" if it was told before."""
    collection = workspace.settings.collection
    if knows_language(workspace) or not workspace.library.tell_once(collection):
        return ""
    return NOTICE.format(collection=collection)


def knows_language(workspace: Workspace) -> bool:
    """Whether two thirds of the passages are in English, or the embedder is another one, of which this is not known."""
    if workspace.embedder_name != DEFAULT:
        return True
    nodes = list(workspace.library.nodes(workspace.settings.collection))
    some = workspace.library.passages(nodes[:: max(1, len(nodes) // LOOKED_AT)])
    return 3 * sum(not is_english(passage.text) for passage in some.values()) <= len(some)


def is_english(text: str) -> bool:
    """Also true for a table, and for a text too short to tell."""
    if not prose_words(text) or len(words_without_numbers(text)) < LEAST_WORDS:
        return True
    return ENGLISH in languages_of_prose(text)
