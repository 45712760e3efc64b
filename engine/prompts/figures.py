"""Finds and compares figures in text: numbers, dates, amounts, codes and telephone numbers.

A figure is a word with a digit, and the words joined to it: `41`, `18,642.50`, `4-1163`, `KX-7731-B`, `0471/55821`. A
range (`1914–1918`, `9:00-17:00`) is two figures. Letters of scripts without blanks between words belong to no figure.
Comparison ignores the script and width of digits, grouped thousands (18,642 and 18642), the decimal mark, zero cents
(140,00 and 140), the length of hyphens, case, and how a date is written (`dates.py`).
Numbers in words are not figures: "twelve" is not found for 12. `figure_rows.py` finds figures in a prompt's tokens.
"""

import re
import unicodedata
from functools import lru_cache

from ragblend.engine.prompts.dates import dates_in, without_dates

_HYPHENS = dict.fromkeys(map(ord, "‐‑‒–—−"), "-")
# These patterns begin with the dash and not with a lookbehind, which is ten times faster in a long prompt.
_RANGE = re.compile(r"[–—‐‑‒-](?:(?<=\d[–—])(?=\d)|(?<=:\d\d[-‐‑‒])(?=\d{1,2}:\d\d))")
# Written with a hyphen, `12-15` and `1914-1918` may be ranges or codes.
_PAIRS = (rf"(?<=(?<![\w.,-])\d{{{n}}}-)(?=\d{{{n}}}(?![\w-]|[.,]\d))" for n in range(1, 5))
_MAYBE_RANGE = re.compile(f"-(?:{'|'.join(_PAIRS)})")
_THOUSANDS, _THOUSANDS_BY_MARKS = (
    re.compile(rf"(?<![\w.,-])\d{{1,3}}(?:[{marks}]\d{{3}})+(?!\d)") for marks in (".,'’ ", ".,'’")
)
_NO_CENTS = re.compile(r"(?<![\w.,-])(\d+)[.,]00(?!\d|[.,-]\d)")
_NON_ASCII_DIGIT = re.compile(r"(?![0-9])\d")
_UNSPACED = r"\u0e00-\u109f\u1780-\u17ff\u2e80-\U0010ffff"  # Thai to Burmese, Khmer, Chinese, Japanese
_BLANK_IN_NUMBER = re.compile(r"\d \d{3}(?!\d)")
_LETTER = rf"[^\W\d_{_UNSPACED}]"
_JOINED = rf"{_LETTER}*\d(?:\d|{_LETTER})*"  # letters and at least one digit
FIGURE = re.compile(
    rf"(?:(?<!\d|{_LETTER}){_LETTER}{{1,4}}[-/])?{_JOINED}"
    rf"(?:[.,:/'’-]{_JOINED}|[-/]{_LETTER}{{1,3}}(?!\d|{_LETTER}))*"
)
_IN_WORD = rf"[^\W{_UNSPACED}]"  # also digits, which are folded to ASCII
_WORD_BEFORE, _WORD_AFTER = re.compile(rf"({_IN_WORD}|\d[.,-])\Z"), re.compile(rf"{_IN_WORD}|[.,-]\d")
_GROUPED_BY_BLANKS = re.compile(r"(?<![\w.,-])\d{1,3}(?:[  ]\d{3})+(?!\d)")  # `18 642`
_UNIT = re.compile(rf"(\d)({_LETTER}{{1,2}})(?!\d|{_LETTER})")  # of `9th`, `41m`, `20km`
_DASHED = re.compile(r"\w[\w.,:]*(?:[–—]\w+(?:[.,:]\w+)*)+")
# `CP-40` and `CP 40` are the code `CP40`.
_CODE_BORDER = re.compile(
    r"(?<=[A-Z])-(?=\d)|(?<=\d)-(?=[A-Z])|(?:(?<=[A-Z]{2})|(?<=(?<!\w)[B-HJ-Z])) (?=\d)"
)
_CODE = re.compile(r"[A-Z][ -]?\d|\d-?[A-Z]")
_SPACED_CODE = re.compile(r"(?<!\w)(?:[A-Z]{2,}|[B-HJ-Z]) \w*\d\w*(?:[.,-]\w+)*")
_LIST_NUMBER = re.compile(r"^\s*\d{1,3}[.)]\s", re.MULTILINE)
_CITATION = re.compile(r"\[\d{1,4}(?:\s*[,;]\s*\d{1,4})*\]")


