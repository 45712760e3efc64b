"""Finds and compares figures in text: numbers, dates, amounts, codes and telephone numbers.

A figure is a word with a digit, and the words joined to it: `41`, `18,642.50`, `4-1163`, `KX-7731-B`, `0471/55821`. A
range (`1914–1918`, `9:00-17:00`) is two, and letters of scripts without blanks between words belong to none.
Comparison ignores scripts and widths of digits, grouped thousands (18,642 and 18642), the mark of decimals, cents that
are none (140,00 and 140), lengths of hyphens, and case.
Numbers in words are not figures: "twelve" is not found for 12. `figure_rows.py` finds figures in a prompt's tokens.
"""

import re
import unicodedata
from functools import lru_cache

_HYPHENS = dict.fromkeys(map(ord, "‐‑‒–—−"), "-")
# These begin with the dash and not with a lookbehind, which makes them ten times faster in a long prompt.
_RANGE = re.compile(r"[–—‐‑‒-](?:(?<=\d[–—])(?=\d)|(?<=:\d\d[-‐‑‒])(?=\d{1,2}:\d\d))")
# Written with a hyphen, `12-15` and `1914-1918` may be ranges or codes.
_PAIRS = (rf"(?<=(?<![\w.,-])\d{{{n}}}-)(?=\d{{{n}}}(?![\w-]|[.,]\d))" for n in range(1, 5))
_MAYBE_RANGE = re.compile(f"-(?:{'|'.join(_PAIRS)})")
_THOUSANDS, _THOUSANDS_BY_MARKS = (
    re.compile(rf"(?<![\w.,-])\d{{1,3}}(?:[{marks}]\d{{3}})+(?!\d)") for marks in (".,'’ ", ".,'’")
)
_NO_CENTS = re.compile(r"(?<![\w.,-])(\d+)[.,]00(?!\d|[.,-]\d)")
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_WITHOUT_BLANKS = r"\u0e00-\u109f\u1780-\u17ff\u2e80-\U0010ffff"  # Thai to Burmese, Khmer, Chinese, Japanese
_BY_BLANK = re.compile(r"\d \d{3}(?!\d)")
_LETTER = rf"[^\W\d_{_WITHOUT_BLANKS}]"
_JOINED = rf"{_LETTER}*\d(?:\d|{_LETTER})*"  # letters and at least one digit
FIGURE = re.compile(
    rf"(?:(?<!\d|{_LETTER}){_LETTER}{{1,4}}[-/])?{_JOINED}"
    rf"(?:[.,:/'’-]{_JOINED}|[-/]{_LETTER}{{1,3}}(?!\d|{_LETTER}))*"
)
_IN_WORD = rf"[^\W{_WITHOUT_BLANKS}]"  # also digits, which are folded to ASCII
_BEGINS_BEFORE, _GOES_ON = re.compile(rf"({_IN_WORD}|\d[.,-])\Z"), re.compile(rf"{_IN_WORD}|[.,-]\d")
_GROUPED = re.compile(r"(?<![\w.,-])\d{1,3}(?:[  ]\d{3})+(?!\d)")  # by blanks: `18 642`
_UNIT = re.compile(rf"(\d)({_LETTER}{{1,2}})(?!\d|{_LETTER})")  # of `9th`, `41m`, `20km`
_DASHED = re.compile(r"\w[\w.,:]*(?:[–—]\w+(?:[.,:]\w+)*)+")
_LIST_NUMBER = re.compile(r"^\s*\d{1,3}[.)]\s", re.MULTILINE)
_CITATION = re.compile(r"\[\d{1,4}(?:\s*[,;]\s*\d{1,4})*\]")


@lru_cache(maxsize=64)
def _readings(text: str) -> str:
    """The forms of a text in which figures are compared, one a line.

    Ranges are apart, or one code; `12 345` is one number or two. Numbers of two lines or columns are never one.
    """
    folded = _folded(text)
    apart = _RANGE.sub(" - ", folded)
    marks = (_THOUSANDS, _THOUSANDS_BY_MARKS) if _BY_BLANK.search(folded) else (_THOUSANDS,)
    pairs = [(form, mark) for form in (apart, folded) for mark in marks]
    return "\n".join(dict.fromkeys(_normalised(form, mark) for form, mark in pairs))


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _normalised(folded: str, thousands: re.Pattern[str] = _THOUSANDS) -> str:
    return " ".join(plain_numbers(folded.translate(_HYPHENS), thousands).split())


def plain_numbers(text: str, thousands: re.Pattern[str] = _THOUSANDS_BY_MARKS) -> str:
    """The text with numbers as they are compared: `1.250,00` as `1250`, `٤,٥` as `4.5`."""
    text = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.digit(digit[0])), text)
    text = thousands.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    return re.sub(r"(?<=\d),(?=\d)", ".", _NO_CENTS.sub(r"\1", text))


def contains(text: str, figure: str) -> bool:
    """Whether the text contains the whole figure or name: 4 is not in `4-1163`, 41 not in `41.5`."""
    return _occurs_in(_normalised(_folded(figure)), _readings(text))


def figures_in(text: str) -> list[str]:
    """The figures of a text as written, each once, in order; without citations and list numbers."""
    if len(_LIST_NUMBER.findall(text)) > 1:  # one alone may be `13. März`
        text = _LIST_NUMBER.sub("", text)
    plain = _RANGE.sub(" - ", unicodedata.normalize("NFKC", _CITATION.sub(" ", text))).translate(_HYPHENS)
    grouped = _GROUPED.findall(plain)
    return list(dict.fromkeys([*grouped, *FIGURE.findall(_GROUPED.sub(" ", plain))]))


def unsupported_figures(answer: str, given: str) -> tuple[str, ...]:
    """The figures of an answer that do not occur in the prompt's text `given` (passages, question, history)."""
    # `5–10` is split as a range, but `5-10` in a passage is not: such an answer is first searched for as a whole.
    answer = _DASHED.sub(lambda whole: " " if contains(given, whole[0]) else whole[0], answer)
    found = figures_in(answer)
    if not found:
        return ()
    text = _readings(given)
    # With or without the letters of a unit after it, here and there: `41m` for `41 m`, `9th` for `9`.
    text += "\n" + _UNIT.sub(r"\1 \2", _MAYBE_RANGE.sub(" - ", text))
    spellings = {figure: _normalised(_folded(figure)) for figure in found}
    return tuple(
        figure
        for figure, spelling in spellings.items()
        if not any(_occurs_in(each, text) for each in (spelling, _UNIT.sub(r"\1", spelling)))
    )


def _occurs_in(figure: str, text: str) -> bool:
    return any(
        not _BEGINS_BEFORE.search(text[max(0, place.start() - 2) : place.start()])
        and not _GOES_ON.match(text, place.end())
        for place in re.finditer(re.escape(figure), text)
    )
