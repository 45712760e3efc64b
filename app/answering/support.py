"""Decides whether a passage supports a sentence, and where: rules on words, no model. Pure functions over text.

A sentence, or each of its clauses, is compared with single sentences of the passage, not with all its words: a bag of
words supports "never under water" as well as "under water". Most of its words must be there in some form, and all
numbers and names. Missing words are taken for the answer's own wording, unless the passage uses them elsewhere (they
belong to another statement) or two are side by side (a statement of its own). A replaced word, an added or missing
negation, or two exchanged numbers make it another statement. In scripts without blanks between words (Chinese,
Japanese, Thai) all of the sentence must be there: one character more may be its negation.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Literal

from ragblend.app.database import IS_UNSPACED, SIGNS, UNSPACED, folded, split_words
from ragblend.app.library.stop_words import COMMON_WORDS, languages_of
from ragblend.engine.decoding.text import SENTENCE_END

LEAST_SHARE = 0.8  # of a sentence's words that must occur in the passage's sentence
LEAST_WORDS, MOST_WORDS = 3, 100  # fewer match by chance; more are not a sentence
MOST_NAMES = 0.25  # of the words of a text; German has more nouns
LEAST_ALIKE = 0.6  # of the letters of two forms of a word, from the first on
SHORT_LINE = 0.5  # of the longest line: a sentence ends at the end of a shorter line (headings, cells)
LETTERS = rf"(?:(?![{UNSPACED}])[^\W\d_]|[{SIGNS}])+"
TOKEN = re.compile(rf"\d+(?:[.,:]\d+)*|[{UNSPACED}]+|{LETTERS}(?:['’]{LETTERS})*")
NUMBERS = re.compile(r"\[(\d{1,4}(?:\s*[,;]\s*\d{1,4})*)\]")  # of sources, no words of a sentence
CLAUSE = re.compile(r"[,;，；、]\s*(?!\d)(?:(?:and|und|y|et) )?|\s(?:and|und|y|et)\s")
HEADING = re.compile(r"[^|:\s][^|:\n]{0,80}[^|:.;,!?。、\s]")
AMOUNT_LAST = re.compile(r"(?:\d[.,:]\d+|(?:[A-Z]{3}|[€£$]) ?\d+|\d ?[%€£$])$")
FIELD = re.compile(r"(?:^|(?<=[.;] ))(?P<key>[^\W\d][\w '’-]{1,30}): (?P<value>[^\n.;]+)", re.MULTILINE)
RECORD = re.compile(r"^[^:\n]{1,40}: [^\n]+(?:\n[^:\n]{1,40}: [^\n]+)+$", re.MULTILINE)  # a row of a table
ENDED = re.compile(r"[.!?。！？]\W*\Z")
LISTED = re.compile(r"\s*(?:[-–•*#|>]|\d{1,3}[.)]\s)")
CODE_BEFORE, CODE_AFTER = re.compile(r"\d[-/]?\Z"), re.compile(r"[-/]?\d")
STOP = COMMON_WORDS | frozenset(
    """being am done having shall might them hers theirs him i me my mine we us our these those here whom whose where
    why than then so such also into about just very own out off mr mrs ms miss dr s""".split()  # noqa: SIM905
)
# Articles, auxiliaries and the like of German, in a German text: `die` and `war` are words in English.
GERMAN_STOP = frozenset(
    """der die das des dem den ein eine einen einem einer eines ist sind war waren wird werden wurde wurden worden hat
    haben es er sie man sich und von vom zu zum zur in im an am auf für mit bei aus
    auch dass""".split()  # noqa: SIM905
)
FRAME = frozenset(  # words that an answer uses about its passages
    """according passage passages text document documents answer states stated mentioned mentions says said source
    sources information provided context""".split()  # noqa: SIM905
)
# Where a field of a form has no verb: `Stock-taking: 14 June` for "is held on 14 June".
LIGHT = frozenset("carried held scheduled takes place located".split())  # noqa: SIM905
NEGATIONS = frozenset(
    """not no never none nothing nobody nowhere neither nor cannot without hardly nicht kein keine keinen nie niemals ne
    pas jamais aucun ni nunca jamás sin non mai não не нет ни никогда nincs niet geen لا لم لن ليس नहीं न मत""".split()  # noqa: SIM905
)
PRONOUNS = frozenset("it he she they him her its his them their this these".split())  # noqa: SIM905
# A passage that says only so much does not say that it is so.
HEDGES = frozenset("may might could propose suggest plan consider expect hope intend".split())  # noqa: SIM905
PERSONS = frozenset(("he", "she"))
UNITS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen""".split()  # noqa: SIM905
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
SMALL = {word: n for n, word in enumerate(UNITS)} | {word: 10 * n for n, word in enumerate(TENS, start=2)}
GERMAN_SMALL = {
    word: n
    for n, word in enumerate("zwei drei vier fünf sechs sieben acht neun zehn elf zwölf".split(), start=2)  # noqa: SIM905
}
LARGE = {"hundred": 100, "thousand": 1000, "million": 1_000_000}
Kind = Literal["word", "name", "number", "not", "stop", "pair"]


