"""Numbers of a DOCX's numbered paragraphs and headings, which are not in its text: `§ 3`, `2.1`, `b)`."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from ragblend.app.library.numerals import numeral, parse_number
from ragblend.app.library.xml_elements import child_val, local_name, xml_attribute, xml_child

PLACE = re.compile(r"%(\d)")  # in a level's text: the number of that level, from 1


@dataclass(frozen=True)
class Level:
    """One level of a list. text: such as `%1.%2`; style: the id of the paragraph style that it belongs to."""

    start: int
    number_format: str
    text: str
    style: str


class Numbering:
    """Counts the numbered paragraphs of a document, in their order. numbering: the elements of the numbering part.

    A paragraph names a list by its `numId`. Lists with the same definition (`abstractNumId`) share its levels and go on
    counting where the others stopped.
    """

    def __init__(self, numbering: Iterable[Element]) -> None:
        self._levels: dict[str, dict[int, Level]] = {}  # by abstractNumId
        self._definitions: dict[str, str] = {}  # abstractNumId by numId
        self._restarts: dict[str, dict[int, int]] = {}  # by numId: the levels' first numbers
        self._counts = defaultdict[str, dict[int, int]](dict)  # by abstractNumId, then by level
        for element in numbering:
            kind = local_name(element)
            if kind == "abstractNum":
                levels = (each for each in element if local_name(each) == "lvl")
                self._levels[xml_attribute(element, "abstractNumId")] = {
                    parse_number(xml_attribute(each, "ilvl"), 0): _level(each) for each in levels
                }
            elif kind == "num":
                list_id = xml_attribute(element, "numId")
                self._definitions[list_id] = child_val(element, "abstractNumId")
                self._restarts[list_id] = {
                    parse_number(xml_attribute(each, "ilvl"), 0): parse_number(xml_attribute(start, "val"), 1)
                    for each in element
                    if (start := xml_child(each, "startOverride")) is not None
                }

    def next_label(self, list_id: str, level: str, styles: Iterable[str]) -> str:
        """The label of the next paragraph of a list; "" for a bullet.

        level: the paragraph's; if "", the level that belongs to one of its styles.
        """
        definition = self._definitions.get(list_id, "")
        levels, counts, named = self._levels.get(definition, {}), self._counts[definition], set(styles)
        by_style = next((each for each, found in levels.items() if found.style in named - {""}), 0)
        at = parse_number(level, by_style)
        if at not in levels:
            return ""
        restart = self._restarts.get(list_id, {}).pop(at, None)  # for the list's first paragraph only
        counts[at] = restart if restart is not None else counts.get(at, levels[at].start - 1) + 1
        for deeper in [each for each in counts if each > at]:
            del counts[deeper]

        def level_number(place: re.Match[str]) -> str:
            of = int(place[1]) - 1
            return numeral(counts.get(of, levels[of].start), levels[of].number_format) if of in levels else ""

        return "" if levels[at].number_format == "bullet" else PLACE.sub(level_number, levels[at].text)


def _level(element: Element) -> Level:
    number_format, text, style = (child_val(element, name) for name in ("numFmt", "lvlText", "pStyle"))
    return Level(parse_number(child_val(element, "start"), 1), number_format, text, style)
