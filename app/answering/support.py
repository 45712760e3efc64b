"""Decides whether a passage supports a sentence of an answer, and where: rules on words, no model. Pure functions.

The sentence (in the code: the *claim*), or each of its clauses, is compared with single sentences of the passage (the
*evidence*), not with all words of the passage: a bag of words supports "never under water" as well as "under water".
The evidence must have most of the claim's words in some form, and all its numbers and names. Missing words are taken
for the answer's own wording, unless the passage uses them elsewhere (they belong to another statement) or two are side
by side (a statement of its own). A replaced word, an added or missing negation, or two exchanged numbers make it
another statement. In scripts without blanks between words (Chinese, Japanese, Thai) the evidence must have all of the
claim: one character more may be its negation.
"""

import re
import unicodedata
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Literal, get_args

from ragblend.app.database import IS_UNSPACED, SIGNS, UNSPACED, folded, split_words
from ragblend.app.library.stop_words import COMMON_WORDS, languages_of, stop_word_share
from ragblend.app.library.tables import CELL_END
from ragblend.engine.decoding.text import SENTENCE_END
from ragblend.engine.prompts.dates import (
    ENGLISH_MONTHS,
    ISO_DATE,
    MONTH_NUMBERS,
    with_dates_as_in,
    with_iso_dates,
)
from ragblend.engine.prompts.figures import plain_numbers