@dataclass(frozen=True)
class Token:
    """A word for comparison: its stem, a number's digits, or a pair of neighbours in a script without blanks."""

    stem: str
    kind: Kind


@dataclass(frozen=True)
class SupportingSpan:
    """passage[start:stop] supports the sentence; share: of the sentence's words that occur there."""

    start: int
    stop: int
    share: float


def supporting(
    sentence: str, passage: str, about: str = "", least_words: int = LEAST_WORDS, before: str = ""
) -> SupportingSpan | None:
    """The sentence of the passage that supports this one, or None. about: the document's name and place; their words
    count too, as do those of the headings above.

    least_words: sentences with fewer words that say something are supported by none. before: the sentence before, which
    names whom `She` is: the passage must name one of the same.
    Of a sentence of several clauses each may be supported by another sentence; the span is that of the first.
    """
    if not is_statement(sentence, least_words):
        return None
    return (
        _span_of_all(sentence, passage, about, before)
        or _record_of(sentence, passage, about)
        or _span_of_clauses(sentence, passage, about)
    )


def _record_of(sentence: str, passage: str, about: str) -> SupportingSpan | None:
    """The record, lines of `field: value`, that supports all of the sentence.

    Figures must be in fields that the sentence names, `Saturday first: 06:53` by both words, or in values that it names
    in whole, `Line 42`. Of the fields that it names, only one may have figures: two might be exchanged.
    """
    plain = tokens(sentence)
    for start, stop, given, fields in _records(passage):
        asked = [each for each in _in_forms_of(given, plain) if each.stem not in LIGHT_STEMS]
        content, said = _content(asked), {token.stem for token in asked}
        figures = {token.stem for token in content if token.kind == "number"}
        named = [value for key, value in fields if key and key <= said and value & said]
        whole = [value for _, value in fields if len(value) > 1 and value <= said]
        with_figures = [value for value in named if value & figures and value not in whole]
        if len(with_figures) != 1 or len([*named, *whole]) < 2 or _negated(asked):
            continue
        known, there = _stems(about) | _heading_stems(passage[:start]), {token.stem for token in given}
        missing = [token for token in content if token.stem not in there | known]
        share = 1 - len(missing) / len(content)
        is_said = share >= LEAST_SHARE and all(token.kind == "word" for token in missing)
        if is_said and figures <= known.union(*named, *whole):
            return SupportingSpan(start, stop, share)
    return None


@lru_cache(maxsize=512)
def _records(passage: str) -> list[tuple[int, int, list[Token], list[tuple[set[str], set[str]]]]]:
    """(start, stop) and tokens of each record, with the stems of its fields' names, without units in brackets, and
    values.
    """

    def stems(text: str) -> set[str]:
        return {token.stem for token in _content(tokens(text))}

    found = []
    for record in RECORD.finditer(passage):
        lines = [line.partition(": ") for line in record.group().splitlines()]
        fields = [(stems(re.sub(r"\(.*?\)", "", name)), stems(value)) for name, _, value in lines]
        found.append((record.start(), record.end(), tokens(record.group()), fields))
    return found


