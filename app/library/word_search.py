"""Finds passages by the words of a question: BM25 over the registry, codes and quoted phrases first."""

import logging
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, product

from ragblend.app.database import WORD, indexed_words, split_words
from ragblend.app.library.registry import Library
from ragblend.app.library.stop_words import COMMON_WORDS, stop_words_in
from ragblend.kvstore.errors import LibraryError

log = logging.getLogger("ragblend")
# Text in any kind of quotation marks.
QUOTED = re.compile('"([^"]+)"|“([^”]+)”|„([^“”]+)[“”]|«([^»]+)»|»([^«]+)«|「([^」]+)」|『([^』]+)』')
MAX_WORDS = 100  # of a question that are searched
# Words of English questions about any subject: "How long does it take?", "What does it mean?"
QUESTION_WORDS = frozenset("long often take takes mean means".split())  # noqa: SIM905
LONG_WORD, ENDING = 7, 2  # letters
MAX_RARE, MAX_RARE_SHARE = 3, 0.02  # how many passages, or what share of them, may have a rare term
# A number or code with its parts: INV-2024-0817, 48213, 4711. Years, round numbers, and numbers with a unit or of a
# date are not codes: passages contain them by chance.
MARK = r"[-_./\u2010-\u2015]"
NO_LETTERS = "AM|PM|AUD|CAD|CHF|CNY|CZK|DKK|EUR|GBP|INR|JPY|NOK|PLN|SEK|USD"  # of a code, before a number
CODE = re.compile(  # also `CP 40`
    rf"(?:(?<![^\W_])(?!(?:{NO_LETTERS}) )(?:[A-Z]{{2,5}}|[B-HJ-Z]) (?=\d))?[^\W_]+(?:{MARK}[^\W_]+)*"
)
SHORT_CODE = re.compile(r"[A-Z] ?\d\d")
# Between letters and digits of a code, where some write a mark or a blank: `CP40`, `CP-40`, `CP 40`.
CODE_BORDER = re.compile(rf"(?<=[^\W\d_])(?:{MARK}| )?(?=\d)|(?<=\d)(?:{MARK}| )?(?=[^\W\d_])")
MAX_BORDERS = 4  # of a code that is searched in other forms
NOT_A_CODE = re.compile(r"\d[\d.]*000|(?:1[5-9]|20)\d\d|\d+[^\W\d_]+|\d\d?[./]\d\d?")
Scores = dict[int, float]  # by a passage's number in the index