@lru_cache(maxsize=64)
def _readings(text: str) -> str:
    """The normalised readings of a text in which figures are searched, one a line.

    A range is read as two figures and as one code, `12 345` as one number and as two. Numbers in two lines or columns
    are never read as one.
    """
    folded = _folded(text)
    with_split_ranges = _RANGE.sub(" - ", folded)
    ways = (_THOUSANDS, _THOUSANDS_BY_MARKS) if _BLANK_IN_NUMBER.search(folded) else (_THOUSANDS,)
    pairs = [(reading, thousands) for reading in (with_split_ranges, folded) for thousands in ways]
    return "\n".join(dict.fromkeys(_normalised(reading, thousands) for reading, thousands in pairs))


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _normalised(folded: str, thousands: re.Pattern[str] = _THOUSANDS) -> str:
    return " ".join(plain_numbers(folded.translate(_HYPHENS), thousands).split())


def plain_numbers(text: str, thousands: re.Pattern[str] = _THOUSANDS_BY_MARKS) -> str:
    """The text with numbers as they are compared: `1.250,00` as `1250`, `٤,٥` as `4.5`."""
    text = _NON_ASCII_DIGIT.sub(lambda digit: str(unicodedata.digit(digit[0])), text)
    text = thousands.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    return re.sub(r"(?<=\d),(?=\d)", ".", _NO_CENTS.sub(r"\1", text))


def contains(text: str, figure: str) -> bool:
    """Whether the text contains the whole figure or name: 4 is not in `4-1163`, 41 not in `41.5`."""
    return (
        _occurs_in(_normalised(_folded(figure)), _readings(text))
        or (bool(_CODE.search(figure)) and _occurs_in(_folded(_joined(figure)), _readings(_joined(text))))
        or not (without_dates(figure).strip() or without_dates(figure, text).strip())
    )


def without_known(text: str, given: str) -> str:
    """The text without those of its dates, ranges and codes that the given text has in some form."""
    # The answer's `5–10` is split as a range, a passage's `5-10` is not, so dashed figures are searched unsplit first.
    for pattern in (_DASHED, _SPACED_CODE):
        text = pattern.sub(lambda found: " " if contains(given, found[0]) else found[0], text)
    return without_dates(text, given)


@lru_cache(maxsize=64)
def _joined(text: str) -> str:
    return _CODE_BORDER.sub("", unicodedata.normalize("NFKC", text).translate(_HYPHENS))


def figures_in(text: str) -> list[str]:
    """The figures of a text as written, each once, without citations and list numbers; those with blanks come first."""
    if len(_LIST_NUMBER.findall(text)) > 1:  # a single one may be `13. März`
        text = _LIST_NUMBER.sub("", text)
    plain = _RANGE.sub(" - ", unicodedata.normalize("NFKC", _CITATION.sub(" ", text))).translate(_HYPHENS)
    grouped = _GROUPED_BY_BLANKS.findall(plain)
    return list(dict.fromkeys([*grouped, *FIGURE.findall(_GROUPED_BY_BLANKS.sub(" ", plain))]))


def unsupported_figures(answer: str, given: str) -> tuple[str, ...]:
    """The figures of an answer that do not occur in the prompt's text `given` (passages, question, history)."""
    if not figures_in(answer):
        return ()
    dates, outside_dates = dates_in(given), figures_in(without_dates(answer))
    found = figures_in(without_known(answer, given))
    text = _readings(given)
    # A unit's letters may be apart or missing, in the answer and in the prompt: `41m` for `41 m`, `9th` for `9`.
    text += "\n" + _UNIT.sub(r"\1 \2", _MAYBE_RANGE.sub(" - ", text))
    spellings = {figure: _normalised(_folded(figure)) for figure in found}
    return tuple(
        figure
        for figure, spelling in spellings.items()
        if not (figure in outside_dates and f"{figure}-00-00" in dates)  # the year of a date
        and not any(_occurs_in(each, text) for each in (spelling, _UNIT.sub(r"\1", spelling)))
        and not contains(given, figure)
    )


def _occurs_in(figure: str, text: str) -> bool:
    """Whether the figure occurs in the text, and not as a part of a longer word or number."""
    return any(
        not _WORD_BEFORE.search(text[max(0, place.start() - 2) : place.start()])
        and not _WORD_AFTER.match(text, place.end())
        for place in re.finditer(re.escape(figure), text)
    )
