"""A question -> the passages that answer it best, in one collection or several, each text once.

MiniLM reads the question; the registry or Chroma has the ids of what is near, the registry those that share its words,
and the texts.
Both orders are put together (`search = "hybrid"`), or nearness alone decides (`"vectors"`). A cross-encoder, if the
settings name one (`reranker`), reads the best of them beside the question and has the last word on their order.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.library.registry import Library
from ragblend.app.workspace import Workspace
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import LibraryError, UsageError, did_you_mean

if TYPE_CHECKING:
    from ragblend.app.answering.rerank import CrossEncoder

# Ask for this many times more than wanted: what is far down in one order may be on top in the other.
DEEP = 4
RANK_CONSTANT = 60  # how little the first ranks are apart; that of the paper
# Of so few passages the registry compares every vector, in some 15 ms. Importing Chroma takes a process 0.4 s.
COMPARED_PASSAGES = 500


def search(
    workspaces: Sequence[Workspace], ways: Sequence[str], top_k: int, least_score: float
) -> list[AnswerSource]:
    """At most top_k passages of these collections, best first, without numbers yet.

    ways: the question as it is and perhaps otherwise; each way gives every second passage. Raises LibraryError for a
    lost index, ModelError for a reranker that cannot be loaded.
    """
    *_, found = search_in_stages(workspaces, ways, top_k, least_score)
    return found


def search_in_stages(
    workspaces: Sequence[Workspace],
    ways: Sequence[str],
    top_k: int,
    least_score: float,
    cancel: Cancel | None = None,
) -> Iterator[list[AnswerSource]]:
    """What `search` finds; before it what is found without the reranker, if one has something to order.

    cancel: asked while a question is embedded; Cancelled is raised once it is set.
    """
    ranked = [_ranked(workspaces, way, DEEP * top_k, least_score, cancel) for way in ways]
    found = _mixed(ranked)[: DEEP * top_k]
    yield found[:top_k]
    reranker = workspaces[0].reranker if len(found) > 1 else None
    if reranker is not None:
        yield _mixed([_reranked(reranker, way, found) for way in ways])[:top_k]


def _reranked(reranker: "CrossEncoder", question: str, found: Sequence[AnswerSource]) -> list[AnswerSource]:
    scores = reranker.scores(question, [source.text for source in found])
    return [found[at] for at in sorted(range(len(found)), key=lambda at: -scores[at])]


def _mixed(ranked: Sequence[Sequence[AnswerSource]]) -> list[AnswerSource]:
    """The first of each ranking, then the second ones; each text once."""
    return without_duplicates([each for place in zip_longest(*ranked) for each in place if each is not None])


def _ranked(
    workspaces: Sequence[Workspace], question: str, count: int, least_score: float, cancel: Cancel | None
) -> list[AnswerSource]:
    """Those that are near enough, in the order that nearness and words give together.

    A word alone brings none: one that a question shares by chance would make an answer to what nothing here is about.
    A number or code does, of which an embedder knows nothing and which somebody who asks for it means exactly.
    """
    if not workspaces:
        return []
    first = workspaces[0]
    library, vector = first.library, first.embedder.embed_question(question, cancel)
    scores = dict[str, float]()
    for workspace in workspaces:
        scores |= nearest(workspace, vector, count)
    words = dict[str, bool]()
    if first.settings.search == "hybrid":
        words = library.by_words([each.settings.collection for each in workspaces], question, count)
        scores |= library.scores([node for node in words if node not in scores], vector)
    found = {node: score for node, score in scores.items() if score >= least_score or words.get(node)}
    sources = _sources(library, found)
    by_nearness = sorted(sources, key=lambda node: -scores[node])
    return [sources[node] for node in fused(by_nearness, [node for node in words if node in sources])]


def fused(*rankings: Sequence[str]) -> list[str]:
    """Reciprocal rank fusion: the best of all rankings first; of equals what an earlier ranking has first.

    Source: Cormack, Clarke and Büttcher, SIGIR 2009.
    """
    scores = defaultdict[str, float](float)
    for ranking in rankings:
        for rank, each in enumerate(ranking, start=1):
            scores[each] += 1 / (RANK_CONSTANT + rank)
    return sorted(scores, key=lambda each: -scores[each])


def nearest(workspace: Workspace, question: NDArray[np.float32], count: int) -> dict[str, float]:
    """Of one collection, each with its cosine similarity, best first. Raises LibraryError for a lost index."""
    library, collection = workspace.library, workspace.settings.collection
    if library.count_passages(collection) <= COMPARED_PASSAGES:
        found = library.nearest(collection, question, count)
    else:
        found = {hit.node_id: hit.score for hit in workspace.index.query(question, count)}
    if not found and not library.counts_by_state(collection)["pending"]:
        raise LibraryError(
            f"Searching the collection {collection!r} in {workspace.home.root}: its index is empty, but the registry "
            "holds passages. Run `ragblend store repair` to build the index again."
        )
    return found


def _sources(library: Library, scores: Mapping[str, float]) -> dict[str, AnswerSource]:
    """What the registry has of these, by node id; scores: their cosine similarity to the question."""
    passages = library.passages(list(scores))
    documents = library.documents_with([passage.document_id for passage in passages.values()])
    return {
        node: AnswerSource(
            0, node, p.document_id, documents[p.document_id].collection, documents[p.document_id].name, p.location,
            round(scores[node], 4), p.text,
        )
        for node, p in passages.items()
        if p.document_id in documents
    }  # fmt: skip


def without_duplicates(sources: Sequence[AnswerSource]) -> list[AnswerSource]:
    """Each text once, at its best place: twice in the prompt it would cost twice and add nothing."""
    first: dict[str, AnswerSource] = {}
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