def _span_of_clauses(sentence: str, passage: str, about: str) -> SupportingSpan | None:
    """The support of the first of several clauses, if the sentence can be cut into such as are supported each."""
    cuts = [match.span() for match in CLAUSE.finditer(sentence)]
    starts, stops = [0, *(stop for _, stop in cuts)], [*(start for start, _ in cuts), len(sentence)]
    rest_from = {len(stops)}  # what begins with this clause is supported
    for first in reversed(range(len(starts))):
        for last in range(first, len(stops)):
            clause = sentence[starts[first] : stops[last]]
            if last + 1 not in rest_from or (first, last) == (0, len(cuts)):
                continue
            if len(_content(tokens(clause))) <= LEAST_WORDS or not is_statement(clause):
                continue
            if (span := _span_of_all(clause, passage, about)) is not None:
                rest_from.add(first)
                if first == 0:
                    return span
                break
    return None


def _span_of_all(sentence: str, passage: str, about: str, before: str = "") -> SupportingSpan | None:
    """The sentence of the passage that supports all of this one, best."""
    asked = tokens(sentence)
    wanted, elsewhere = {token.stem for token in _content(asked)}, _stems(passage)
    # It says what the passage is about, and no more.
    is_topic = wanted <= _stems(about) | _heading_stems(passage) | {"1"}
    who = {each.stem for each in tokens(before) if each.kind == "name"} if asked[0].stem in PERSONS else set()
    found = list[SupportingSpan]()
    for start, stop, given in _windows(passage):
        there = {token.stem for token in given}
        if len(wanted & there) < LEAST_SHARE * len(wanted) / 2:
            continue
        known = _stems(about) | _heading_stems(passage[:start])
        said = asked
        if FIELD.match(passage, start, stop):
            known |= _form_names(passage, start)
            said = [token for token in asked if token.stem not in LIGHT_STEMS or token.stem in there]
        is_heading = is_topic and not ENDED.search(passage[start:stop])
        # A total at the end of an invoice is no heading, however short.
        if is_heading and any(each.kind == "number" and each.stem in there - _stems(about) for each in said):
            is_heading = False
        if (who and who.isdisjoint(there | known)) or is_heading:
            continue
        share = _share(said, given, known, elsewhere)
        if share >= LEAST_SHARE:
            found.append(SupportingSpan(start, stop, share))
    return max(found, key=lambda place: (place.share, place.start - place.stop), default=None)


def is_statement(sentence: str, least_words: int = LEAST_WORDS) -> bool:
    """Whether it has enough words to be supported: others match by chance, and names alone say nothing."""
    found = tokens(sentence)
    # A sentence begins with a capital, whether that is a name or not.
    says_something = any(token.kind != "name" for token in _content(found[1:]))
    return says_something and least_words <= len(_content(found)) <= MOST_WORDS


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
            if match.group()[0].isupper() and folded(match.group()) not in STOP
        ]
    return list(dict.fromkeys(found)) if len(found) <= MOST_NAMES * words else []


def _is_part_of_code(text: str, match: re.Match[str]) -> bool:
    """Whether digits are joined to the letters, as in `KX-2216` or `YO21`: figures are compared as wholes."""
    return bool(CODE_BEFORE.search(text, 0, match.start()) or CODE_AFTER.match(text, match.end()))


def sentences(text: str) -> list[tuple[int, int]]:
    """(start, stop) of each sentence without surrounding space; the end of a line ends a sentence."""
    return [piece for line in re.finditer(r"[^\n]+", text) for piece in _cut(text, line.start(), line.end())]


