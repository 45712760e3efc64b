"""A question -> the passages nearest to it, each text once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ragblend.app.answer import Source
from ragblend.app.documents import Passage
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import LibraryError

SPARE = 2  # ask the index for this many times more than wanted: two files may hold the same passage
HasText = TypeVar("HasText", Source, "Nearest")


@dataclass(frozen=True)
class Retriever:
    """Looks passages up by meaning: MiniLM for the question, Chroma for the ids, the registry for the texts."""

    workspace: Workspace

    def retrieve(self, question: str, top_k: int) -> list[Source]:
        """At most top_k passages, best first. Raises LibraryError when there is nothing to search."""
        workspace = self.workspace
        if not workspace.library.has_passages(workspace.settings.collection):
            raise LibraryError(_nothing_here(workspace))
        hits = nearest(workspace, question, top_k)
        if not hits:
            raise LibraryError(
                f"Searching the collection {workspace.settings.collection!r} in {workspace.home.root}: its index is "
                "empty, but the registry holds passages. Run `ragblend store repair` to build the index again."
            )
        found = [
            Source(h.passage.node_id, h.document, h.passage.location, h.score, h.passage.text) for h in hits
        ]
        return without_duplicates(found)[:top_k]


@dataclass(frozen=True)
class Nearest:
    """A passage near a question, its document's name, and the cosine similarity."""

    passage: Passage
    document: str
    collection: str
    score: float

    @property
    def text(self) -> str:
        return self.passage.text


def nearest(workspace: Workspace, question: str, top_k: int) -> list[Nearest]:
    """The passages of one collection that are nearest to a question, best first, and some more than top_k of them."""
    library = workspace.library
    hits = workspace.index.query(workspace.embedder.embed_question(question), top_k * SPARE)
    best = {hit.node_id: hit.score for hit in hits}
    passages = library.passages(list(best))
    documents = library.documents_with([passage.document_id for passage in passages.values()])
    found = [
        Nearest(passage, documents[passage.document_id].name, workspace.settings.collection, best[node])
        for node, passage in passages.items()
        if passage.document_id in documents
    ]
    return sorted(found, key=lambda hit: -hit.score)


def without_duplicates(sources: Sequence[HasText]) -> list[HasText]:
    """Each text once, at its best place: twice in the prompt it would cost twice and add nothing."""
    first: dict[str, HasText] = {}
    for source in sources:
        first.setdefault(" ".join(source.text.split()), source)
    return list(first.values())


def _nothing_here(workspace: Workspace) -> str:
    return (
        f"Answering from the collection {workspace.settings.collection!r} in {workspace.home.root}: nothing has been "
        "ingested there. Run `ragblend ingest PATH...` first, or name another --home."
    )
