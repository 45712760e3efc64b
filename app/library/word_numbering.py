"""Numbers of a DOCX's numbered paragraphs and headings, which are not in its text: `§ 3`, `2.1`, `b)`."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from ragblend.app.library.file_checks import local_name

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
}
ROMAN |= {4: "iv", 1: "i"}
PLACE = re.compile(r"%(\d)")  # in a level's text: the number of that level, from 1
MOST = 10_000  # a higher number, which a damaged file may have, is written in digits


@dataclass(frozen=True)
class Level:
    """One level of a list. text: such as `%1.%2`; style: the id of the paragraph style that it belongs to."""

    start: int
    number_format: str
    text: str
    style: str


class Numbering:
    """Counts the numbered paragraphs of a document, in their order. numbering: the elements of the numbering part."""

    def __init__(self, numbering: Iterable[Element]) -> None:
        self._levels: dict[str, dict[int, Level]] = {}  # by list
        self._lists: dict[str, str] = {}  # by the id that paragraphs have
        self._restarts: dict[str, dict[int, int]] = {}  # by that id: the levels' first numbers
        self._counts = defaultdict[str, dict[int, int]](dict)  # by list and level
        for element in numbering:
            kind = local_name(element)
            if kind == "abstractNum":
                levels = (child for child in element if local_name(child) == "lvl")
                self._levels[value(element, "abstractNumId")] = {
                    number(value(each, "ilvl"), 0): _level(each) for each in levels
                }
            elif kind == "num":
                self._lists[value(element, "numId")] = value(child(element, "abstractNumId"), "val")
                self._restarts[value(element, "numId")] = {
                    number(value(each, "ilvl"), 0): number(value(child(each, "startOverride"), "val"), 1)
                    for each in element
                    if child(each, "startOverride") is not None
                }

    def next_label(self, list_id: str, level: str, styles: Iterable[str]) -> str:
        """The label of the next paragraph of a list; "" for a bullet.

        level: the paragraph's, or "": that which belongs to one of its styles.
        """
        of_list = self._lists.get(list_id, "")
        levels, counts, named = self._levels.get(of_list, {}), self._counts[of_list], set(styles)
        by_style = next((each for each, found in levels.items() if found.style in named - {""}), 0)
        at = number(level, by_style)
        if at not in levels:
            return ""
        first = self._restarts.get(list_id, {}).pop(at, None)  # of its first paragraph alone
        counts[at] = first if first is not None else counts.get(at, levels[at].start - 1) + 1
        for deeper in [each for each in counts if each > at]:
            del counts[deeper]

        def written(place: re.Match[str]) -> str:
            of = int(place[1]) - 1
            if of not in levels:
                return ""
            make = FORMATS.get(levels[of].number_format, str)
            return (make if counts.get(of, 0) < MOST else str)(counts.get(of, levels[of].start))

        return "" if levels[at].number_format == "bullet" else PLACE.sub(written, levels[at].text)


def child(node: Element | None, *names: str) -> Element | None:
    """An element's first child of one of these names, whatever its namespace."""
    return next((each for each in node if local_name(each) in names), None) if node is not None else None


def value(node: Element | None, name: str) -> str:
    """An attribute's value, whatever its namespace; "" if there is none."""
    attributes = node.attrib.items() if node is not None else ()
    return next((found for key, found in attributes if key.rpartition("}")[2] == name), "")


def number(text: str, default: int) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else default


def _level(element: Element) -> Level:
    def of(name: str) -> str:
        return value(child(element, name), "val")

    return Level(number(of("start"), 1), of("numFmt"), of("lvlText"), of("pStyle"))


def _letters(count: int) -> str:
    """a to z, then aa, bb and so on, as Word does."""
    return chr(ord("a") + (count - 1) % 26) * ((count - 1) // 26 + 1) if count > 0 else ""


def _roman(count: int) -> str:
    text = ""
    for size, letters in ROMAN.items():
        text, count = text + letters * (count // size), count % size
    return text


FORMATS: dict[str, Callable[[int], str]] = {
    "decimalZero": "{:02}".format,
    "lowerLetter": _letters,
    "upperLetter": lambda count: _letters(count).upper(),
    "lowerRoman": _roman,
    "upperRoman": lambda count: _roman(count).upper(),
    "none": lambda _: "",
}