MIN_SHARE = 0.8  # of the claim's words that must occur in the evidence
MIN_WORDS, MAX_WORDS = 3, 100  # of a claim: fewer match by chance, more are not a sentence
MAX_NAMES = 0.25  # the share of a text's words with a capital; above it all nouns have one, as in German
MIN_ALIKE = 0.6  # of the letters of two words, from the first on, for them to be forms of one word
MAX_STOP_WORDS = 0.25  # the share of stop words in a row of a table
SHORT_LINE = 0.5  # of the longest line's length: a shorter line (a heading, a cell) ends a sentence
LETTERS = rf"(?:(?![{UNSPACED}])[^\W\d_]|[{SIGNS}])+"
TOKEN = re.compile(rf"{ISO_DATE.pattern}|\d+(?:[.,:]\d+)*|[$€£¥%]|[{UNSPACED}]+|{LETTERS}(?:['’]{LETTERS})*")
SOURCE_NUMBERS = re.compile(r"\[(\d{1,4}(?:\s*[,;]\s*\d{1,4})*)\]")  # `[2]`, `[1, 3]`: not words of the claim
CLAUSE_BORDER = re.compile(r"[,;，；、]\s*(?!\d)(?:(?:and|und|y|et) )?|\s(?:and|und|y|et)\s")
HEADING = re.compile(r"[^|:\s][^|:\n]{0,80}[^|:.;,!?。、\s]")
ENDS_WITH_AMOUNT = re.compile(r"(?:\d[.,:]\d+|(?:[A-Z]{3}|[€£$]) ?\d+|\d ?[%€£$])$")
BEGINS_WITH_AMOUNT = re.compile(r"(?:[A-Z]{3} )?\W*\d")
FIELD = re.compile(r"(?:^|(?<=[.;] ))(?P<key>[^\W\d][\w '’-]{1,30}): (?P<value>[^\n.;]+)", re.MULTILINE)
# A row of a table as lines `field: value`.
RECORD = re.compile(r"^[^:\n]{1,40}: [^\n]+(?:\n[^:\n]{1,40}: [^\n]+)+$", re.MULTILINE)
TABLE = re.compile(r"^.* \| .*(?:\n.* \| .*)+$", re.MULTILINE)  # lines `a | b`
YEAR = re.compile(r"\b(?:1[5-9]|20)\d\d\b")
ENDS_SENTENCE = re.compile(r"[.!?。！？]\W*\Z")
# At the beginning of an answer to a yes-or-no question: not part of what a passage must say.
YES_OR_NO = re.compile(
    r"\A\W*(?:yes|no|ja|nein|oui|non|sí|sì|sim|não|nee|да|нет|نعم|لا|是的|不是|はい|いいえ)\W*[,，、،:–—]\s*",
    re.IGNORECASE,
)
LIST_ITEM = re.compile(r"\s*(?:[-–•*#|>]|\d{1,3}[.)]\s)")
CODE_BEFORE, CODE_AFTER = re.compile(r"\d[-/]?\Z"), re.compile(r"[-/]?\d")
STOP_WORDS = COMMON_WORDS | frozenset(  # words that need not be in the evidence
    """being am done having shall might them hers theirs him i me my mine we us our these those here whom whose where
    why than then so such also into about just very own out off mr mrs ms miss dr s""".split()  # noqa: SIM905
)
# German articles, auxiliaries and the like; only in German texts, because `die` and `war` are English words, too.
GERMAN_STOP_WORDS = frozenset(
    """der die das des dem den ein eine einen einem einer eines ist sind war waren wird werden wurde wurden worden hat
    haben es er sie man sich und von vom zu zum zur in im an am auf für mit bei aus
    auch dass""".split()  # noqa: SIM905
)
FRAME_WORDS = (
    frozenset(  # words with which an answer speaks of its passages; they need not be in the evidence
        """according passage passages text document documents answer states stated mentioned mentions says said source
    sources information provided context""".split()  # noqa: SIM905
    )
)
# Verbs that the fields of a form leave out: `Stock-taking: 14 June` supports "The stock-taking is held on 14 June".
LIGHT_VERBS = frozenset("carried held scheduled takes place located".split())  # noqa: SIM905
NEGATIONS = frozenset(
    """not no never none nothing nobody nowhere neither nor cannot without hardly nicht kein keine keinen nie niemals ne
    pas jamais aucun ni nunca jamás sin non mai não не нет ни никогда nincs niet geen لا لم لن ليس नहीं न मत""".split()  # noqa: SIM905
)
PRONOUNS = frozenset("it he she they him her its his them their this these".split())  # noqa: SIM905
# Evidence with one of these ("may close") does not support a claim without one ("closes").
HEDGES = frozenset("may might could propose suggest plan consider expect hope intend".split())  # noqa: SIM905
PERSONS = frozenset(("he", "she"))
# Number words.
ONES = "one two three four five six seven eight nine".split()  # noqa: SIM905
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: SIM905
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
# German, French, Spanish, Italian, from two to twelve. _: left out, because it is a word of another language, too
# (`sept`, `once`, `due`).
FOREIGN_NUMBERS = {
    word: n
    for words in (
        "zwei drei vier fünf sechs sieben acht neun zehn elf zwölf",
        "deux trois quatre cinq _ _ huit neuf dix onze douze",
        "dos tres cuatro cinco seis siete ocho nueve diez _ doce",
        "_ tre quattro cinque _ sette otto nove dieci undici dodici",
    )
    for n, word in enumerate(words.split(), start=2)
    if word != "_"
}
SMALL_NUMBERS = (
    {word: n for n, word in enumerate(["zero", *ONES, *TEENS])}
    | {word: 10 * n for n, word in enumerate(TENS, start=2)}
    | FOREIGN_NUMBERS
)
LARGE_NUMBERS = {"thousand": 1000, "million": 1_000_000}
# `twenty five`, `three hundred and ten`, `two million four thousand`; other number words in a row are separate numbers.
WORD_GAP = r"[\s\u2010-\u2013-]+"
WORD_GAP_WITH_AND = rf"(?:{WORD_GAP}and)?{WORD_GAP}"
BELOW_100 = rf"\b(?:(?:{'|'.join(TENS)})(?:{WORD_GAP}(?:{'|'.join(ONES)}))?|zero|{'|'.join(TEENS)}|{'|'.join(ONES)})\b"
BELOW_1000 = rf"{BELOW_100}(?:{WORD_GAP}hundred\b(?:{WORD_GAP_WITH_AND}{BELOW_100}(?!{WORD_GAP}hundred\b))?)?"
NUMBER_IN_WORDS = BELOW_1000 + "".join(
    rf"(?:{WORD_GAP}{large}\b(?:{WORD_GAP_WITH_AND}{BELOW_1000}(?!{WORD_GAP}(?:hundred|{larger})\b))?)?"
    for large, larger in (("million", "million"), ("thousand", "thousand|million"))
)
# The look-ahead for their first letters makes the search three times as fast.
NUMBER_WORDS = re.compile(rf"\b(?=[efnostz]){NUMBER_IN_WORDS}", re.IGNORECASE)
FOREIGN_NUMBER_WORDS = re.compile(  # not a part of a larger number: `vingt-deux`, `treinta y dos`, `dos mil`
    rf"(?<!\w-)(?<!\by )(?<!\bet )\b(?:{'|'.join(FOREIGN_NUMBERS)})\b(?!-\w|\s+(?:cents?|mille|mil|mila|mill?i\w+)\b)",
    re.IGNORECASE,
)
CENTURY = re.compile(  # of a year in words: `nineteen forty-five`
    rf"\b(?=[enst])((?:six|seven|eigh|nine)teen|twenty){WORD_GAP}(?=(?:{'|'.join([*TENS, *TEENS])})\b)",
    re.IGNORECASE,
)
# The stem of a unit's word, by its sign or code.
UNIT_STEMS = {
    "€": "euro", "eur": "euro", "$": "dollar", "usd": "dollar", "£": "pound", "gbp": "pound", "¥": "yen", "jpy": "yen",
    "%": "percent", "prozent": "percent",
}  # fmt: skip
ALL_UNITS = frozenset(UNIT_STEMS.values())
CURRENCIES = ALL_UNITS - {"percent"}
PER_CENT = re.compile(r"\bp(?:er|or|our) c(?:ent|iento|ento)\b", re.IGNORECASE)
OPPOSITE_PARTICLES = {
    "on": ("off",), "off": ("on",), "in": ("out",), "out": ("in",), "ein": ("aus",), "an": ("aus",),
    "aus": ("ein", "an"), "auf": ("zu",), "zu": ("auf",),
}  # fmt: skip
NO_ONE = re.compile(r"\bno[\s-]one\b", re.IGNORECASE)
Kind = Literal["word", "name", "number", "unit", "sign", "not", "stop", "pair"]


@dataclass(frozen=True)
class Token:
    """A word prepared for comparison.

    stem: the word without its endings, a number's digits, the word for a currency sign or `%`, `not` for any negation,
    or two adjacent characters in a script without blanks. kind `sign`: a unit of one character, such as `€`.
    """

    stem: str
    kind: Kind


