"""Finds passages by the words of a question: BM25 over the registry, codes and quoted phrases first."""

import logging
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import nlargest

from ragblend.app.database import WORD, indexed_words, split_words
from ragblend.app.library.registry import Library
from ragblend.app.library.stop_words import COMMON_WORDS, stop_words_in
from ragblend.kvstore.errors import LibraryError

log = logging.getLogger("ragblend")
# In quotation marks of one kind or another.
QUOTED = re.compile('"([^"]+)"|“([^”]+)”|„([^“”]+)[“”]|«([^»]+)»|»([^«]+)«|「([^」]+)」|『([^』]+)』')
MOST_WORDS = 100  # of a question that are searched
# In English questions about anything: "How long does it take?", "What does it mean?"
ASKING = frozenset("long often take takes mean means".split())  # noqa: SIM905
LONG_WORD, ENDING = 7, 2  # letters
FEW, FEW_SHARE = 3, 0.02  # the most passages, or share of them, that have a rare term
# A number or code with its parts: INV-2024-0817, 48213, 4711. A year, a round number, or a number with its unit is not
# one: passages contain them by chance.
CODE = re.compile(r"[^\W_]+(?:[-_./\u2010-\u2015][^\W_]+)*")
SHORT_CODE = re.compile(r"[A-Z]\d\d")
COMMON = re.compile(r"\d[\d.]*000|(?:1[5-9]|20)\d\d|\d+[^\W\d_]+|\d\d?[./]\d\d?")
Scores = dict[int, float]  # by a passage's number in the index


@dataclass(frozen=True)
class WordMatch:
    """How a passage matches a question's words.

    is_exact: it has a code or quoted phrase of the question; has_term: it has one of the question's terms, which few
    passages have; words: how many of its words the passage has, without those of codes and stop words; share: of these
    words, weighed by their rarity in the collections (0 to 1; 1 if there are none). Words that half of the passages
    have do not count.
    """

    is_exact: bool
    words: int
    share: float
    has_term: bool = False


def by_words(
    library: Library,
    collections: Sequence[str],
    question: str,
    count: int,
    within: Set[str] | None = None,
    terms: Set[str] = frozenset(),
) -> dict[str, WordMatch]:
    """Passages of these collections that share words with a question, best first, by node id.

    within: the only passages to return; None: all. terms: words of the question that are no common ones. Passages with
    a code or quoted phrase (`exact_parts`) come first, then the best by BM25. Words that half of the passages have are
    ignored. Other collections do not influence the score, so that it reveals nothing about them. An index that cannot
    be read is treated as empty, with a warning.
    """
    try:
        scores, words, shares, with_term = _scores(library, collections, question, terms)
        exact = _with_exact_parts(library, collections, question, count if within is None else -1)
        found = dict.fromkeys((*scores, *exact))
        if within is not None:
            numbers = library.among("SELECT id FROM numbers WHERE node_id IN", [*within])
            found = {row["id"]: None for row in numbers if row["id"] in found}
        best = nlargest(count, found, key=lambda each: (each in exact, scores[each]))
        rows = library.among("SELECT id, node_id FROM numbers WHERE id IN", best)
    except LibraryError as error:
        log.warning("searching without words: %s", error)
        return {}
    nodes = {row["id"]: row["node_id"] for row in rows}
    return {
        nodes[n]: WordMatch(n in exact, int(words[n]), shares[n], n in with_term) for n in best if n in nodes
    }


def exact_parts(question: str) -> list[str]:
    """Numbers and codes in a question that identify something, such as an invoice, and what it puts in quotes.

    A code has at least four letters or digits, or is a capital with two digits, like the error E07. If the question is
    only the code, three are enough, and a year counts.
    """
    text = unicodedata.normalize("NFKC", question)
    quoted = [each for found in QUOTED.findall(text) for each in found if len(WORD.findall(each)) > 1]
    found = [code for code in CODE.findall(text) if re.search(r"\d", code)]
    if found and len(WORD.findall(question)) == len(WORD.findall(found[0])):
        return [code for code in found if len(code) >= 3]
    codes = [
        c
        for c in found
        if (len("".join(WORD.findall(c))) >= 4 or SHORT_CODE.fullmatch(c)) and not COMMON.fullmatch(c)
    ]
    return list(dict.fromkeys([*codes, *quoted]))


