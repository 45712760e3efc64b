"""Retrieval: finds the passages that answer a question best, in one or several collections, each text once.

An embedder embeds the question; the registry or Chroma finds the nearest passages, the registry those that share its
words. What is unrelated to the question is left out (`relevance`). Both rankings are combined (`search = "hybrid"`),
words before vectors if the embedder does not know the documents' language, or the vectors alone decide (`"vectors"`).
A cross-encoder, if the settings name one (`reranker`), scores the best of them with the question and decides their
order.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.relevance import relevant
from ragblend.app.answering.support import PRONOUNS
from ragblend.app.database import split_words
from ragblend.app.library.registry import Library, UnrelatedSimilarity
from ragblend.app.library.similarity import recorded_similarity
from ragblend.app.library.stop_words import ENGLISH, languages_of, languages_of_prose
from ragblend.app.library.word_search import WordMatch, by_words
from ragblend.app.workspace import Workspace
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import LibraryError, UsageError, did_you_mean

if TYPE_CHECKING:
    from ragblend.app.answering.rerank import CrossEncoder

# Ask for this many times top_k passages: what is far down in one ranking may be on top in the other.
DEPTH = 4
ALL_WORDS = 0.99  # of the question's words, by rarity, but for rounding
RANK_CONSTANT = 60  # the paper's: the larger, the less the first ranks differ
# A question is joined to the one before it if both together are as near to a passage as that one was alone: a change of
# topic leads away from it. `python -m benchmarks.measure_search` has the table.
LEAST_OF_BEFORE = 0.9
LEAST_WITH_PRONOUN = 0.85  # "Translate that into German" says nothing of its own
POINTING = PRONOUNS | {"that", "those", "her"}
# Up to so many passages the registry compares every vector, in about 15 ms; importing Chroma takes 0.4 s.
COMPARED_PASSAGES = 500


def search(
    workspaces: Sequence[Workspace], question: str, top_k: int, before: str = ""
) -> list[AnswerSource]:
    """At most top_k passages of these collections that have to do with a question, best first, without numbers.

    before: the question before it. Raises LibraryError for a lost index, ModelError for a reranker that cannot be
    loaded.
    """
    *_, found = search_in_stages(workspaces, question, top_k, before)
    return found


def search_in_stages(
    workspaces: Sequence[Workspace],
    question: str,
    top_k: int,
    before: str = "",
    cancel: Cancel | None = None,
    documents: Sequence[str] = (),
) -> Iterator[list[AnswerSource]]:
    """The results of `search`, preceded by those before reranking, if there is a reranker.

    cancel: checked while a question is embedded and between the reranker's batches; Cancelled is raised once it is set.
    documents: ids of the documents to search, all of whose passages count as relevant; (): all documents.
    """
    queries, count = [question], DEPTH * top_k
    within = None
    if documents:
        within = {
            node for first in workspaces[:1] for name in documents for node in first.library.node_ids(name)
        }
    rank = partial(_rank, workspaces, count=count, cancel=cancel, within=within)
    ranked = [rank(question)]
    if before:
        joined = f"{before} {question}"
        earlier, both = rank(before), rank(joined)
        least = LEAST_OF_BEFORE if POINTING.isdisjoint(split_words(question)) else LEAST_WITH_PRONOUN
        if both and _nearest_score(both) >= least * _nearest_score(earlier):
            queries.append(joined)
            ranked.append(both)
    found = _interleave(ranked)[:count]
    yield found[:top_k]
    reranker = workspaces[0].reranker if len(found) > 1 else None
    if reranker is not None:
        yield _interleave([_rerank(reranker, query, found, cancel) for query in queries])[:top_k]


def _nearest_score(found: Sequence[AnswerSource]) -> float:
    return max((source.score for source in found), default=0.0)


def _rerank(
    reranker: "CrossEncoder", question: str, found: Sequence[AnswerSource], cancel: Cancel | None
) -> list[AnswerSource]:
    scores = reranker.scores(question, [source.text for source in found], cancel)
    return [found[at] for at in sorted(range(len(found)), key=lambda at: -scores[at])]


def _interleave(ranked: Sequence[Sequence[AnswerSource]]) -> list[AnswerSource]:
    """The first passage of each ranking, then the second ones; each text once."""
    return without_duplicates([each for place in zip_longest(*ranked) for each in place if each is not None])


def _rank(
    workspaces: Sequence[Workspace], question: str, count: int, cancel: Cancel | None, within: Set[str] | None
) -> list[AnswerSource]:
    """The relevant passages, best first; those of collections with different embedders alternate.

    within: the only passages that count, by node id; None: all do.
    """
    by_embedder = defaultdict[str, list[Workspace]](list)
    for workspace in workspaces:
        by_embedder[workspace.embedder_name].append(workspace)
    return _interleave(
        [_rank_together(group, question, count, cancel, within) for group in by_embedder.values()]
    )


def _rank_together(
    workspaces: Sequence[Workspace], question: str, count: int, cancel: Cancel | None, within: Set[str] | None
) -> list[AnswerSource]:
    """The relevant passages of collections with one embedder, in the combined order of vectors and words.

    Those with a code or quoted phrase of the question come first, the more of its other words the sooner: who asks
    for one means exactly that, and an error code stands in the manual of each appliance.
    """
    first, library = workspaces[0], workspaces[0].library
    scores, embedder = dict[str, float](), None
    while embedder is not first.embedder:  # again if another thread has replaced the embedder meanwhile
        embedder = first.embedder
        vector = embedder.embed_question(question, cancel)
        scores = library.scores([*(within or ())], vector)
        try:
            for workspace in workspaces if within is None else ():
                scores |= nearest(workspace, vector, count)
        except LibraryError:
            if embedder is first.embedder:
                raise
    measured, recorded = _measured(workspaces), recorded_similarity(first.embedder.name)
    words = dict[str, WordMatch]()
    if first.settings.search == "hybrid":
        names = [each.settings.collection for each in workspaces]
        # Another tokenizer knows words of many languages, and fewer of each.
        terms = embedder.terms(split_words(question), cancel) if recorded is not None else set()
        words = by_words(library, names, question, count, within, terms)
        scores |= library.scores([node for node in words if node not in scores], vector)
    sources = _sources(library, scores)
    # The recorded embedder knows English only, and what was measured is of passages in several languages.
    foreign = _foreign(sources, question) if recorded is not None else set[str]()
    if within is None:
        found = relevant(scores, words, recorded if foreign else measured or recorded, foreign)
        sources = _about_the_code({node: sources[node] for node in sources if node in found}, words)
    by_nearness = sorted(sources, key=lambda node: -scores[node])
    in_order = [node for node in words if node in sources]
    # In another language its order is chance; it is measured only where it does not know the documents' language.
    if recorded is not None and (measured is not None or foreign) and ENGLISH not in languages_of(question):
        order = [*in_order, *(node for node in by_nearness if node not in words)]
    else:
        order = reciprocal_rank_fusion(by_nearness, in_order)
    order.sort(key=lambda node: -words[node].share if node in words and words[node].is_exact else 1)
    return [sources[node] for node in order]


def _foreign(sources: Mapping[str, AnswerSource], question: str) -> set[str]:
    """The passages that are not in English; if the question is not either, also those of an unknown language."""
    asked, others = languages_of(question), set[str]()
    for node, source in sources.items():
        languages = languages_of_prose(source.text)
        if ENGLISH not in languages and (languages or (asked and ENGLISH not in asked)):
            others.add(node)
    return others


def _about_the_code(
    sources: dict[str, AnswerSource], words: Mapping[str, WordMatch]
) -> dict[str, AnswerSource]:
    """Without passages that lack the question's code or quoted phrase, if one has it and all the other words too.

    Those are about another invoice or article, and a small model takes its figures. Other passages of the same
    document stay.
    """
    exact = {node for node in sources if node in words and words[node].is_exact}
    if not any(words[node].share > ALL_WORDS for node in exact):
        return sources
    documents = {sources[node].document_id for node in exact}
    return {node: each for node, each in sources.items() if node in exact or each.document_id in documents}


def _measured(workspaces: Sequence[Workspace]) -> UnrelatedSimilarity | None:
    """How similar unrelated texts are, as measured in one of these collections; None if it was in none."""
    known = [each.library.embedder(each.settings.collection) for each in workspaces]
    return next((each.unrelated for each in known if each is not None and each.unrelated is not None), None)


def reciprocal_rank_fusion(*rankings: Sequence[str]) -> list[str]:
    """Combine rankings by reciprocal rank fusion; equal scores are ordered by the first ranking.

    Source: Cormack, Clarke and Büttcher, SIGIR 2009.
    """
    scores = defaultdict[str, float](float)
    for ranking in rankings:
        for rank, each in enumerate(ranking, start=1):
            scores[each] += 1 / (RANK_CONSTANT + rank)
    return sorted(scores, key=lambda each: -scores[each])


def nearest(workspace: Workspace, question: NDArray[np.float32], count: int) -> dict[str, float]:
    """The nearest passages of one collection with their cosine similarity, best first. Raises LibraryError if the index
    is lost.
    """
    library, collection = workspace.library, workspace.settings.collection
    if library.count_passages(collection) <= COMPARED_PASSAGES:
        found = library.nearest(collection, question, count)
    else:
        found = {hit.node_id: hit.score for hit in workspace.index.query(question, count)}
    if not found and not library.counts_by_state(collection)["pending"]:
        raise LibraryError(
            f"Searching the collection {collection!r} in {workspace.home.root}: its index is empty, but the registry "
            "has passages. Run `ragblend store repair` to rebuild the index."
        )
    return found


def _sources(library: Library, scores: Mapping[str, float]) -> dict[str, AnswerSource]:
    """The sources for these node ids; scores: their cosine similarity to the question."""
    passages = library.passages(list(scores))
    documents = library.documents_with([passage.document_id for passage in passages.values()])
    return {
        node: AnswerSource.of(documents[passage.document_id], passage, scores[node])
        for node, passage in passages.items()
        if passage.document_id in documents
    }


def without_duplicates(sources: Sequence[AnswerSource]) -> list[AnswerSource]:
    """Each text once, at its best rank: a second copy in the prompt would cost time and add nothing."""
    first: dict[str, AnswerSource] = {}
    for source in sources:
        first.setdefault(" ".join(source.text.split()), source)
    return list(first.values())


def check_askable(workspace: Workspace) -> None:
    """Raise LibraryError if there is nothing to search, UsageError for an unknown collection."""
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
    """Raise UsageError, with the known collections, for an unknown one."""
    known = library.collections()
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "there are none yet"
        raise UsageError(f"The collection {name!r} is unknown; {there}{did_you_mean(name, known)}")
