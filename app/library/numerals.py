"""Writes the numbers of list items as letters or Roman numerals, by the names of DOCX's number formats."""

from collections.abc import Callable

ROMAN = {
    1000: "m",
    900: "cm",
    500: "d",
    400: "cd",
    100: "c",
    90: "xc",
    50: "l",
    40: "xl",
    10: "x",
    9: "ix",
    5: "v",
    4: "iv",
    1: "i",
}
MAX_NUMERAL = 10_000  # a higher number, which a damaged file may have, is written in digits


def parse_number(text: str, default: int) -> int:
    """The number in decimal digits; the default for any other text, and for ten digits or more."""
    return int(text) if text.isdecimal() and len(text) < 10 else default


def numeral(count: int, number_format: str) -> str:
    """The number in this format; in digits if the format is unknown."""
    write = NUMBER_FORMATS.get(number_format, str)
    return write(count) if count < MAX_NUMERAL else str(count)


def _letters(count: int) -> str:
    """a to z, then aa, bb and so on, as Word does."""
    return chr(ord("a") + (count - 1) % 26) * ((count - 1) // 26 + 1) if count > 0 else ""


def _roman(count: int) -> str:
    text = ""
    for size, letters in ROMAN.items():
        text, count = text + letters * (count // size), count % size
    return text


NUMBER_FORMATS: dict[str, Callable[[int], str]] = {
    "decimalZero": "{:02}".format,
    "lowerLetter": _letters,
    "upperLetter": lambda count: _letters(count).upper(),
    "lowerRoman": _roman,
    "upperRoman": lambda count: _roman(count).upper(),
    "none": lambda _: "",
}