@dataclass(frozen=True)
class SupportingSpan:
    """passage[start:stop] supports the claim; share: of the claim's words that occur there, 0 to 1."""

    start: int
    stop: int
    share: float


def supporting_span(
    sentence: str, passage: str, about: str = "", least_words: int = MIN_WORDS, before: str = ""
) -> SupportingSpan | None:
    """The sentence of the passage that supports this one; None if none does.

    about: the document's name, and the passage's place in it; their words count as the evidence's, as do those of the
    headings above it. least_words: a sentence with fewer content words is never supported. before: the answer's
    previous sentence, which says who `She` is: the evidence must have one of its names. The clauses of a sentence may
    each be supported by another sentence of the passage; the span is then the first clause's.
    """
    sentence, passage = with_dates_as_in(sentence, passage), with_dates_as_in(passage, sentence)
    for claim in dict.fromkeys((sentence, YES_OR_NO.sub("", sentence))):
        if is_statement(claim, least_words) and (
            span := _span_of_sentence(claim, passage, about, before)
            or _span_of_record(claim, passage, about)
            or _span_of_clauses(claim, passage, about)
        ):
            return span
    return None


def _span_of_record(sentence: str, passage: str, about: str) -> SupportingSpan | None:
    """The span of the record (lines of `field: value`) that supports the whole sentence.

    The sentence must name a field and have its value (for `Saturday first: 06:53` it needs both words of the name). It
    must also identify the record: by the whole value of another field (`Line 42`), or by words that no other record
    has. If it names a field of the record but not its value, the record does not support it.
    """
    plain, records, elsewhere = tokens(sentence), _records(passage), _stems(passage)
    for record in records:
        claim = [each for each in _in_forms_of(record.tokens, plain) if each.stem not in LIGHT_STEMS]
        content = _content(claim)
        denied = {stem for each in record.fields for stem in each.denied}
        if not content or _negated(claim) - denied or _are_fields_exchanged(claim, record.fields):
            continue
        others = [{token.stem for token in each.tokens} for each in records if each is not record]
        stems_by_relation: dict[Relation, list[Set[str]]] = {relation: [] for relation in get_args(Relation)}
        for field in record.fields:
            relation, stems = _relation_of(field, claim, others)
            stems_by_relation[relation].append(stems)
        named, named_with_all = stems_by_relation["names"], stems_by_relation["names with all"]
        names_a_field = len(named) == 1 or bool(not named and named_with_all)
        used = [*named, *named_with_all, *stems_by_relation["identifies record"]]
        present = {token.stem for token in record.tokens}
        known = _stems(about) | _heading_stems(passage[: record.start]) | _currencies_for(present, elsewhere)
        missing = [token for token in content if token.stem not in present | known]
        share = 1 - len(missing) / len(content)
        misses_fact = any(token.kind != "word" or token.stem in elsewhere for token in missing)
        if stems_by_relation["contradicts"] or not names_a_field or len(used) < 2:
            continue
        if share < MIN_SHARE or misses_fact:
            continue
        if {token.stem for token in content if token.kind == "number"} <= known.union(*used):
            return SupportingSpan(record.start, record.stop, share)
    return None


@dataclass(frozen=True)
class RecordField:
    """A field of a record, as stems: of its name without units in brackets, of its value, and of the value's figures.

    is_amount: the value begins with a number, perhaps after a currency; such a value does not identify a record.
    denied: the stems that the value negates; those of the name if the value is a bare `no`.
    """

    name: frozenset[str]
    value: frozenset[str]
    numbers: frozenset[str]
    is_amount: bool
    denied: frozenset[str]


@dataclass(frozen=True, eq=False)
class TableRecord:
    """A row of a table as passage[start:stop], lines of `field: value`."""

    start: int
    stop: int
    tokens: Sequence[Token]
    fields: list[RecordField]


# What a claim says about a field: its name with part of its value, or with all of it; words of its value that identify
# the record; its name with another value; or nothing.
Relation = Literal["names", "names with all", "identifies record", "contradicts", "nothing"]


def _relation_of(
    field: RecordField, claim: Sequence[Token], others: Sequence[Set[str]]
) -> tuple[Relation, Set[str]]:
    """What the claim says about a field, and by which stems. others: the stems of each of the other records."""
    content, negated = _content(claim), _negated(claim)
    stems, figures = {each.stem for each in claim}, {each.stem for each in content if each.kind == "number"}
    shared, is_named = field.value & stems, bool(field.name) and field.name <= stems
    if field.denied and not field.value:  # `Paid: no`
        if is_named and field.name & negated:
            return "names", field.name
        return ("contradicts" if field.name & stems else "nothing"), frozenset()
    if field.denied & stems - negated:
        return "contradicts", shared
    if is_named and not (field.numbers & stems if field.numbers else shared):
        return "contradicts", shared
    if is_named:
        has_all = not field.is_amount and field.value <= stems
        return ("names with all" if has_all else "names"), shared | field.name  # the name may be a year
    is_whole = len(field.value) > 1 and field.value <= stems
    is_unique = bool(others) and bool(shared - figures) and not any(shared <= other for other in others)
    return ("identifies record" if not field.is_amount and (is_whole or is_unique) else "nothing"), shared


