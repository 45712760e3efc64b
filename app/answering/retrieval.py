"""Retrieval: finds the passages that answer a question best, in one or several collections, each text once.

An embedder embeds the question; the registry or Chroma finds the nearest passages, the registry also those that share
words with it. Passages unrelated to the question are left out (`relevance`). With `search = "hybrid"` both rankings are
combined, words first if the embedder does not know the documents' language; with `"vectors"` the vectors alone decide.
If the settings name a cross-encoder (`reranker`), it scores the best passages with the question and decides their
order.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.relevance import relevant_nodes
from ragblend.app.answering.support import PRONOUNS, STOP_WORDS, YEAR
from ragblend.app.database import WORD, folded, split_words
from ragblend.app.library.registry import Library, UnrelatedSimilarity
from ragblend.app.library.similarity import recorded_similarity
from ragblend.app.library.stop_words import (
    ENGLISH,
    MORE_STOP_WORDS,
    languages_of,
    languages_of_prose,
    stop_words_in,
)
from ragblend.app.library.word_search import WordMatch, by_words, exact_parts
from ragblend.app.workspace import Workspace
from ragblend.engine.prompts.dates import without_dates
from ragblend.engine.prompts.figures import FIGURE, figures_in
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import LibraryError, UsageError, did_you_mean

if TYPE_CHECKING:
    from ragblend.app.answering.rerank import CrossEncoder

# This many times top_k passages are retrieved: one that is far down in one ranking may be first in the other.
CANDIDATES_PER_RESULT = 4
ALL_WORDS = 0.99  # the `WordMatch.share` of a passage with all words of the question, but for rounding
RRF_CONSTANT = 60  # from the paper: the larger, the less the first ranks differ
# A question is joined to the previous one if some passage is about as near to both together as to the previous one
# alone, by these factors; after a change of topic none is. `python -m benchmarks.measure_search` has the table.
MIN_OF_BEFORE = 0.9
MIN_WITH_PRONOUN = 0.85  # "Translate that into German" has no topic of its own
CONTINUATION = re.compile(r"\A\W*(?:(?:what|how) about|was ist mit|and|und|et|y)\b", re.IGNORECASE)
ASKING_WORDS = frozenset(
    split_words(" ".join(("who whom whose what when where which why how", *MORE_STOP_WORDS.values())))
)
ARTICLES = frozenset(("the", "der", "die", "das", "dem", "den"))
REFERRING_WORDS = PRONOUNS | {"that", "those", "her"}
# Up to this many passages, the registry compares every vector, in about 15 ms; importing Chroma takes 0.4 s.
COMPARED_PASSAGES = 500


def search(
    workspaces: Sequence[Workspace], question: str, top_k: int, previous: str = ""
) -> list[AnswerSource]:
    """At most top_k passages of these collections that are relevant to a question, best first, without numbers.

    previous: the question before it. Raises LibraryError for a lost index, ModelError for a reranker that cannot be
    loaded.
    """
    *_, found = search_in_stages(workspaces, question, top_k, previous)
    return found


def search_in_stages(
    workspaces: Sequence[Workspace],
    question: str,
    top_k: int,
    previous: str = "",
    cancel: Cancel | None = None,
    documents: Sequence[str] = (),
) -> Iterator[list[AnswerSource]]:
    """The results of `search`, preceded by those before reranking, if there is a reranker.

    cancel: checked while a question is embedded and between the reranker's batches; Cancelled is raised once it is set.
    documents: ids of the documents to search, all of whose passages count as relevant; (): all documents.
    """
    count, within = CANDIDATES_PER_RESULT * top_k, None
    if documents:
        libraries = [workspace.library for workspace in workspaces[:1]]  # all collections share one library
        within = {node for library in libraries for each in documents for node in library.node_ids(each)}
    rank = partial(_rank, workspaces, count=count, cancel=cancel, within=within)
    rankings = _rankings(rank, question, previous)
    candidates = _interleave([*rankings.values()])[:count]
    yield candidates[:top_k]
    reranker = workspaces[0].reranker if len(candidates) > 1 else None
    if reranker is not None:
        yield _interleave([_rerank(reranker, query, candidates, cancel) for query in rankings])[:top_k]


def _rankings(
    rank: Callable[[str], list[AnswerSource]], question: str, previous: str
) -> dict[str, list[AnswerSource]]:
    """What is found for the question, and for the previous one together with it if it keeps to its topic.

    Only for both together if the question alone is incomplete.
    """
    if previous and is_incomplete(question):
        joined = f"{_without_replaced_figures(previous, question)} {question}"
        if found := rank(joined):
            return {joined: found}
    rankings = {question: rank(question)}
    if previous:
        joined = f"{previous} {question}"
        earlier, both = rank(previous), rank(joined)
        least = MIN_OF_BEFORE if REFERRING_WORDS.isdisjoint(split_words(question)) else MIN_WITH_PRONOUN
        if both and _nearest_score(both) >= least * _nearest_score(earlier):
            rankings[joined] = both
    return rankings


def is_incomplete(question: str) -> bool:
    """Whether a question has only figures, or begins with `and` or `what about` and has only figures and names.

    Without the question before it, `And in 2023?` finds whatever has this year. A code identifies what is meant, and
    what has an article is no name: German nouns are capitalised, too.
    """
    rest, empty = CONTINUATION.sub("", question), (STOP_WORDS | stop_words_in(question)) - ASKING_WORDS
    content = [word for word in WORD.findall(rest) if not word.isdigit() and folded(word) not in empty]
    if any(not YEAR.fullmatch(code) for code in exact_parts(without_dates(question))):
        return False
    if rest == question:
        return bool(figures_in(question)) and not content
    are_names = all(word[0].isupper() for word in content) and ARTICLES.isdisjoint(split_words(rest))
    return are_names and ASKING_WORDS.isdisjoint(map(folded, content))


def _without_replaced_figures(previous: str, question: str) -> str:
    """The previous question without the figures that look like those of the new one, such as its year."""

    def form(figure: str) -> str:
        return "year" if YEAR.fullmatch(figure) else re.sub(r"\d", "0", figure)

    forms = set(map(form, figures_in(question)))
    return FIGURE.sub(lambda figure: "" if form(figure[0]) in forms else figure[0], previous)


def _nearest_score(found: Sequence[AnswerSource]) -> float:
    return max((source.score for source in found), default=0.0)


def _rerank(
    reranker: "CrossEncoder", question: str, found: Sequence[AnswerSource], cancel: Cancel | None
) -> list[AnswerSource]:
    scores = reranker.scores(question, [source.text for source in found], cancel)
    return [found[at] for at in sorted(range(len(found)), key=lambda at: -scores[at])]


def _interleave(ranked: Sequence[Sequence[AnswerSource]]) -> list[AnswerSource]:
    """The first passages of all rankings, then the second ones, and so on; each text once."""
    by_rank = zip_longest(*ranked)
    return without_duplicates([each for same_rank in by_rank for each in same_rank if each is not None])


def _rank(
    workspaces: Sequence[Workspace], question: str, count: int, cancel: Cancel | None, within: Set[str] | None
) -> list[AnswerSource]:
    """The relevant passages, best first; those of collections with different embedders alternate.

    within: the node ids of the only passages to rank, all of which count as relevant; None: all passages.
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

    Passages with a code or quoted phrase of the question come first, because the user means exactly that one. Of these,
    passages with more of the question's other words come first: the same error code is in many appliances' manuals.
    """
    first, library = workspaces[0], workspaces[0].library
    scores, embedder = dict[str, float](), None
    while embedder is not first.embedder:  # repeat if another thread has replaced the embedder meanwhile
        embedder = first.embedder
        vector = embedder.embed_question(question, cancel)
        scores = library.scores([*(within or ())], vector)
        try:
            for workspace in workspaces if within is None else ():
                scores |= nearest(workspace, vector, count)
        except LibraryError:
            if embedder is first.embedder:
                raise
    measured, recorded = _measured_similarity(workspaces), recorded_similarity(first.embedder.name)
    words = dict[str, WordMatch]()
    if first.settings.search == "hybrid":
        names = [each.settings.collection for each in workspaces]
        # A multilingual embedder's tokenizer also splits common words, so its terms would not be rare ones.
        terms = embedder.terms(split_words(question), cancel) if recorded is not None else set()
        words = by_words(library, names, question, count, within, terms)
        scores |= library.scores([node for node in words if node not in scores], vector)
    sources = _sources(library, scores)
    # The recorded embedder knows English only. Its measured similarity is of passages in several languages, so the
    # recorded one is used for the English passages among foreign ones.
    foreign = _foreign_nodes(sources, question) if recorded is not None else set[str]()
    if within is None:
        found = relevant_nodes(scores, words, recorded if foreign else measured or recorded, foreign)
        sources = _drop_other_codes({node: sources[node] for node in sources if node in found}, words)
    by_nearness = sorted(sources, key=lambda node: -scores[node])
    by_word_match = [node for node in words if node in sources]
    # A recorded embedder is measured only if it does not know the documents' language.
    has_foreign_documents = recorded is not None and (measured is not None or bool(foreign))
    if has_foreign_documents and ENGLISH not in languages_of(question):  # then nearness is chance
        order = [*by_word_match, *(node for node in by_nearness if node not in words)]
    else:
        order = reciprocal_rank_fusion(by_nearness, by_word_match)
    order.sort(key=lambda node: -words[node].share if node in words and words[node].is_exact else 1)
    return [sources[node] for node in order]


def _foreign_nodes(sources: Mapping[str, AnswerSource], question: str) -> set[str]:
    """Passages that are not in English; if the question is not in English, also those in an unknown language."""
    question_languages, foreign = languages_of(question), set[str]()
    is_foreign_question = bool(question_languages) and ENGLISH not in question_languages
    for node, source in sources.items():
        languages = languages_of_prose(source.text)
        if ENGLISH not in languages and (languages or is_foreign_question):
            foreign.add(node)
    return foreign


def _drop_other_codes(
    sources: dict[str, AnswerSource], words: Mapping[str, WordMatch]
) -> dict[str, AnswerSource]:
    """Drop passages without the question's code or quoted phrase, if another has it and all its other words.

    The dropped passages are about another invoice or article, whose figures a small model would give. Passages of a
    document that has the code stay.
    """
    exact = {node for node in sources if node in words and words[node].is_exact}
    if not any(words[node].share > ALL_WORDS for node in exact):
        return sources
    documents = {sources[node].document_id for node in exact}
    return {node: each for node, each in sources.items() if node in exact or each.document_id in documents}


def _measured_similarity(workspaces: Sequence[Workspace]) -> UnrelatedSimilarity | None:
    """How similar unrelated texts are, as measured in the first of these collections that was; None if none was."""
    known = [each.library.embedder(each.settings.collection) for each in workspaces]
    return next((each.unrelated for each in known if each is not None and each.unrelated is not None), None)


def reciprocal_rank_fusion(*rankings: Sequence[str]) -> list[str]:
    """Combine rankings by reciprocal rank fusion; equal scores are ordered by the first ranking.

    Source: Cormack, Clarke and Büttcher, SIGIR 2009.
    """
    scores = defaultdict[str, float](float)
    for ranking in rankings:
        for rank, each in enumerate(ranking, start=1):
            scores[each] += 1 / (RRF_CONSTANT + rank)
    return sorted(scores, key=lambda each: -scores[each])


def nearest(workspace: Workspace, question: NDArray[np.float32], count: int) -> dict[str, float]:
    """The nearest passages of one collection with their cosine similarity, best first.

    Raises LibraryError if the index is lost.
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
        f"Answering from the collection {name!r} in {workspace.home.root}: it has no passages. `ragblend docs list` "
        "shows the state of its documents, and `ragblend collections` lists the other collections."
    )


def check_collection(library: Library, name: str) -> None:
    """Raise UsageError, with the known collections, for an unknown one."""
    known = library.collections()
    if name not in known:
        existing = f"there are {', '.join(known)}" if known else "there are none yet"
        raise UsageError(f"The collection {name!r} is unknown; {existing}{did_you_mean(name, known)}")
