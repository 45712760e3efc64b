"""Dates in a text, in one form: `17.08.2024`, `August 17th, 2024` and `17. August 2024` are `2024-08-17`.

A date without a year or a day has zeros there: `0000-08-17`, `2024-08-00`. Months have English or German names. Of
`03/04/2024` it is unknown which number is the month, unless one is above 12.
"""

import re
from collections.abc import Callable, Set
from functools import lru_cache

# The English name first.
_MONTHS = [
    names.split()
    for names in (
        "January Januar Jänner Jan", "February Februar Feb", "March März Mar", "April Apr", "May Mai", "June Juni Jun",
        "July Juli Jul", "August Aug", "September Sept Sep", "October Oktober Oct Okt", "November Nov",
        "December Dezember Dec Dez",
    )
]  # fmt: skip
MONTH_NUMBERS = {
    name: number
    for number, names in enumerate(_MONTHS, start=1)
    for each in names
    for name in (each, each.upper())
}
ENGLISH_MONTHS = [names[0].lower() for names in _MONTHS]
ISO_DATE = re.compile(r"(?<!\d)(\d{4})-(0[1-9]|1[0-2])-([0-2]\d|3[01])(?!\d)")
# `12.05.2024-15.05.2024` are two dates.
_START = r"(?<![^\W_])(?<!\d[.,/:])(?:(?<!\d-)|(?<=\d{4}-))"
_END = r"(?![^\W_]|[.,/]\d|-\d(?!\d?[./]\d))"
_YEAR = r"(?P<year>1[5-9]\d\d|20\d\d)"
_NAMES = "|".join(sorted(MONTH_NUMBERS, key=len, reverse=True))
_MONTH = rf"(?P<month>{_NAMES})(?!\w|:\s?\d+(?!:?\d))"  # `Jan: 12 Feb: 15` has no date
_ORDINAL = r"(?:st|nd|rd|th)"
_DAY = rf"(?P<day>\d\d?){_ORDINAL}?"
_OTHER_DAY = rf"\d\d?(?:\.|{_ORDINAL})?"
_AND = r",?\s?(?:[–—/-]|&|and|to|und|bis)\s?"
# `5., 14. und` of `5., 14. und 15. Juni`
_EARLIER_DAYS = rf"(?P<others>(?:{_OTHER_DAY},\s){{0,9}}{_OTHER_DAY}{_AND})?"
_LATER_DAYS = rf"(?P<others>(?:,\s{_OTHER_DAY}){{0,9}}{_AND}\d\d?{_ORDINAL}?)?"
_DATES = [
    re.compile(pattern)
    for pattern in (
        rf"{_START}{_YEAR}(?P<mark>[-/.])(?P<month>\d\d?)(?P=mark){_DAY}(?:(?=T\d)|{_END})",
        rf"{_START}{_EARLIER_DAYS}{_DAY}\.\s?(?P<month>\d\d?)\.\s?{_YEAR}{_END}",
        rf"{_START}{_EARLIER_DAYS}{_DAY}\.?[\s-]?(?:of\s)?{_MONTH}(?:\.?,?[\s-]{_YEAR}{_END})?",
        # `In May 12 people came` names no day.
        rf"(?<!\b[Ii]n )(?<!\bim ){_START}{_MONTH}\.?\s{_DAY}{_LATER_DAYS}{_END}(?!:\d)(?:,?\s{_YEAR}{_END})?",
        rf"{_START}{_MONTH}\.?\s{_YEAR}{_END}",
    )
]
_SLASHED = re.compile(rf"{_START}(\d\d?)[/-](\d\d?)[/-]{_YEAR}{_END}")


def with_iso_dates(text: str) -> str:
    """The text with its dates in one form; `03/04/2024` is read with the day first."""
    return _replaced(_with_dots(text), lambda _, dates: " and ".join(dates))


def with_dates_as_in(text: str, other: str) -> str:
    """The text with `03/04/2024` as `03.04.2024`, or as `04.03.2024` if only that is a date of the other text.

    All characters keep their places.
    """
    return _with_dots(text, dates_in(_SLASHED.sub(" ", other))) if _SLASHED.search(text) else text


def without_dates(text: str, given: str | None = None) -> str:
    """The text without those of its dates that the given text has in some form (None: without all)."""
    dates = dates_in(with_dates_as_in(given, text)) if given is not None else frozenset()

    def write(written: str, found: list[str]) -> str:
        return " " if given is None or dates.issuperset(found) else written

    def write_slashed(found: re.Match[str]) -> str:
        return write(found[0], [with_iso_dates(with_dates_as_in(found[0], given or ""))])

    return _replaced(_SLASHED.sub(write_slashed, text), write)


@lru_cache(maxsize=64)
def dates_in(text: str) -> frozenset[str]:
    """The dates of a text, each also without its year or day, and only its year.

    A date without a year is also one of the text's year if the text names only one.
    """
    dates = {found.groups() for found in ISO_DATE.finditer(with_iso_dates(text))}
    years = {*re.findall(rf"{_START}{_YEAR}(?!\d)", text)}
    if len(years) == 1:
        dates |= {(*years, month, day) for year, month, day in dates if year == "0000"}
    parts = {
        each
        for year, month, day in dates
        for each in ((year, month, day), ("0000", month, day), (year, month, "00"), (year, "00", "00"))
    }
    return frozenset(map("-".join, parts)) - {"0000-00-00"}


def _replaced(text: str, write: Callable[[str, list[str]], str]) -> str:
    """The text with each date as `write(as written, dates)` returns it; `14 and 15 June` are two dates."""

    def replace(found: re.Match[str]) -> str:
        parts = found.groupdict()
        year, month = parts["year"] or "0000", parts["month"]
        days = sorted({int(parts.get("day", 0)), *map(int, re.findall(r"\d+", parts.get("others") or ""))})
        dates = [f"{year}-{MONTH_NUMBERS.get(month) or int(month):02}-{day:02}" for day in days]
        return write(found[0], dates) if all(map(ISO_DATE.fullmatch, dates)) else found[0]

    for pattern in _DATES:
        text = pattern.sub(replace, text)
    return text


def _with_dots(text: str, dates: Set[str] = frozenset()) -> str:
    """The text with `03/04/2024` as `03.04.2024`, or as `04.03.2024` if only that is in the set."""

    def write(found: re.Match[str]) -> str:
        readings = _readings(found)
        return next((each for each in readings if with_iso_dates(each) in dates), [*readings, found[0]][0])

    return _SLASHED.sub(write, text)


def _readings(slashed: re.Match[str]) -> list[str]:
    """`03/04/2024` as `03.04.2024` and `04.03.2024`; only one or none if the other is no date."""
    first, second, year = slashed.groups()
    return [f"{day}.{month}.{year}" for day, month in ((first, second), (second, first)) if int(month) <= 12]