def _are_fields_exchanged(claim: Sequence[Token], fields: Sequence[RecordField]) -> bool:
    """Whether the claim names fields in another order than it gives their values.

    Amounts and other values are ordered separately. A value directly beside its field's name is not exchanged.
    """
    places = {token.stem: place for place, token in reversed([*enumerate(claim)])}
    places_by_kind: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by is_amount
    for field in fields:
        names = [places[stem] for stem in field.name if stem in places]
        values = [places[stem] for stem in field.value - field.name if stem in places]
        is_given = bool(names) and len(names) == len(field.name) and bool(values)
        if is_given and not {min(names) - 1, max(names) + 1} & {*values}:
            places_by_kind[field.is_amount].append((min(names), min(values)))
    return any(
        [value for _, value in sorted(pairs)] != sorted(value for _, value in pairs)
        for pairs in places_by_kind.values()
    )


@lru_cache(maxsize=512)
def _records(passage: str) -> list[TableRecord]:
    """Each record of the passage, with its fields."""
    return [
        TableRecord(
            found.start(),
            found.end(),
            tokens(found.group()),
            list(map(_record_field, found.group().splitlines())),
        )
        for found in RECORD.finditer(passage)
    ]


def _record_field(line: str) -> RecordField:
    name, _, text = line.partition(": ")
    value = tokens(text)
    name_stems = frozenset(token.stem for token in _content(tokens(re.sub(r"\(.*?\)", "", name))))
    content = _content(value)
    has_negation = any(token.kind == "not" for token in value)
    return RecordField(
        name=name_stems,
        value=frozenset(token.stem for token in content),
        numbers=frozenset(token.stem for token in content if token.kind == "number"),
        is_amount=BEGINS_WITH_AMOUNT.match(text) is not None,
        denied=(frozenset(_negated(value)) if content else name_stems) if has_negation else frozenset(),
    )


def _span_of_clauses(sentence: str, passage: str, about: str) -> SupportingSpan | None:
    """The span of the first clause, if the sentence can be cut into clauses that are all supported."""
    cuts = [match.span() for match in CLAUSE_BORDER.finditer(sentence)]
    starts, stops = [0, *(stop for _, stop in cuts)], [*(start for start, _ in cuts), len(sentence)]
    supported_from = {len(stops)}  # indices of clauses from which on the rest of the sentence is supported
    for first in reversed(range(len(starts))):
        for last in range(first, len(stops)):
            clause = sentence[starts[first] : stops[last]]
            if last + 1 not in supported_from or (first, last) == (0, len(cuts)):
                continue
            if _count_words(_content(tokens(clause))) <= MIN_WORDS or not is_statement(clause):
                continue
            if (span := _span_of_sentence(clause, passage, about)) is not None:
                supported_from.add(first)
                if first == 0:
                    return span
                break
    return None


def _span_of_sentence(sentence: str, passage: str, about: str, before: str = "") -> SupportingSpan | None:
    """The sentence of the passage that supports the whole sentence best."""
    sentence_tokens = tokens(sentence)
    wanted, elsewhere = {token.stem for token in _content(sentence_tokens)}, _stems(passage)
    # The sentence says nothing but what the passage is about.
    is_topic = wanted <= _stems(about) | _heading_stems(passage) | {"1"}
    is_of_person = sentence_tokens[0].stem in PERSONS
    persons = {each.stem for each in tokens(before) if each.kind == "name"} if is_of_person else set()
    found = list[SupportingSpan]()
    for start, stop, evidence in _possible_evidence(passage):
        present = {token.stem for token in evidence}
        if len(wanted & present) < MIN_SHARE * len(wanted) / 2:  # too few, in whatever form
            continue
        known = (
            _stems(about)
            | _heading_stems(passage[:start])
            | _column_names(passage, start, sentence_tokens)
            | _currencies_for(present, elsewhere)
        )
        claim = sentence_tokens
        if FIELD.match(passage, start, stop):
            known |= _form_names(passage, start)
            claim = tuple(one for one in claim if one.stem not in LIGHT_STEMS or one.stem in present)
        is_heading = is_topic and not ENDS_SENTENCE.search(passage[start:stop])
        own_figures = {each.stem for each in claim if each.kind == "number"} & (present - _stems(about))
        if is_heading and not own_figures:  # the total of an invoice is short, but not a heading
            continue
        if persons and persons.isdisjoint(present | known):
            continue
        share = _supported_share(claim, evidence, known, elsewhere)
        if share >= MIN_SHARE:
            found.append(SupportingSpan(start, stop, share))
    return max(found, key=lambda span: (span.share, span.start - span.stop), default=None)


def is_statement(sentence: str, least_words: int = MIN_WORDS) -> bool:
    """Whether a sentence says something that evidence could support.

    With fewer words it would match by chance, and names alone say nothing.
    """
    words = tokens(sentence)
    # The first word has a capital, whether it is a name or not.
    says_something = any(token.kind != "name" for token in _content(words[1:]))
    return says_something and least_words <= _count_words(_content(words)) <= MAX_WORDS