def tokens(text: str) -> list[Token]:
    """The text's words; numbers in words equal numbers in digits."""
    return list(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    words = list(TOKEN.finditer(unicodedata.normalize("NFKC", NUMBERS.sub("", text))))
    is_german = "german" in languages_of(text)
    stop, small = (STOP | GERMAN_STOP, SMALL | GERMAN_SMALL) if is_german else (STOP, SMALL)
    number: int | None = None
    for place, match in enumerate(words):
        word = match.group().replace("’", "'")
        plain = folded(word).removesuffix("'s")
        if plain == "one" and place and folded(words[place - 1].group()) == "no":  # as nobody: no number
            continue
        if plain in small or (plain in LARGE and number is not None):
            number = (number or 1) * LARGE[plain] if plain in LARGE else (number or 0) + small[plain]
            following = folded(words[place + 1].group()) if place + 1 < len(words) else ""
            if following not in small | LARGE and not (plain in LARGE and following == "and"):
                yield Token(str(number), "number" if number != 1 else "word")
                number = None
            continue
        if number is not None and plain == "and":
            continue
        if number is not None:
            yield Token(str(number), "number")
            number = None
        if IS_UNSPACED.match(word):
            yield from (Token(pair, "pair") for pair in split_words(word))
        else:
            yield _token(word, plain, place == 0, stop)


def _token(word: str, plain: str, begins: bool, stop: Set[str]) -> Token:
    if plain[0].isdigit():
        digits = re.sub(r",(?=\d{3})", "", plain)
        return Token(digits, "word" if digits == "1" else "number")
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


FRAME_STEMS, LIGHT_STEMS = frozenset(map(_stem, FRAME)), frozenset(map(_stem, LIGHT))
HEDGE_STEMS = frozenset(map(_stem, HEDGES)) | HEDGES


def _content(found: Sequence[Token]) -> list[Token]:
    return [token for token in found if _is_content(token)]


def _is_content(token: Token) -> bool:
    return token.kind in ("name", "number", "pair") or (
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
    return frozenset(token.stem for token in tokens(text) if token.kind != "stop")


@lru_cache(maxsize=512)
def _heading_stems(text: str) -> frozenset[str]:
    """The stems of its headings: lines marked as such, or short ones without an end."""
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


def _form_names(passage: str, start: int) -> set[str]:
    """The stems of names in the fields above a field, `Billed to: Mossley Dental`: a form is about them.

    Not those of fields that come more than once, as in records, nor of several names.
    """
    keys = Counter(field["key"] for field in FIELD.finditer(passage))
    above = (field for field in FIELD.finditer(passage, 0, start) if keys[field["key"]] == 1)
    values = (field["value"] for field in above if "," not in field["value"])
    return {token.stem for value in values for token in tokens(f"is {value}") if token.kind == "name"}


@lru_cache(maxsize=512)
def _windows(passage: str) -> list[tuple[int, int, list[Token]]]:
    """The passage's sentences, and pairs of them if the second has a pronoun for something in the first."""
    places = _passage_sentences(passage)
    found = [(start, stop, tokens(passage[start:stop])) for start, stop in places]
    pairs = [
        (first[0], second[1], [*first[2], *second[2]])
        for first, second in pairwise(found)
        if PRONOUNS & {token.stem for token in second[2][:4] if token.kind == "stop"}
    ]
    return found + pairs


def _passage_sentences(text: str) -> list[tuple[int, int]]:
    """Sentences of a text that may be wrapped: only the end of a short line, or a list item, ends one."""
    lines = [(match.start(), match.end()) for match in re.finditer(r"[^\n]*\n?", text) if match.group()]
    longest = max((stop - start for start, stop in lines), default=0)
    blocks: list[tuple[int, int]] = []
    joins = False
    for start, stop in lines:
        line = text[start:stop]
        if joins and line.strip() and not LISTED.match(line):
            blocks[-1] = (blocks[-1][0], stop)
        else:
            blocks.append((start, stop))
        joins = (
            bool(line.strip()) and not line.startswith(("#", "|")) and stop - start >= SHORT_LINE * longest
        )
    return [piece for start, stop in blocks for piece in _cut(text, start, stop)]


def _share(
    asked: Sequence[Token], given: Sequence[Token], known: frozenset[str], elsewhere: frozenset[str]
) -> float:
    """The share of the content that is given; 0 if what is given is another statement."""
    asked = _in_forms_of(given, asked)
    content, there = _content(asked), {token.stem for token in given}
    missing = [token for token in content if token.stem not in there | known]
    if any(token.kind != "word" or token.stem in elsewhere for token in missing):
        return 0.0
    if any(one in missing and other in missing for one, other in pairwise(content)):  # a clause of its own
        return 0.0
    if _pairs(asked) != _pairs(given) or _negated_otherwise(asked, given):
        return 0.0
    if _exchanged(asked, given):
        return 0.0
    if _is_hedged(given) and not (_is_hedged(asked) or any(token.stem == "can" for token in asked)):
        return 0.0
    own = [token for token in content if token.stem in there or token.stem not in known]
    if _replaced(own, _content(given)):
        return 0.0
    return 1 - len(missing) / len(content)


def _in_forms_of(given: Sequence[Token], asked: Sequence[Token]) -> list[Token]:
    """The sentence's words as the passage spells or inflects them, in any language: their letters begin alike."""
    there = {token.stem for token in given}
    words = {token.stem for token in given if token.kind in ("word", "name")}
    return [
        token
        if token.stem in there or token.kind not in ("word", "name")
        else replace(token, stem=next((each for each in words if _is_form(token.stem, each)), token.stem))
        for token in asked
    ]


def _is_form(word: str, other: str) -> bool:
    """Whether two words are forms of one: `descaled` and `descaling`, `metres` and `meters`."""
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, other, strict=False)))
    return alike >= 3 and (alike >= LEAST_ALIKE * max(len(word), len(other)) or sorted(word) == sorted(other))


