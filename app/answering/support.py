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
from ragblend.engine.prompts.figures import plain_numbers

LEAST_SHARE = 0.8  # of the claim's words that must occur in the evidence
LEAST_WORDS, MOST_WORDS = 3, 100  # of a claim: fewer match by chance, more are not a sentence
MOST_NAMES = 0.25  # of a text's words with a capital; where there are more, all nouns have one, as in German
LEAST_ALIKE = 0.6  # of the letters of two words, from the first on, for them to be forms of one word
MOST_STOP_WORDS = 0.25  # of a row's words
SHORT_LINE = 0.5  # of the longest line's length: a shorter line (a heading, a cell) ends a sentence
LETTERS = rf"(?:(?![{UNSPACED}])[^\W\d_]|[{SIGNS}])+"
TOKEN = re.compile(rf"\d+(?:[.,:]\d+)*|[$€£¥%]|[{UNSPACED}]+|{LETTERS}(?:['’]{LETTERS})*")
SOURCE_NUMBERS = re.compile(r"\[(\d{1,4}(?:\s*[,;]\s*\d{1,4})*)\]")  # `[2]`, `[1, 3]`: no words of the claim
CLAUSE = re.compile(r"[,;，；、]\s*(?!\d)(?:(?:and|und|y|et) )?|\s(?:and|und|y|et)\s")
HEADING = re.compile(r"[^|:\s][^|:\n]{0,80}[^|:.;,!?。、\s]")
AMOUNT_LAST = re.compile(r"(?:\d[.,:]\d+|(?:[A-Z]{3}|[€£$]) ?\d+|\d ?[%€£$])$")
AMOUNT_FIRST = re.compile(r"(?:[A-Z]{3} )?\W*\d")
FIELD = re.compile(r"(?:^|(?<=[.;] ))(?P<key>[^\W\d][\w '’-]{1,30}): (?P<value>[^\n.;]+)", re.MULTILINE)
RECORD = re.compile(r"^[^:\n]{1,40}: [^\n]+(?:\n[^:\n]{1,40}: [^\n]+)+$", re.MULTILINE)  # a row of a table
TABLE = re.compile(r"^.* \| .*(?:\n.* \| .*)+$", re.MULTILINE)  # of rows `a | b`
YEAR = re.compile(r"\b(?:1[5-9]|20)\d\d\b")
ENDS_SENTENCE = re.compile(r"[.!?。！？]\W*\Z")
# Of an answer to a question that can be answered so: it says nothing that a passage could.
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
# Articles, auxiliaries and the like of German, in a German text: `die` and `war` are words in English.
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
# Verbs that a field of a form does without: `Stock-taking: 14 June` supports "The stock-taking is held on 14 June".
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
UNITS = "one two three four five six seven eight nine".split()  # noqa: SIM905
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: SIM905
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
# German, French, Spanish, Italian, from two to twelve. _: a word that is another one elsewhere (`sept`, `once`, `due`).
OTHER_NUMBERS = {
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
SMALL = (
    {word: n for n, word in enumerate(["zero", *UNITS, *TEENS])}
    | {word: 10 * n for n, word in enumerate(TENS, start=2)}
    | OTHER_NUMBERS
)
LARGE = {"thousand": 1000, "million": 1_000_000}
# `twenty five`, `three hundred and ten`, `two million four thousand`; other words in a row are numbers of their own.
GAP = r"[\s\u2010-\u2013-]+"
AND = rf"(?:{GAP}and)?{GAP}"
BELOW_100 = (
    rf"\b(?:(?:{'|'.join(TENS)})(?:{GAP}(?:{'|'.join(UNITS)}))?|zero|{'|'.join(TEENS)}|{'|'.join(UNITS)})\b"
)
BELOW_1000 = rf"{BELOW_100}(?:{GAP}hundred\b(?:{AND}{BELOW_100}(?!{GAP}hundred\b))?)?"
NUMBER = BELOW_1000 + "".join(
    rf"(?:{GAP}{large}\b(?:{AND}{BELOW_1000}(?!{GAP}(?:hundred|{larger})\b))?)?"
    for large, larger in (("million", "million"), ("thousand", "thousand|million"))
)
# The look-ahead for the letters that they begin with makes the search three times as fast.
NUMBER_WORDS = re.compile(rf"\b(?=[efnostz]){NUMBER}", re.IGNORECASE)
OTHER_NUMBER_WORDS = re.compile(  # not those that are part of a larger one: `vingt-deux`, `treinta y dos`, `dos mil`
    rf"(?<!\w-)(?<!\by )(?<!\bet )\b(?:{'|'.join(OTHER_NUMBERS)})\b(?!-\w|\s+(?:cents?|mille|mil|mila|mill?i\w+)\b)",
    re.IGNORECASE,
)
CENTURY = re.compile(  # of a year in words: `nineteen forty-five`
    rf"\b(?=[enst])((?:six|seven|eigh|nine)teen|twenty){GAP}(?=(?:{'|'.join([*TENS, *TEENS])})\b)",
    re.IGNORECASE,
)
# Signs and codes by the stems of their words.
UNITS_OF = {
    "€": "euro", "eur": "euro", "$": "dollar", "usd": "dollar", "£": "pound", "gbp": "pound", "¥": "yen", "jpy": "yen",
    "%": "percent", "prozent": "percent",
}  # fmt: skip
ALL_UNITS = frozenset(UNITS_OF.values())
CURRENCIES = ALL_UNITS - {"percent"}
PER_CENT = re.compile(r"\bp(?:er|or|our) c(?:ent|iento|ento)\b", re.IGNORECASE)
OPPOSITES = {
    "on": ("off",), "off": ("on",), "in": ("out",), "out": ("in",), "ein": ("aus",), "an": ("aus",),
    "aus": ("ein", "an"), "auf": ("zu",), "zu": ("auf",),
}  # fmt: skip
NO_ONE = re.compile(r"\bno[\s-]one\b", re.IGNORECASE)
Kind = Literal["word", "name", "number", "unit", "sign", "not", "stop", "pair"]


@dataclass(frozen=True)
class Token:
    """A word for comparison. stem: a word's without endings, a number's digits, the word for a currency's sign or `%`,
    `not` for any negation, or two neighbouring characters in a script without blanks.
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
    sentence: str, passage: str, about: str = "", least_words: int = LEAST_WORDS, before: str = ""
) -> SupportingSpan | None:
    """The sentence of the passage that supports this one; None if none does.

    about: the document's name, and the passage's place in it; their words count as the evidence's, as do those of the
    headings above it. least_words: a sentence with fewer words of content is never supported. before: the answer's
    sentence before, which names whom `She` is: the evidence must have one of its names. The clauses of a sentence may
    each be supported by another sentence of the passage; the span is then the first clause's.
    """
    for said in dict.fromkeys((sentence, YES_OR_NO.sub("", sentence))):
        if is_statement(said, least_words) and (
            span := _span_of_all(said, passage, about, before)
            or _record_of(said, passage, about)
            or _span_of_clauses(said, passage, about)
        ):
            return span
    return None


def _record_of(sentence: str, passage: str, about: str) -> SupportingSpan | None:
    """The record, lines of `field: value`, that supports all of the sentence.

    It says what one field has, which it names (`Saturday first: 06:53` by both words), of a record that it tells by the
    whole value of another field (`Line 42`), or by words that no other record has. A field that it names and whose
    value it has not is another statement.
    """
    plain, records, elsewhere = tokens(sentence), _records(passage), _stems(passage)
    for record in records:
        claim = [each for each in _in_forms_of(record.tokens, plain) if each.stem not in LIGHT_STEMS]
        content = _content(claim)
        denied = {stem for each in record.fields for stem in each.denied}
        if not content or _negated(claim) - denied or _are_exchanged(claim, record.fields):
            continue
        others = [{token.stem for token in each.tokens} for each in records if each is not record]
        said: dict[Said, list[Set[str]]] = {how: [] for how in get_args(Said)}
        for field in record.fields:
            how, stems = _said_of(field, claim, others)
            said[how].append(stems)
        says_one = len(said["names"]) == 1 or bool(not said["names"] and said["names all"])
        found = [*said["names"], *said["names all"], *said["tells record"]]
        present = {token.stem for token in record.tokens}
        known = _stems(about) | _heading_stems(passage[: record.start]) | _currencies_for(present, elsewhere)
        missing = [token for token in content if token.stem not in present | known]
        share = 1 - len(missing) / len(content)
        misses_much = any(token.kind != "word" or token.stem in elsewhere for token in missing)
        if said["contradicts"] or not says_one or len(found) < 2 or share < LEAST_SHARE or misses_much:
            continue
        if {token.stem for token in content if token.kind == "number"} <= known.union(*found):
            return SupportingSpan(record.start, record.stop, share)
    return None


@dataclass(frozen=True)
class RecordField:
    """The stems of a field of a record: of its name without units in brackets, of its value, and of the figures in it.

    is_amount: it begins with a number, perhaps after a currency: such a value tells no record from others. denied: what
    it says not to be so, of a bare `no` the name.
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
    tokens: list[Token]
    fields: list[RecordField]


# What a claim says of a field: names it with something of its value, or with all of it; has words of it that tell this
# record from others; has another value for it; or nothing.
Said = Literal["names", "names all", "tells record", "contradicts", "nothing"]


def _said_of(field: RecordField, claim: Sequence[Token], others: Sequence[Set[str]]) -> tuple[Said, Set[str]]:
    """What the claim says of a field of a record, and by which stems. others: the stems of each other record."""
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
        how: Said = "names all" if not field.is_amount and field.value <= stems else "names"
        return how, shared | field.name  # a year may be a name
    is_whole = len(field.value) > 1 and field.value <= stems
    is_own = bool(others) and bool(shared - figures) and not any(shared <= other for other in others)
    return ("tells record" if not field.is_amount and (is_whole or is_own) else "nothing"), shared


def _are_exchanged(claim: Sequence[Token], fields: Sequence[RecordField]) -> bool:
    """Whether the claim has the names of fields in another order than their values, of amounts or of others. A value
    side by side with its name is in order.
    """
    places = {token.stem: place for place, token in reversed([*enumerate(claim)])}
    found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for field in fields:
        names = [places[stem] for stem in field.name if stem in places]
        values = [places[stem] for stem in field.value - field.name if stem in places]
        is_said = bool(names) and len(names) == len(field.name) and bool(values)
        if is_said and not {min(names) - 1, max(names) + 1} & {*values}:
            found[field.is_amount].append((min(names), min(values)))
    return any(
        [value for _, value in sorted(kind)] != sorted(value for _, value in kind) for kind in found.values()
    )


@lru_cache(maxsize=512)
def _records(passage: str) -> list[TableRecord]:
    """Each record of the passage, with its fields."""
    return [
        TableRecord(
            found.start(), found.end(), tokens(found.group()), list(map(_field, found.group().splitlines()))
        )
        for found in RECORD.finditer(passage)
    ]


def _field(line: str) -> RecordField:
    name, _, text = line.partition(": ")
    value = tokens(text)
    names = frozenset(token.stem for token in _content(tokens(re.sub(r"\(.*?\)", "", name))))
    content = _content(value)
    is_denied = any(token.kind == "not" for token in value)
    return RecordField(
        name=names,
        value=frozenset(token.stem for token in content),
        numbers=frozenset(token.stem for token in content if token.kind == "number"),
        is_amount=AMOUNT_FIRST.match(text) is not None,
        denied=(frozenset(_negated(value)) if content else names) if is_denied else frozenset(),
    )


def _span_of_clauses(sentence: str, passage: str, about: str) -> SupportingSpan | None:
    """The span of the first clause, if the sentence can be cut into clauses that are all supported."""
    cuts = [match.span() for match in CLAUSE.finditer(sentence)]
    starts, stops = [0, *(stop for _, stop in cuts)], [*(start for start, _ in cuts), len(sentence)]
    rest_from = {len(stops)}  # numbers of clauses: the sentence from there on is supported
    for first in reversed(range(len(starts))):
        for last in range(first, len(stops)):
            clause = sentence[starts[first] : stops[last]]
            if last + 1 not in rest_from or (first, last) == (0, len(cuts)):
                continue
            if sum(
                each.kind != "sign" for each in _content(tokens(clause))
            ) <= LEAST_WORDS or not is_statement(clause):
                continue
            if (span := _span_of_all(clause, passage, about)) is not None:
                rest_from.add(first)
                if first == 0:
                    return span
                break
    return None


def _span_of_all(sentence: str, passage: str, about: str, before: str = "") -> SupportingSpan | None:
    """The sentence of the passage that supports all of this one best."""
    sentence_tokens = tokens(sentence)
    wanted, elsewhere = {token.stem for token in _content(sentence_tokens)}, _stems(passage)
    # The sentence says what the passage is about, and no more.
    is_topic = wanted <= _stems(about) | _heading_stems(passage) | {"1"}
    is_of_person = sentence_tokens[0].stem in PERSONS
    persons = {each.stem for each in tokens(before) if each.kind == "name"} if is_of_person else set()
    found = list[SupportingSpan]()
    for start, stop, evidence in _candidates(passage):
        present = {token.stem for token in evidence}
        if len(wanted & present) < LEAST_SHARE * len(wanted) / 2:  # too few, in whatever form
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
            claim = [token for token in claim if token.stem not in LIGHT_STEMS or token.stem in present]
        is_heading = is_topic and not ENDS_SENTENCE.search(passage[start:stop])
        # A total at the end of an invoice is no heading, however short.
        if is_heading and any(
            each.kind == "number" and each.stem in present - _stems(about) for each in claim
        ):
            is_heading = False
        if (persons and persons.isdisjoint(present | known)) or is_heading:
            continue
        share = _share(claim, evidence, known, elsewhere)
        if share >= LEAST_SHARE:
            found.append(SupportingSpan(start, stop, share))
    return max(found, key=lambda place: (place.share, place.start - place.stop), default=None)


def is_statement(sentence: str, least_words: int = LEAST_WORDS) -> bool:
    """Whether a sentence says something that evidence could support: with fewer words it would match by chance, and
    names alone say nothing.
    """
    found = tokens(sentence)
    # A sentence begins with a capital, whether that is a name or not.
    says_something = any(token.kind != "name" for token in _content(found[1:]))
    return (
        says_something and least_words <= sum(each.kind != "sign" for each in _content(found)) <= MOST_WORDS
    )


def names(text: str) -> list[str]:
    """Names of people, places and things as written, each once; none in a language that writes all nouns like names."""
    found, words = list[str](), 0
    for start, stop in sentences(text):
        known = [match for match in TOKEN.finditer(text, start, stop) if match.group()[0].isalpha()][1:]
        known = [match for match in known if not _is_part_of_code(text, match)]
        words += len(known)
        found += [
            match.group().removesuffix("'s").removesuffix("’s")
            for match in known
            if match.group()[0].isupper() and folded(match.group()) not in STOP_WORDS | UNITS_OF.keys()
        ]
    return list(dict.fromkeys(found)) if len(found) <= MOST_NAMES * words else []


def _is_part_of_code(text: str, match: re.Match[str]) -> bool:
    """Whether digits are joined to the letters, as in `KX-2216` or `YO21`: figures are compared as wholes."""
    return bool(CODE_BEFORE.search(text, 0, match.start()) or CODE_AFTER.match(text, match.end()))


def sentences(text: str) -> list[tuple[int, int]]:
    """(start, stop) of each sentence without surrounding space; the end of a line ends a sentence."""
    return [piece for line in re.finditer(r"[^\n]+", text) for piece in _cut(text, line.start(), line.end())]


@lru_cache(maxsize=512)
def tokens(text: str) -> list[Token]:
    """The text's words; numbers in words become digits, and `one` is a word, not a number."""
    return list(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    stop = STOP_WORDS | GERMAN_STOP_WORDS if "german" in languages_of(text) else STOP_WORDS
    text = NO_ONE.sub(
        "nobody", PER_CENT.sub("%", unicodedata.normalize("NFKC", SOURCE_NUMBERS.sub("", text)))
    )
    text = number_words_to_digits(text)
    for place, match in enumerate(TOKEN.finditer(text)):
        word = match.group().replace("’", "'")
        plain = folded(word).removesuffix("'s")
        if IS_UNSPACED.match(word):
            yield from (Token(pair, "pair") for pair in split_words(word))
        else:
            yield _token(word, plain, place == 0, stop)


def number_words_to_digits(text: str) -> str:
    """The text with its numbers in words as digits."""
    text = OTHER_NUMBER_WORDS.sub(_number_to_digits, text)
    return NUMBER_WORDS.sub(_number_to_digits, CENTURY.sub(r"\1 hundred ", text))


def _number_to_digits(words: re.Match[str]) -> str:
    """A number in words as digits, apart from what is beside it: `four,five` are two numbers."""
    total = number = 0
    for word in re.findall(LETTERS, words.group().lower()):
        if word == "hundred":
            number *= 100
        elif word in LARGE:
            total, number = total + number * LARGE[word], 0
        else:
            number += SMALL.get(word, 0)  # `and` adds nothing
    return f" {total + number} "


def _token(word: str, plain: str, begins: bool, stop: Set[str]) -> Token:
    if plain[0].isdigit():
        plain = plain_numbers(plain)
        return Token(plain, "word" if plain == "1" else "number")
    if (unit := UNITS_OF.get(plain, _stem(plain))) in ALL_UNITS:
        return Token(unit, "sign" if len(plain) == 1 else "unit")
    if plain in NEGATIONS or plain.endswith("n't"):
        return Token("not", "not")
    if word[0].isupper() and not begins and plain not in stop - {"may"}:
        return Token(_stem(plain), "name")
    return Token(plain, "stop") if plain in stop else Token(_stem(plain), "word")


def _stem(word: str) -> str:
    """Remove the endings of plural and past: roughly, and in the same way for both texts."""
    for ending in ("ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 2 and not word.endswith("ss"):
            word = word.removesuffix(ending)
            break
    if len(word) > 3 and word[-1] == word[-2]:
        word = word[:-1]
    return f"{word[:-1]}i" if word.endswith("y") and len(word) > 3 else word


FRAME_STEMS, LIGHT_STEMS = frozenset(map(_stem, FRAME_WORDS)), frozenset(map(_stem, LIGHT_VERBS))
LARGE_STEMS = frozenset(map(_stem, [*LARGE, "billion"]))
HEDGE_STEMS = frozenset(map(_stem, HEDGES)) | HEDGES


def _content(found: Sequence[Token]) -> list[Token]:
    """Those that must be in the evidence: no stop words, negations or words about passages."""
    return [token for token in found if _is_content(token)]


def _is_content(token: Token) -> bool:
    return token.kind in ("name", "number", "unit", "sign", "pair") or (
        token.kind == "word" and token.stem not in FRAME_STEMS
    )


def _cut(text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """text[start:stop] at the ends of its sentences."""
    ends = [match.end() for match in SENTENCE_END.finditer(text, start, stop)]
    for first, last in zip([start, *ends], [*ends, stop], strict=True):
        piece = text[first:last]
        if piece.strip():
            yield first + len(piece) - len(piece.lstrip()), first + len(piece.rstrip())


@lru_cache(maxsize=512)
def _stems(text: str) -> frozenset[str]:
    """The stems of all its words but stop words."""
    return frozenset(token.stem for token in tokens(text) if token.kind != "stop")


@lru_cache(maxsize=512)
def _heading_stems(text: str) -> frozenset[str]:
    """The stems of its headings: lines that begin with `#`, and short ones without punctuation at the end."""
    lines = [line.strip() for line in text.splitlines()]
    short = SHORT_LINE * max(map(len, lines), default=0)
    return _stems(
        "\n".join(
            line
            for line in lines
            if line.startswith("#")
            or (len(line) < short and HEADING.fullmatch(line) and not AMOUNT_LAST.search(line))
        )
    )


def _currencies_for(present: Set[str], elsewhere: Set[str]) -> Set[str]:
    """The passage's currencies, if the evidence has none: they are said once, above a list or below it."""
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
    """The stems of the names of the columns in which the row at `start` has what the claim says of its first cell: one
    of the claim's figures, or if it has none, one of its words.
    """
    for first, last, columns in _rows(passage):
        if first <= start < last:
            if _are_exchanged(
                claim, [RecordField(*each, frozenset(), True, frozenset()) for each in columns]
            ):
                break
            said = {token.stem for token in _content(claim)} - columns[0][1]
            figures = {token.stem for token in claim if token.kind == "number"} & said
            return {stem for name, value in columns if value & (figures or said) for stem in name}
    return set()


@lru_cache(maxsize=512)
def _rows(passage: str) -> list[tuple[int, int, list[tuple[frozenset[str], frozenset[str]]]]]:
    """Each row of its tables but the first, if that has no figures but years and may name the columns: start, stop, and
    stems of each column's name and of the row's cell in it.
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
def _candidates(passage: str) -> list[tuple[int, int, list[Token]]]:
    """Start, stop and tokens of what may be evidence: the passage's sentences, and two together if the second has a
    pronoun near its beginning.
    """
    places = _passage_sentences(passage)
    found = [(start, stop, tokens(passage[start:stop])) for start, stop in places]
    pairs = [
        (first[0], second[1], [*first[2], *second[2]])
        for first, second in pairwise(found)
        if PRONOUNS & {token.stem for token in second[2][:4] if token.kind == "stop"}
    ]
    return found + pairs


def _passage_sentences(text: str) -> list[tuple[int, int]]:
    """(start, stop) of the sentences of a text whose lines may be wrapped: the end of a short line ends a sentence, as
    does the beginning of a list item, and the end of a long line does not. Rows of tables are never joined.
    """
    lines = [(match.start(), match.end()) for match in re.finditer(r"[^\n]*\n?", text) if match.group()]
    longest = max((stop - start for start, stop in lines), default=0)
    blocks: list[tuple[int, int]] = []
    joins = was_row = False
    records = [record.span() for record in RECORD.finditer(text)]
    for start, stop in lines:
        line = text[start:stop]
        has_cells, is_row = line.startswith("|") or " | " in line, _may_be_row(line.strip())
        is_field = any(first <= start < last for first, last in records)
        begins = has_cells or is_field or (was_row and is_row) or LIST_ITEM.match(line) is not None
        if joins and line.strip() and not begins:
            blocks[-1] = (blocks[-1][0], stop)
        else:
            blocks.append((start, stop))
        is_long = bool(line.strip()) and stop - start >= SHORT_LINE * longest
        joins, was_row = is_long and not has_cells and not line.startswith("#"), is_row
    return [piece for start, stop in blocks for piece in _cut(text, start, stop)]


def _may_be_row(line: str) -> bool:
    """Whether it may be a row whose columns are not marked: it has a figure, neither continues nor ends a sentence, and
    has few words of no subject.
    """
    if not line or line[0].islower() or line[-1] in ".,;:!?-" or not any(map(str.isdigit, line)):
        return False
    return stop_word_share(line) < MOST_STOP_WORDS


def _share(
    claim: Sequence[Token], evidence: Sequence[Token], known: frozenset[str], elsewhere: frozenset[str]
) -> float:
    """The share of the claim's content that the evidence has; 0 if the evidence is another statement.

    known: stems that count as the evidence's; elsewhere: those of the whole passage.
    """
    claim = _in_forms_of(evidence, claim)
    content, present = _content(claim), {token.stem for token in evidence}
    missing = [token for token in content if token.stem not in present | known]
    if any(token.kind != "word" or token.stem in elsewhere for token in missing):
        return 0.0
    if any(one in missing and other in missing for one, other in pairwise(content)):  # a clause of its own
        return 0.0
    if _character_pairs(claim) != _character_pairs(evidence) or _is_negated_otherwise(claim, evidence):
        return 0.0
    if _is_exchanged(claim, evidence) or _has_other_units(claim, evidence):
        return 0.0
    if _has_opposite_particle(claim, evidence) or _is_of_another(claim, evidence):
        return 0.0
    if _is_hedged(evidence) and not (_is_hedged(claim) or any(token.stem == "can" for token in claim)):
        return 0.0
    own = [token for token in content if token.stem in present or token.stem not in known]
    if _is_replaced(own, _content(evidence)):
        return 0.0
    return 1 - len(missing) / max(1, sum(each.kind != "sign" for each in content))


def _in_forms_of(evidence: Sequence[Token], claim: Sequence[Token]) -> list[Token]:
    """The claim's words as the evidence spells or inflects them, in any language: the first letters are the same."""
    present = {token.stem for token in evidence}
    words = {token.stem for token in evidence if token.kind in ("word", "name")}
    return [
        token
        if token.stem in present or token.kind not in ("word", "name")
        else replace(token, stem=next((each for each in words if _is_form(token.stem, each)), token.stem))
        for token in claim
    ]


def _is_form(word: str, other: str) -> bool:
    """Whether two words are forms of one: `descaled` and `descaling`, `metres` and `meters`."""
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, other, strict=False)))
    return alike >= 3 and (alike >= LEAST_ALIKE * max(len(word), len(other)) or sorted(word) == sorted(other))


def _is_hedged(found: Sequence[Token]) -> bool:
    return any(token.stem in HEDGE_STEMS for token in found if token.kind != "name")


def _character_pairs(found: Sequence[Token]) -> set[str]:
    return {token.stem for token in found if token.kind == "pair"}


def _is_negated_otherwise(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether a word is negated in only one of them."""
    in_claim, in_evidence = _negated(claim), _negated(evidence)
    return bool(in_claim - in_evidence) or bool((in_evidence - in_claim) & {token.stem for token in claim})


def _negated(found: Sequence[Token]) -> set[str]:
    """The word after each negation, or before it if there is none after it."""
    denied = set()
    for place, token in enumerate(found):
        if token.kind == "not":
            near = [*found[place + 1 :], *reversed(found[:place])]
            denied.add(next((each.stem for each in near if each.kind not in ("stop", "not")), ""))
    return denied


def _is_replaced(content: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether the evidence has other words than the claim between the same neighbours, or a number of the claim next to
    none of its neighbours.
    """
    # A unit is on either side of its number.
    content, evidence = (
        [each for each in found if each.kind not in ("unit", "sign")] for found in (content, evidence)
    )
    claimed, present = [token.stem for token in content], [token.stem for token in evidence]
    # Words may be on either side, as in `June 14`; a name between two numbers may not.
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


def _is_exchanged(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether two numbers or two names are exchanged: each is next to what the other is next to in the evidence."""
    claim, evidence = ([each for each in found if each.kind != "sign"] for found in (claim, evidence))
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
    """Whether a word is followed by `on` in one of them, and by `off` in the other, which has no `on` elsewhere."""
    ours, theirs = ({*pairwise(token.stem for token in found)} for found in (claim, evidence))
    said = {token.stem for token in evidence}
    return any(
        particle not in said and (word, other) in theirs
        for word, particle in ours - theirs
        for other in OPPOSITES.get(particle, ())
    )


def _is_of_another(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether the evidence has a number of the claim behind another word, and another number behind the claim's word:
    `ends on 1 March` of `begins on 1 March and ends on 31 May`. Numbers before their words, `8 fair`, are not moved.
    """
    ours, theirs = _words_around(claim), _words_around(evidence)
    begun, said = {before for before, _ in theirs.values()} - {""}, {token.stem for token in claim}
    if all(after for _, after in theirs.values()):
        return False
    for number in ours.keys() & theirs.keys():
        (before, after), (known_before, known_after) = ours[number], theirs[number]
        if (
            known_before
            and before != known_before
            and before in begun
            and known_before not in said
            and not (after and after == known_after)
        ):
            return True
    return False


def _words_around(found: Sequence[Token]) -> dict[str, tuple[str, str]]:
    """The words before and after each number that occurs once, or "": no names, no short or large ones such as `le` and
    `million`, none within a date (`31 mars 2027`).
    """
    digits = [token.stem[0].isdigit() for token in found]
    stems = [
        token.stem
        for n, token in enumerate(found)
        if digits[n]
        or (
            token.kind == "word"
            and len(token.stem) > 2
            and token.stem not in LARGE_STEMS
            and not (
                any(digits[n - 1 : n]) and any(digits[n + 1 : n + 2]) and YEAR.fullmatch(found[n + 1].stem)
            )
        )
    ]
    words = [n for n, stem in enumerate(stems) if not stem[0].isdigit()]
    counted = Counter(stems)
    around = {}
    for place, stem in enumerate(stems):
        if stem[0].isdigit() and counted[stem] == 1:
            at = bisect(words, place)
            around[stem] = (
                stems[words[at - 1]] if at else "",
                stems[words[at]] if at < len(words) else "",
            )
    return around


def _has_other_units(claim: Sequence[Token], evidence: Sequence[Token]) -> bool:
    """Whether a number of the claim is of another unit in the evidence."""
    units = _units(evidence)
    return any(units[number].isdisjoint(own) for number, own in _units(claim).items() if number in units)


def _units(found: Sequence[Token]) -> dict[str, set[str]]:
    """The units beside each number that has some."""
    plain = [token for token in found if token.stem not in LARGE_STEMS]
    units = defaultdict[str, set[str]](set)
    for first, second in pairwise(plain):
        if first.kind == "number" and second.kind in ("unit", "sign"):
            units[first.stem].add(second.stem)
        if second.kind == "number" and first.stem in CURRENCIES:
            units[second.stem].add(first.stem)
    return units


def _neighbours(found: Sequence[Token], step: int) -> dict[str, str]:
    """The word before (-1) or after (1) each word that occurs once."""
    stems = [token.stem for token in found]
    counted = Counter(stems)
    return {
        stem: stems[place + step]
        for place, stem in enumerate(stems)
        if counted[stem] == 1 and 0 <= place + step < len(stems)
    }