@dataclass(frozen=True)
class WordMatch:
    """How a passage matches a question's words.

    is_exact: the passage has a code or quoted phrase of the question; has_term: it has one of the question's terms that
    few passages have; words: how many of the question's words it has, without those of codes and stop words; share: the
    share of these words that it has, weighted by their rarity in the collections (0 to 1; 1 if there are none). Words
    that half of the passages have do not count.
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

    within: the only passages to return; None: all. terms: words of the question that are unusual to the embedder, whose
    tokenizer cuts them into many pieces. Passages with a code or quoted phrase (`exact_parts`) come first, then the
    best by BM25. Words that half of the passages have are ignored. Other collections do not influence the score, so
    that it reveals nothing about them. An index that cannot be read is treated as empty, with a warning.
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
    """Numbers and codes in a question that identify something, such as an invoice, and its quoted phrases.

    A code has at least four letters or digits, or is a capital with two digits, like the error E07. Its letters may be
    capitals before a blank, as in `CP 40`. If the question is only the code, three are enough, and a year counts.
    """
    text = unicodedata.normalize("NFKC", question)
    quoted = [each for found in QUOTED.findall(text) for each in found if len(WORD.findall(each)) > 1]
    found = [code for code in CODE.findall(text) if re.search(r"\d", code)]
    if found and len(WORD.findall(question)) == len(WORD.findall(found[0])):
        return [code for code in found if len(code) >= 3]
    if text.isupper():  # `IN 12 MONTHS` has no code
        found = [code.rpartition(" ")[2] for code in found]
    codes = [
        c
        for c in found
        if (len("".join(WORD.findall(c))) >= 4 or SHORT_CODE.fullmatch(c))
        and not NOT_A_CODE.fullmatch(c.rpartition(" ")[2])
    ]
    return list(dict.fromkeys([*codes, *quoted]))


def missing_codes(question: str, texts: Iterable[str]) -> list[str]:
    """The numbers and codes of a question (`exact_parts`) that none of these texts has."""
    codes = [part for part in exact_parts(question) if re.search(r"\d", part)]
    known = " | ".join(" ".join(split_words(text)) for text in texts) if codes else ""
    return [
        code
        for code in codes
        if not any(f" {' '.join(split_words(form))} " in f" {known} " for form in _forms_of_code(code))
    ]


def _forms_of_code(code: str) -> list[str]:
    """A code with and without a blank between its letters and digits; of `ID 48213` also the number alone."""
    parts, number = CODE_BORDER.split(code), code.rpartition(" ")[2]
    if not CODE.fullmatch(code) or len(parts) > MAX_BORDERS + 1:
        return [code]
    gaps = product(("", " "), repeat=len(parts) - 1)
    forms = ["".join(chain(*zip(parts, (*each, ""), strict=True))) for each in gaps]
    return [*forms, number] if " " in code and len(number) >= 4 else forms


def _scores(
    library: Library, collections: Sequence[str], question: str, terms: Set[str]
) -> tuple[Scores, Scores, Scores, set[int]]:
    """For each passage its BM25 score, and the number and the weighted share of the question's words that it has; also
    the passages with a rare term.
    """
    scores, counts, shares = (defaultdict[int, float](float) for _ in range(3))
    total_rarity, with_term = 0.0, set[int]()
    passages = sum(map(library.count_passages, collections))
    everywhere = library.column("SELECT count(*) FROM numbers")[0]
    # Other codes have these parts too, so they do not count.
    of_codes = {word for part in exact_parts(question) for word in split_words(part)}
    ignored = COMMON_WORDS | QUESTION_WORDS | stop_words_in(question)
    indexed = zip(
        split_words(question), *(indexed_words(each, question) for each in collections), strict=True
    )
    for plain, *words in list(dict.fromkeys(indexed))[:MAX_WORDS]:  # a word, as each collection indexes it
        if plain in ignored:
            continue
        forms, having = _forms(library, plain, words)
        if 2 * sum(having) >= passages:
            continue
        rarity = _rarity(sum(having), passages)
        if plain not in of_codes:
            total_rarity += rarity
        is_rare_term = plain in terms - of_codes and sum(having) <= max(MAX_RARE, MAX_RARE_SHARE * passages)
        for form, here in zip(forms, having, strict=True):
            # Replace FTS5's rarity, over all collections, by that in these collections; bm25() is negative.
            weight = -rarity / _rarity(here, everywhere)
            query = "SELECT rowid, bm25(words) FROM words WHERE words MATCH ?"
            for number, score in library.rows(query, form) if here else ():
                scores[number] += weight * score
                if is_rare_term:
                    with_term.add(number)
                if plain not in of_codes:
                    counts[number] += 1
                    shares[number] += rarity
    if not total_rarity:
        return scores, counts, defaultdict(lambda: 1.0), with_term
    shares = defaultdict(float, {number: share / total_rarity for number, share in shares.items()})
    return scores, counts, shares, with_term


def _forms(library: Library, plain: str, words: Sequence[str]) -> tuple[list[str], list[int]]:
    """The queries that find a word, as each collection indexes it, and how many passages each of them finds.

    If no passage has a long word, longer words that begin with it are searched (`Heizkostenabrechnung` for
    `Heizkosten`), and then words that begin with it without its ending (`Vereinsheimdach` for `Vereinsheimdachs`).
    """
    exact, longer = [f'"{word}"' for word in words], [f'"{word}" *' for word in words]
    shorter = [f'"{word[:-ENDING]}" *' for word in words]
    forms, having = list[str](), list[int]()
    for forms in (exact, longer, shorter)[: 1 if len(plain) < LONG_WORD else None]:
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
        for part in exact_parts(question)[:MAX_WORDS]
        for number in library.column(query, _any_form(collection, part), count)
    }


def _any_form(collection: str, part: str) -> str:
    """The query that finds a code in any form, or a quoted phrase."""
    return " OR ".join(f'"{" ".join(indexed_words(collection, form))}"' for form in _forms_of_code(part))


def _rarity(having: int, passages: int) -> float:
    """BM25's weight of a word (Robertson and Spärck Jones), as FTS5 computes it. having: passages with the word."""
    return math.log((passages - having + 0.5) / (having + 0.5))
