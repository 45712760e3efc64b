"""Numbers of a DOCX's numbered paragraphs and headings, which are not in its text: `§ 3`, `2.1`, `b)`."""

import re
from collections import defaultdict
from collections.abc import Iterable
from xml.etree.ElementTree import Element

from ragblend.app.library.numerals import numeral, parse_number
from ragblend.app.library.xml_elements import child_val, local_name, xml_attribute

PLACE = re.compile(r"%(\d)")  # in a level's text, such as `%1.%2`: the number of that level, from 1


class Numbering:
    """Counts the numbered paragraphs of a document, in their order. numbering: the elements of the numbering part.

    A paragraph names a list by its `numId`. Lists with the same definition (`abstractNumId`) share its levels and go on
    counting where the others stopped.
    """

    def __init__(self, numbering: Iterable[Element]) -> None:
        self._levels = dict[str, dict[int, Element]]()  # by abstractNumId
        self._lists = dict[
            str, tuple[str, dict[int, int]]
        ]()  # by numId: its definition; levels' own first numbers
        self._counts = defaultdict[str, dict[int, int]](dict)  # by abstractNumId, then by level
        for element in numbering:
            levels = {
                parse_number(xml_attribute(each, "ilvl"), 0): each
                for each in element
                if local_name(each) in {"lvl", "lvlOverride"}
            }
            if local_name(element) == "abstractNum":
                self._levels[xml_attribute(element, "abstractNumId")] = levels
            elif local_name(element) == "num":
                starts = {at: child_val(each, "startOverride") for at, each in levels.items()}
                own = {at: parse_number(start, 1) for at, start in starts.items() if start}
                self._lists[xml_attribute(element, "numId")] = child_val(element, "abstractNumId"), own

    def next_label(self, list_id: str, level: str, styles: Iterable[str]) -> str:
        """The label of the next paragraph of a list; "" for a bullet.

        level: the paragraph's; if "", the level that belongs to one of its styles.
        """
        definition, restarts = self._lists.get(list_id, ("", {}))
        levels, counts, named = self._levels.get(definition, {}), self._counts[definition], set(styles) - {""}
        by_style = next((each for each, found in levels.items() if child_val(found, "pStyle") in named), 0)
        at = parse_number(level, by_style)
        if at not in levels:
            return ""
        # A list's own first number is for its first paragraph only.
        counts[at] = restarts.pop(at) if at in restarts else counts.get(at, _start(levels[at]) - 1) + 1
        for deeper in [each for each in counts if each > at]:
            del counts[deeper]

        def level_number(place: re.Match[str]) -> str:
            number = int(place[1]) - 1
            of = levels.get(number)
            return "" if of is None else numeral(counts.get(number, _start(of)), child_val(of, "numFmt"))

        is_bullet = child_val(levels[at], "numFmt") == "bullet"
        return "" if is_bullet else PLACE.sub(level_number, child_val(levels[at], "lvlText"))


def _start(level: Element) -> int:
    return parse_number(child_val(level, "start"), 1)
