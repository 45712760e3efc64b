"""Writes the numbers of list items as letters or Roman numerals."""

LETTERS = {"a", "loweralpha", "upperalpha", "lowerletter", "upperletter"}
ROMAN = {"i", "lowerroman", "upperroman"}
ROMAN_SIZES = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
ROMAN_LETTERS = ("m", "cm", "d", "cd", "c", "xc", "l", "xl", "x", "ix", "v", "iv", "i")
MAX_NUMERAL = 10_000  # a higher number, which a damaged file may have, is written in digits


def parse_number(text: str, default: int) -> int:
    """The number in decimal digits; the default for any other text, and for ten digits or more."""
    return int(text) if text.isdecimal() and len(text) < 10 else default


def numeral(count: int, number_format: str) -> str:
    """The number in a format of HTML (`a`, `I`), docutils (`loweralpha`) or DOCX (`lowerLetter`); else in digits."""
    if number_format == "none":
        return ""
    text, kind = f"{count:02}" if number_format == "decimalZero" else str(count), number_format.lower()
    if kind in LETTERS and 0 < count < MAX_NUMERAL:  # a to z, then aa, bb and so on, as Word does
        text = chr(ord("a") + (count - 1) % 26) * ((count - 1) // 26 + 1)
    elif kind in ROMAN and 0 < count < MAX_NUMERAL:
        text = ""
        for size, letters in zip(ROMAN_SIZES, ROMAN_LETTERS, strict=True):
            text, count = text + letters * (count // size), count % size
    return text.upper() if number_format.startswith(("A", "I", "upper")) else text