def _is_hedged(found: Sequence[Token]) -> bool:
    return any(token.stem in HEDGE_STEMS for token in found if token.kind != "name")


def _pairs(found: Sequence[Token]) -> set[str]:
    return {token.stem for token in found if token.kind == "pair"}


def _negated_otherwise(asked: Sequence[Token], given: Sequence[Token]) -> bool:
    """Whether a word is negated in only one of them."""
    here, there = _negated(asked), _negated(given)
    return bool(here - there) or bool((there - here) & {token.stem for token in asked})


def _negated(found: Sequence[Token]) -> set[str]:
    """The word after each negation, or before it if there is none after it."""
    denied = set()
    for place, token in enumerate(found):
        if token.kind == "not":
            near = [*found[place + 1 :], *reversed(found[:place])]
            denied.add(next((each.stem for each in near if each.kind not in ("stop", "not")), ""))
    return denied


def _replaced(content: Sequence[Token], given: Sequence[Token]) -> bool:
    """Whether the passage has other words than the sentence between the same neighbours, or a number beside others."""
    here, there = [token.stem for token in content], [token.stem for token in given]
    beside = {*pairwise(there)}
    for how, start, stop, first, last in SequenceMatcher(None, here, there, autojunk=False).get_opcodes():
        if (
            how == "replace"
            and set(here[start:stop]).isdisjoint(there)
            and set(there[first:last]) - set(here)
        ):
            return True
        numbers = (place for place in range(start, stop) if content[place].kind == "number")
        if how != "equal" and any(
            beside.isdisjoint(pairwise(here[max(0, place - 1) : place + 2])) for place in numbers
        ):
            return True
    return False


def _exchanged(asked: Sequence[Token], given: Sequence[Token]) -> bool:
    """Whether two numbers or two names are exchanged: each is next to what the other is next to in the passage."""
    for kind in ("number", "name"):
        for step in (-1, 1):
            here, there = _beside(asked, step), _beside(given, step)
            moved = {
                (here[token.stem], there[token.stem])
                for token in asked
                if token.kind == kind and token.stem in here and token.stem in there
            }
            if any(one != other and (other, one) in moved for one, other in moved):
                return True
    return False


def _beside(found: Sequence[Token], step: int) -> dict[str, str]:
    """The word before (-1) or after (1) each word that occurs once."""
    stems = [token.stem for token in found]
    counted = Counter(stems)
    return {
        stem: stems[place + step]
        for place, stem in enumerate(stems)
        if counted[stem] == 1 and 0 <= place + step < len(stems)
    }
