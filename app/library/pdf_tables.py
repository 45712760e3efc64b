"""Finds ruled tables on a PDF's pages with pdfplumber, and writes their rows as `a | b` into the page's text.

pdfium's text has the cells of a table one after another, each line of a cell as a line of its own. A table is written
as rows only where the text has exactly its letters, in the same order: nothing is lost, added or moved.
"""

import re
from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ragblend.app.library.html_text import CELL_CHARACTERS
from ragblend.app.library.matching import HYPHENS, fold

LEAST_RULES, MOST_RULES = 4, 4000  # lines and boxes on a page: fewer are no table, more are a drawing
LEAST_FILLED = 0.5  # of the cells: where fewer have text, the lines are a chart's or a form's
WRAPPED_WORD = re.compile(rf"(?<=[^\W\d_])[{re.escape(''.join(HYPHENS))}]\n(?=[^\W\d_])")
EDGE = frozenset(" \t") | HYPHENS
Table = list[list[str]]


class TableFinder:
    """Finds the tables of one PDF; a context manager. document: as pdfium opened it."""

    def __init__(self, path: Path, document: Any) -> None:
        self._path, self._document = path, document
        self._opened: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            self._opened.close()

    def with_rows(self, text: str, number: int) -> str:
        """The page's text (page from 0) with its tables as rows: as it is if none is found."""
        try:
            return with_table_rows(text, self._tables(number)) if self._has_rules(number) else text
        except MemoryError:
            raise
        except Exception:  # pdfium, pdfplumber and pdfminer raise anything for a damaged page
            return text

    def _has_rules(self, number: int) -> bool:
        from pypdfium2 import raw

        with closing(self._document[number]) as page:
            rules = page.get_objects(filter=[raw.FPDF_PAGEOBJ_PATH])
            return LEAST_RULES <= sum(1 for _ in islice(rules, MOST_RULES + 1)) <= MOST_RULES

    def _tables(self, number: int) -> list[Table]:
        import pdfplumber

        if self._opened is None:
            self._opened = pdfplumber.open(self._path)
        page = self._opened.pages[number]
        try:
            return [[[_on_one_line(cell) for cell in row] for row in rows] for rows in page.extract_tables()]
        finally:
            page.close()  # else it keeps all of the page's letters


def with_table_rows(text: str, tables: Iterable[Table]) -> str:
    """The text with each of these tables as a paragraph of rows, if it has the letters of their cells in this order."""
    letters, places = fold(text)
    pieces, cursor, done = list[str](), 0, 0
    for table in filter(_is_table, tables):
        wanted, _ = fold([cell for row in table for cell in row])
        found = letters.find(wanted, cursor)
        if found < 0:
            continue
        cursor = found + len(wanted)
        start, stop = places[found], places[cursor - 1] + 1
        while start > done and text[start - 1] in EDGE:  # signs that are no letters
            start -= 1
        while stop < len(text) and text[stop] in EDGE:
            stop += 1
        pieces += [text[done:start].rstrip(), "\n".join(map(" | ".join, table))]
        done = stop
    return "\n\n".join(filter(None, [*pieces, text[done:].lstrip() if done else text]))


def _is_table(table: Table) -> bool:
    cells = [cell for row in table for cell in row]
    return (
        len(table) > 1
        and len(table[0]) > 1
        and sum(map(bool, cells)) >= LEAST_FILLED * len(cells)
        and max(map(len, cells)) <= CELL_CHARACTERS  # else the lines are the page's layout
    )


def _on_one_line(cell: str | None) -> str:
    return " ".join(WRAPPED_WORD.sub("", cell or "").split())