def missing_codes(question: str, texts: Iterable[str]) -> list[str]:
    """The numbers and codes of a question (`exact_parts`) that none of these texts has."""
    codes = [part for part in exact_parts(question) if re.search(r"\d", part)]
    known = " | ".join(" ".join(split_words(text)) for text in texts) if codes else ""
    return [code for code in codes if f" {' '.join(split_words(code))} " not in f" {known} "]


def _scores(
    library: Library, collections: Sequence[str], question: str, terms: Set[str]
) -> tuple[Scores, Scores, Scores, set[int]]:
    """For each passage its BM25 score, and the question's words that it has: their number and share. Then the passages
    with a rare term.
    """
    scores, counts, shares = (defaultdict[int, float](float) for _ in range(3))
    whole, with_term = 0.0, set[int]()
    asked = sum(map(library.count_passages, collections))
    everywhere = library.column("SELECT count(*) FROM numbers")[0]
    # A part of a code is another code's, too.
    of_codes = {word for part in exact_parts(question) for word in split_words(part)}
    of_no_subject = COMMON_WORDS | ASKING | stop_words_in(question)
    ways = zip(split_words(question), *(indexed_words(each, question) for each in collections), strict=True)
    for plain, *words in list(dict.fromkeys(ways))[:MOST_WORDS]:  # a word, as each collection indexes it
        if plain in of_no_subject:
            continue
        forms, having = _forms(library, plain, words)
        if 2 * sum(having) >= asked:
            continue
        rarity = _rarity(sum(having), asked)
        if plain not in of_codes:
            whole += rarity
        is_rare_term = plain in terms - of_codes and sum(having) <= max(FEW, FEW_SHARE * asked)
        for form, here in zip(forms, having, strict=True):
            # FTS5 computes the rarity over all collections.
            weight = -rarity / _rarity(here, everywhere)
            query = "SELECT rowid, bm25(words) FROM words WHERE words MATCH ?"
            for number, score in library.rows(query, form) if here else ():
                scores[number] += weight * score
                if is_rare_term:
                    with_term.add(number)
                if plain not in of_codes:
                    counts[number] += 1
                    shares[number] += rarity
    if not whole:
        return scores, counts, defaultdict(lambda: 1.0), with_term
    return scores, counts, defaultdict(float, {n: share / whole for n, share in shares.items()}), with_term


def _forms(library: Library, plain: str, words: Sequence[str]) -> tuple[list[str], list[int]]:
    """How to find a word, as each collection indexes it, and how many passages have it.

    A word that no passage has is found as the beginning of longer ones: `Heizkosten` in `Heizkostenabrechnung`; or
    without an ending: `Vereinsheimdachs`.
    """
    whole, longer = [f'"{word}"' for word in words], [f'"{word}" *' for word in words]
    shorter = [f'"{word[:-ENDING]}" *' for word in words]
    forms, having = list[str](), list[int]()
    for forms in (whole, longer, shorter)[: 1 if len(plain) < LONG_WORD else None]:
        having = [library.column("SELECT count(*) FROM words WHERE words MATCH ?", form)[0] for form in forms]
        if any(having):
            break
    return forms, having


def _with_exact_parts(library: Library, collections: Sequence[str], question: str, count: int) -> set[int]:
    """Passages with a code or quoted phrase of the question, its words in order; at most `count` for each (-1: all)."""
    query = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?"
    return {
        number
        for collection in collections
        for part in exact_parts(question)[:MOST_WORDS]
        for number in library.column(query, f'"{" ".join(indexed_words(collection, part))}"', count)
    }


def _rarity(having: int, passages: int) -> float:
    """BM25's weight of a word (Robertson and Spärck Jones), as FTS5 computes it. having: passages with the word."""
    return math.log((passages - having + 0.5) / (having + 0.5))