def names(text: str) -> list[str]:
    """Names of people, places and things as written, each once; none in a language that capitalises all nouns."""
    found, word_count = list[str](), 0
    for start, stop in sentences(text):
        words = [match for match in TOKEN.finditer(text, start, stop) if match.group()[0].isalpha()][1:]
        words = [match for match in words if not _is_part_of_code(text, match)]
        word_count += len(words)
        found += [
            match.group().removesuffix("'s").removesuffix("’s")
            for match in words
            if match.group()[0].isupper() and folded(match.group()) not in STOP_WORDS | UNIT_STEMS.keys()
        ]
    return list(dict.fromkeys(found)) if len(found) <= MAX_NAMES * word_count else []


def _is_part_of_code(text: str, match: re.Match[str]) -> bool:
    """Whether digits are joined to the letters, as in `KX-2216` or `YO21`: figures are compared as wholes."""
    return bool(CODE_BEFORE.search(text, 0, match.start()) or CODE_AFTER.match(text, match.end()))


def sentences(text: str) -> list[tuple[int, int]]:
    """(start, stop) of each sentence without surrounding space; the end of a line ends a sentence."""
    return [
        piece
        for line in re.finditer(r"[^\n]+", text)
        for piece in _sentence_spans(text, line.start(), line.end())
    ]


