"""A question -> the passages nearest to it, in one collection or several, each text once."""

from collections.abc import Sequence
from itertools import zip_longest

from ragblend.app.answer import Source
from ragblend.app.library import Library
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import LibraryError, UsageError, did_you_mean

SPARE = 2  # ask for this many times more than wanted: two files may hold the same passage
# Of so few the registry compares every vector, in some 15 ms. Importing Chroma takes a process 0.4 s.
COMPARED_PASSAGES = 500


def search(
    workspaces: Sequence[Workspace], ways: Sequence[str], top_k: int, least_score: float
) -> list[Source]:
    """At most top_k passages of these collections, best first, without numbers yet; LibraryError for a lost index.

    ways: the question as it is and perhaps otherwise; each way gives every second passage.
    """
    ranked = [
        sorted((source for one in workspaces for source in nearest(one, way, top_k)), key=lambda s: -s.score)
        for way in ways
    ]
    near = [[source for source in each if source.score >= least_score] for each in ranked]
    mixed = [source for place in zip_longest(*near) for source in place if source is not None]
    return without_duplicates(mixed)[:top_k]


def nearest(workspace: Workspace, question: str, top_k: int) -> list[Source]:
    """The passages of one collection that are nearest to a question, best first, and some more than top_k of them.

    MiniLM reads the question, the registry or Chroma finds the ids, the registry has the texts.
    """
    library, collection = workspace.library, workspace.settings.collection
    best = scores(workspace, question, top_k * SPARE)
    if not best and not library.counts_by_state(collection)["pending"]:
        raise LibraryError(
            f"Searching the collection {collection!r} in {workspace.home.root}: its index is empty, but the registry "
            "holds passages. Run `ragblend store repair` to build the index again."
        )
    passages = library.passages(list(best))
    documents = library.documents_with([passage.document_id for passage in passages.values()])
    found = [
        Source(
            0, node, p.document_id, collection, documents[p.document_id].name, p.location,
            round(best[node], 4), p.text,
        )
        for node, p in passages.items()
        if p.document_id in documents
    ]  # fmt: skip
    return sorted(found, key=lambda source: -best[source.node_id])


def scores(workspace: Workspace, question: str, count: int) -> dict[str, float]:
    """The node ids that are nearest to a question, each with its cosine similarity, best first."""
    library, collection = workspace.library, workspace.settings.collection
    embedding = workspace.embedder.embed_question(question)
    if library.count_passages(collection) <= COMPARED_PASSAGES:
        return library.nearest(collection, embedding, count)
    return {hit.node_id: hit.score for hit in workspace.index.query(embedding, count)}


def without_duplicates(sources: Sequence[Source]) -> list[Source]:
    """Each text once, at its best place: twice in the prompt it would cost twice and add nothing."""
    first: dict[str, Source] = {}
    for source in sources:
        first.setdefault(" ".join(source.text.split()), source)
    return list(first.values())


def check_askable(workspace: Workspace) -> None:
    """Raise LibraryError where there is nothing to search, UsageError for a collection that nobody made."""
    library, name = workspace.library, workspace.settings.collection
    if library.has_passages(name):
        return
    if not library.collections():
        raise LibraryError(
            f"There are no documents yet in {workspace.home.root}. Run `ragblend ingest PATH...` first, or name "
            "another --home."
        )
    check_collection(library, name)
    raise LibraryError(
        f"Answering from the collection {name!r} in {workspace.home.root}: it holds no passages. `ragblend docs list` "
        "shows what became of its documents, `ragblend collections` what else there is."
    )


def check_collection(library: Library, name: str) -> None:
    """Raise UsageError for a collection that nobody made, with those that are there."""
    known = library.collections()
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "there are none yet"
        raise UsageError(f"The collection {name!r} is unknown; {there}{did_you_mean(name, known)}")
