"""A question -> the passages nearest to it, each text once."""

from dataclasses import dataclass

from ragblend.app.answer import Source
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import LibraryError

SPARE = 2  # ask the index for this many times more than wanted: two files may hold the same passage


@dataclass(frozen=True)
class Retriever:
    """Looks passages up by meaning: MiniLM for the question, Chroma for the ids, the registry for the texts."""

    workspace: Workspace

    def retrieve(self, question: str, top_k: int) -> list[Source]:
        """At most top_k passages, best first. Raises LibraryError when there is nothing to search."""
        library, collection = self.workspace.library, self.workspace.settings.collection
        if not library.count_passages(collection):
            raise LibraryError(_nothing_here(self.workspace))
        embedding = self.workspace.embedder.embed_question(question)
        hits = self.workspace.index.query(embedding, top_k * SPARE)
        passages = library.passages([hit.node_id for hit in hits])
        names = {document.id: document.name for document in library.documents(collection)}
        found = [
            Source(hit.node_id, names[passage.document_id], passage.location, hit.score, passage.text)
            for hit in hits
            if (passage := passages.get(hit.node_id)) and passage.document_id in names
        ]
        if not found:
            raise LibraryError(
                f"Searching the collection {collection!r} in {self.workspace.home.root}: its index is empty, but the "
                "registry holds passages. Run `ragblend store repair` to build the index again."
            )
        return without_duplicates(found)[:top_k]


def without_duplicates(sources: list[Source]) -> list[Source]:
    """Each text once, at its best place: twice in the prompt it would cost twice and add nothing."""
    first: dict[str, Source] = {}
    for source in sources:
        first.setdefault(" ".join(source.text.split()), source)
    return list(first.values())


def _nothing_here(workspace: Workspace) -> str:
    return (
        f"Answering from the collection {workspace.settings.collection!r} in {workspace.home.root}: nothing has been "
        "ingested there. Run `ragblend ingest PATH...` first, or name another --home."
    )