@lru_cache(maxsize=512)
def tokens(text: str) -> tuple[Token, ...]:
    """The text's words; numbers in words become digits, and `one` is a word, not a number."""
    return tuple(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    stop_words = STOP_WORDS | GERMAN_STOP_WORDS if "german" in languages_of(text) else STOP_WORDS
    text = NO_ONE.sub(
        "nobody", PER_CENT.sub("%", unicodedata.normalize("NFKC", SOURCE_NUMBERS.sub("", text)))
    )
    text = number_words_to_digits(with_iso_dates(text))
    for place, match in enumerate(TOKEN.finditer(text)):
        word = match.group().replace("’", "'")
        plain = folded(word).removesuffix("'s")
        if IS_UNSPACED.match(word):
            yield from (Token(pair, "pair") for pair in split_words(word))
        elif date := ISO_DATE.fullmatch(word):
            yield from _date_tokens(*date.groups())
        else:
            yield _token(word, plain, place == 0, stop_words)


def _date_tokens(year: str, month: str, day: str) -> Iterator[Token]:
    """A date's day, as the whole date, then its month and its year, as far as it has them."""
    if day != "00":
        yield Token(f"{year}-{month}-{day}", "number")
    yield Token(MONTH_STEMS[int(month)], "name")
    if year != "0000":
        yield Token(year, "number")


def number_words_to_digits(text: str) -> str:
    """The text with its numbers in words as digits."""
    text = FOREIGN_NUMBER_WORDS.sub(_number_to_digits, text)
    return NUMBER_WORDS.sub(_number_to_digits, CENTURY.sub(r"\1 hundred ", text))


def _number_to_digits(words: re.Match[str]) -> str:
    """A number in words as digits between blanks, so that `four,five` stays two numbers."""
    total = number = 0
    for word in re.findall(LETTERS, words.group().lower()):
        if word == "hundred":
            number *= 100
        elif word in LARGE_NUMBERS:
            total, number = total + number * LARGE_NUMBERS[word], 0
        else:
            number += SMALL_NUMBERS.get(word, 0)  # `and` adds nothing
    return f" {total + number} "


def _token(word: str, plain: str, is_first: bool, stop_words: Set[str]) -> Token:
    """The token of a word. plain: the word in lower case without `'s`; is_first: it begins the text."""
    if plain[0].isdigit():
        plain = plain_numbers(plain)
        return Token(plain, "word" if plain == "1" else "number")
    if (unit := UNIT_STEMS.get(plain, _stem(plain))) in ALL_UNITS:
        return Token(unit, "sign" if len(plain) == 1 else "unit")
    if plain in NEGATIONS or plain.endswith("n't"):
        return Token("not", "not")
    if word[0].isupper() and not is_first and plain not in stop_words - {"may"}:
        return Token(MONTH_STEMS.get(MONTH_NUMBERS.get(word, 0), _stem(plain)), "name")
    return Token(plain, "stop") if plain in stop_words else Token(_stem(plain), "word")


def _stem(word: str) -> str:
    """Remove the endings of plural and past, roughly: it is enough that both texts are treated alike."""
    for ending in ("ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 2 and not word.endswith("ss"):
            word = word.removesuffix(ending)
            break
    if len(word) > 3 and word[-1] == word[-2]:
        word = word[:-1]
    return f"{word[:-1]}i" if word.endswith("y") and len(word) > 3 else word


FRAME_STEMS, LIGHT_STEMS = frozenset(map(_stem, FRAME_WORDS)), frozenset(map(_stem, LIGHT_VERBS))
LARGE_NUMBER_STEMS = frozenset(map(_stem, [*LARGE_NUMBERS, "billion"]))
MONTH_STEMS = dict(enumerate(map(_stem, ENGLISH_MONTHS), start=1))
HEDGE_STEMS = frozenset(map(_stem, HEDGES)) | HEDGES


def _content(words: Sequence[Token]) -> list[Token]:
    """The words that must be in the evidence: no stop words, negations or words about passages."""
    return [token for token in words if _is_content(token)]


def _count_words(content: Sequence[Token]) -> int:
    """How many of these tokens are words, not signs such as `€`."""
    return sum(token.kind != "sign" for token in content)


def _is_content(token: Token) -> bool:
    return token.kind in ("name", "number", "unit", "sign", "pair") or (
        token.kind == "word" and token.stem not in FRAME_STEMS
    )


def _sentence_spans(text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each sentence in text[start:stop]."""
    ends = [match.end() for match in SENTENCE_END.finditer(text, start, stop)]
    for first, last in zip([start, *ends], [*ends, stop], strict=True):
        piece = text[first:last]
        if piece.strip():
            yield first + len(piece) - len(piece.lstrip()), first + len(piece.rstrip())


@lru_cache(maxsize=512)
def _stems(text: str) -> frozenset[str]:
    """The stems of all words of a text except stop words."""
    return frozenset(token.stem for token in tokens(text) if token.kind != "stop")


@lru_cache(maxsize=512)
def _heading_stems(text: str) -> frozenset[str]:
    """The stems of a text's headings: lines that begin with `#`, and short lines without punctuation at the end."""
    lines = [line.strip() for line in text.splitlines()]
    short = SHORT_LINE * max(map(len, lines), default=0)
    return _stems(
        "\n".join(
            line
            for line in lines
            if line.startswith("#")
            or (len(line) < short and HEADING.fullmatch(line) and not ENDS_WITH_AMOUNT.search(line))
        )
    )


def _currencies_for(present: Set[str], elsewhere: Set[str]) -> Set[str]:
    """The passage's currencies, if the evidence has none: they are often given once, above or below a list."""
    return elsewhere & CURRENCIES if present.isdisjoint(CURRENCIES) else frozenset()


def _form_names(passage: str, start: int) -> set[str]:
    """The stems of names in the form's fields above `start`, `Billed to: Mossley Dental`: the form is about them.

    Fields that occur more than once, as in records, are left out, as are those with several names.
    """
    keys = Counter(field["key"] for field in FIELD.finditer(passage))
    above = (field for field in FIELD.finditer(passage, 0, start) if keys[field["key"]] == 1)
    values = (field["value"] for field in above if "," not in field["value"])
    return {token.stem for value in values for token in tokens(f"is {value}") if token.kind == "name"}


def _column_names(passage: str, start: int, claim: Sequence[Token]) -> set[str]:
    """For a row of a table at `start`: the stems of the names of those columns whose cells the claim uses.

    The claim uses a cell with one of its figures, or, if it has no figures, with one of its words. The first cell, the
    row's name, does not count.
    """
    for first, last, columns in _rows(passage):
        if first <= start < last:
            if _are_fields_exchanged(
                claim, [RecordField(*each, frozenset(), True, frozenset()) for each in columns]
            ):
                break
            words = {token.stem for token in _content(claim)} - columns[0][1]
            figures = _numbers(claim) & words
            return {stem for name, value in columns if value & (figures or words) for stem in name}
    return set()


@lru_cache(maxsize=512)
def _rows(passage: str) -> list[tuple[int, int, list[tuple[frozenset[str], frozenset[str]]]]]:
    """Rows of tables whose first row may name the columns, because years are its only figures.

    For each row below it: start, stop, and for each column the stems of its name and of the row's cell.
    """
    found = []
    for table in TABLE.finditer(passage):
        header, *lines = re.finditer(r"[^\n]+", table.group())
        if re.search(r"\d", YEAR.sub("", header.group())):
            continue
        names = [_stems(cell) for cell in CELL_END.split(header.group())]
        for line in lines:
            cells = [_stems(cell) for cell in CELL_END.split(line.group())]
            start = table.start() + line.start()
            found.append((start, table.start() + line.end(), list(zip(names, cells, strict=False))))
    return found


@lru_cache(maxsize=512)
def _possible_evidence(passage: str) -> list[tuple[int, int, tuple[Token, ...]]]:
    """Start, stop and tokens of the passage's sentences, and of pairs whose second has a pronoun near its start."""
    places = _passage_sentences(passage)
    found = [(start, stop, tokens(passage[start:stop])) for start, stop in places]
    pairs = [
        (first[0], second[1], (*first[2], *second[2]))
        for first, second in pairwise(found)
        if PRONOUNS & {token.stem for token in second[2][:4] if token.kind == "stop"}
    ]
    return found + pairs


def _passage_sentences(text: str) -> list[tuple[int, int]]:
    """(start, stop) of the sentences of a text whose lines may be wrapped.

    The end of a short line ends a sentence, the end of a long line does not. A list item begins a sentence. Rows of
    tables are never joined.
    """
    lines = [(match.start(), match.end()) for match in re.finditer(r"[^\n]*\n?", text) if match.group()]
    longest = max((stop - start for start, stop in lines), default=0)
    blocks: list[tuple[int, int]] = []
    may_continue = was_row = False
    records = [record.span() for record in RECORD.finditer(text)]
    for start, stop in lines:
        line = text[start:stop]
        has_cells, is_row = line.startswith("|") or " | " in line, _may_be_row(line.strip())
        is_field = any(first <= start < last for first, last in records)
        begins_block = has_cells or is_field or (was_row and is_row) or LIST_ITEM.match(line) is not None
        if may_continue and line.strip() and not begins_block:
            blocks[-1] = (blocks[-1][0], stop)
        else:
            blocks.append((start, stop))
        is_long = bool(line.strip()) and stop - start >= SHORT_LINE * longest
        may_continue, was_row = is_long and not has_cells and not line.startswith("#"), is_row
    return [piece for start, stop in blocks for piece in _sentence_spans(text, start, stop)]


def _may_be_row(line: str) -> bool:
    """Whether a line may be a row of a table without column marks.

    Such a line has a figure and few stop words, and neither continues nor ends a sentence.
    """
    if not line or line[0].islower() or line[-1] in ".,;:!?-" or not any(map(str.isdigit, line)):
        return False
    return stop_word_share(line) < MAX_STOP_WORDS


def _supported_share(
    claim: Sequence[Token], evidence: Sequence[Token], known: frozenset[str], elsewhere: frozenset[str]
) -> float:
    """The share of the claim's content that the evidence has; 0 if the evidence is another statement.

    known: other stems that count as the evidence's; elsewhere: the stems of the whole passage.
    """
    claim = _in_forms_of(evidence, claim)
    content, present = _content(claim), {token.stem for token in evidence}
    missing = [token for token in content if token.stem not in present | known]
    if any(token.kind != "word" or token.stem in elsewhere for token in missing):
        return 0.0
    if any(one in missing and other in missing for one, other in pairwise(content)):  # a statement of its own
        return 0.0
    if _character_pairs(claim) != _character_pairs(evidence) or _is_negation_different(claim, evidence):
        return 0.0
    if (
        _are_exchanged(claim, evidence)
        or _has_other_units(claim, evidence)
        or _is_of_other_year(claim, evidence)
    ):
        return 0.0
    if _has_opposite_particle(claim, evidence) or _is_number_moved(claim, evidence):
        return 0.0
    if _is_hedged(evidence) and not (_is_hedged(claim) or any(token.stem == "can" for token in claim)):
        return 0.0
    own = [token for token in content if token.stem in present or token.stem not in known]
    if _is_word_replaced(own, _content(evidence)):
        return 0.0
    return 1 - len(missing) / max(1, _count_words(content))


def _in_forms_of(evidence: Sequence[Token], claim: Sequence[Token]) -> list[Token]:
    """The claim's words in the evidence's spelling and inflection, in any language, by their common first letters."""
    present = {token.stem for token in evidence}
    words = {token.stem for token in evidence if token.kind in ("word", "name")}
    years = {each for each in _numbers(evidence) | _numbers(claim) if YEAR.fullmatch(each)}

    def form_of(token: Token) -> str:
        if ISO_DATE.fullmatch(token.stem):
            return next((each for each in present if _is_same_day(token.stem, each, years)), token.stem)
        is_word = token.kind in ("word", "name")
        return next(
            (each for each in words if is_word and _are_forms_of_one_word(token.stem, each)), token.stem
        )

    return [token if token.stem in present else replace(token, stem=form_of(token)) for token in claim]


def _is_same_day(date: str, other: str, years: Set[str]) -> bool:
    """Whether only one of two dates has a year, and no other year stands beside them."""
    first, second = sorted((date, other))
    return first == f"0000{second[4:]}" and years <= {second[:4]}


def _numbers(words: Sequence[Token]) -> set[str]:
    """The stems of numbers, without the years of whole dates."""
    numbers = {token.stem for token in words if token.kind == "number"}
    return numbers - {number[:4] for number in numbers if ISO_DATE.fullmatch(number)}


def _are_forms_of_one_word(word: str, other: str) -> bool:
    """Whether two words are forms of one: `descaled` and `descaling`, `metres` and `meters`."""
    common_letters = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, other, strict=False))
    )
    share_beginning = common_letters >= MIN_ALIKE * max(len(word), len(other))
    return common_letters >= 3 and (share_beginning or sorted(word) == sorted(other))


def _is_hedged(words: Sequence[Token]) -> bool:
    return any(token.stem in HEDGE_STEMS for token in words if token.kind != "name")


def _character_pairs(words: Sequence[Token]) -> set[str]:
    return {token.stem for token in words if token.kind == "pair"}


def _is_negation_different(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether a word is negated in the claim and not in the evidence, or the other way round."""
    in_claim, in_evidence = _negated(claim), _negated(evidence)
    return bool(in_claim - in_evidence) or bool((in_evidence - in_claim) & {token.stem for token in claim})


def _negated(words: Sequence[Token]) -> set[str]:
    """The stems of negated words: the word after each negation, or the one before it if none follows."""
    negated = set()
    for place, token in enumerate(words):
        if token.kind == "not":
            near = [*words[place + 1 :], *reversed(words[:place])]
            negated.add(next((each.stem for each in near if each.kind not in ("stop", "not")), ""))
    return negated


def _is_word_replaced(content: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether the evidence has other words than the claim between the same neighbours, or a number of the claim next to
    none of its neighbours.
    """
    # A unit may stand on either side of its number, so units are ignored.
    content, evidence = (
        [each for each in words if each.kind not in ("unit", "sign")] for words in (content, evidence)
    )
    claimed, present = [token.stem for token in content], [token.stem for token in evidence]
    # A word may stand on either side of its number, as in `June 14`, but not a name between two numbers.
    neighbours = {*pairwise(present)}
    for left, token, right in zip(["", *present], evidence, [*present[1:], ""], strict=False):
        follows, precedes = left[:1].isdigit(), right[:1].isdigit() and not YEAR.fullmatch(right)
        if not token.stem[0].isdigit() and (token.kind != "name" or follows != precedes):
            neighbours |= {(token.stem, left), (right, token.stem)}
    for how, start, stop, first, last in SequenceMatcher(
        None, claimed, present, autojunk=False
    ).get_opcodes():
        if (
            how == "replace"
            and set(claimed[start:stop]).isdisjoint(present)
            and set(present[first:last]) - set(claimed)
        ):
            return True
        numbers = (place for place in range(start, stop) if content[place].kind == "number")
        if how != "equal" and any(
            neighbours.isdisjoint(pairwise(claimed[max(0, place - 1) : place + 2])) for place in numbers
        ):
            return True
    return False


def _are_exchanged(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether two numbers or two names are exchanged: each has the neighbour that the other has in the evidence."""
    claim, evidence = ([each for each in words if each.kind != "sign"] for words in (claim, evidence))
    for kind in ("number", "name"):
        for step in (-1, 1):
            in_claim, in_evidence = _neighbours(claim, step), _neighbours(evidence, step)
            moved = {
                (in_claim[token.stem], in_evidence[token.stem])
                for token in claim
                if token.kind == kind and token.stem in in_claim and token.stem in in_evidence
            }
            if any(one != other and (other, one) in moved for one, other in moved):
                return True
    return False


def _has_opposite_particle(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether a word is followed by `on` in the claim, and by `off` in the evidence, which has no `on` elsewhere."""
    in_claim, in_evidence = ({*pairwise(token.stem for token in words)} for words in (claim, evidence))
    evidence_stems = {token.stem for token in evidence}
    return any(
        particle not in evidence_stems and (word, other) in in_evidence
        for word, particle in in_claim - in_evidence
        for other in OPPOSITE_PARTICLES.get(particle, ())
    )


def _is_number_moved(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether the evidence has the claim's number after another word, and another number after the claim's word.

    An example is the claim `ends on 1 March` and the evidence `begins on 1 March and ends on 31 May`. A number with the
    same word after it, as in `8 fair`, is not moved.
    """
    in_claim, in_evidence = _words_around(claim), _words_around(evidence)
    words_before_numbers = {before for before, _ in in_evidence.values()} - {""}
    claim_stems = {token.stem for token in claim}
    if all(after for _, after in in_evidence.values()):
        return False
    for number in in_claim.keys() & in_evidence.keys():
        (before, after), (evidence_before, evidence_after) = in_claim[number], in_evidence[number]
        if (
            evidence_before
            and before != evidence_before
            and before in words_before_numbers
            and evidence_before not in claim_stems
            and not (after and after == evidence_after)
        ):
            return True
    return False


def _words_around(words: Sequence[Token]) -> dict[str, tuple[str, str]]:
    """The words before and after each number that occurs once; "" if there is none.

    Left out are names, short words such as `le`, large numbers such as `million`, and words within a date (`31 mars
    2027`).
    """
    digits = [token.stem[0].isdigit() for token in words]
    stems = [
        token.stem
        for n, token in enumerate(words)
        if digits[n]
        or (
            token.kind == "word"
            and len(token.stem) > 2
            and token.stem not in LARGE_NUMBER_STEMS
            and not (
                any(digits[n - 1 : n]) and any(digits[n + 1 : n + 2]) and YEAR.fullmatch(words[n + 1].stem)
            )
        )
    ]
    word_places = [place for place, stem in enumerate(stems) if not stem[0].isdigit()]
    counted = Counter(stems)
    around = {}
    for place, stem in enumerate(stems):
        if stem[0].isdigit() and counted[stem] == 1:
            following = bisect(word_places, place)
            around[stem] = (
                stems[word_places[following - 1]] if following else "",
                stems[word_places[following]] if following < len(word_places) else "",
            )
    return around


def _has_other_units(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether a number of the claim has other units in the evidence."""
    units = _units(evidence)
    return any(units[number].isdisjoint(own) for number, own in _units(claim).items() if number in units)


def _is_of_other_year(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether a month of the claim has another year in the evidence, and its year another month."""
    in_claim, in_evidence = (
        {
            (one.stem, other.stem)
            for one, other in pairwise(words)
            if YEAR.fullmatch(other.stem) and one.stem in MONTH_STEMS.values()
        }
        for words in (claim, evidence)
    )
    months, years = {month for month, _ in in_evidence}, {year for _, year in in_evidence}
    return any(month in months and year in years for month, year in in_claim - in_evidence)


def _units(words: Sequence[Token]) -> dict[str, set[str]]:
    """The units beside each number that has any."""
    plain = [token for token in words if token.stem not in LARGE_NUMBER_STEMS]
    units = defaultdict[str, set[str]](set)
    for first, second in pairwise(plain):
        if first.kind == "number" and second.kind in ("unit", "sign"):
            units[first.stem].add(second.stem)
        if second.kind == "number" and first.stem in CURRENCIES:
            units[second.stem].add(first.stem)
    return units


def _neighbours(words: Sequence[Token], step: int) -> dict[str, str]:
    """The word before (step -1) or after (step 1) each word that occurs once."""
    stems = [token.stem for token in words]
    counted = Counter(stems)
    return {
        stem: stems[place + step]
        for place, stem in enumerate(stems)
        if counted[stem] == 1 and 0 <= place + step < len(stems)
    }
