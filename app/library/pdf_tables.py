"""Finds ruled tables on a PDF's pages with pdfplumber, and writes them row by row into the page's text.

pdfium's text has the cells of a table one after another, each line of a cell as a line of its own. A table is written
as rows only where the text has exactly its letters, in the same order: nothing is lost or moved.
"""

from collections.abc import Sequence, Set
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from ragblend.app.library.html_text import CELL_CHARACTERS
from ragblend.app.library.matching import HYPHENS, fold
from ragblend.app.library.tables import column_names, rows_as_text

# On a page: ends of lines and corners of boxes, of which a table of two by two has 12, and edges of two columns.
LEAST_POINTS, MOST_POINTS, LEAST_EDGES = 12, 16_000, 3
LEAST_HEIGHT = 5  # of an edge, in points of a page
LEAST_FILLED = 0.5  # of the cells: where fewer have text, the lines are a chart's or a form's
EDGE = frozenset(" \t") | HYPHENS
Table = list[list[str]]


class PageTable(NamedTuple):
    """edges: of its columns, in points."""

    rows: Table
    edges: tuple[int, ...]


class TableFinder:
    """Finds the tables of one PDF; a context manager. document: as pdfium opened it.

    A table that goes on, on the next page in columns of the same widths, has the names of its columns there too.
    """

    def __init__(self, path: Path, document: Any) -> None:
        self._path, self._document = path, document
        self._opened: Any = None
        self._last: tuple[int, tuple[int, ...], Sequence[str] | None] = -2, (), None  # page, edges, names

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
            tables = self._tables(number) if self._has_rules(number) else []
            return with_table_rows(text, [each.rows for each in tables], self._names_before(number, tables))
        except MemoryError:
            raise
        except Exception:  # pdfium, pdfplumber and pdfminer raise anything for a damaged page
            return text

    def _names_before(self, number: int, tables: Sequence[PageTable]) -> Sequence[str] | None:
        """The names of the first table's columns, if it began on the page before, without names on this one."""
        if not tables:
            return None
        (page, edges, names), first, last = self._last, tables[0], tables[-1]
        goes_on = page == number - 1 and edges == first.edges and column_names(first.rows) is None
        before = names if goes_on else None
        self._last = number, last.edges, column_names(last.rows) or (before if first is last else None)
        return before

    def _has_rules(self, number: int) -> bool:
        from pypdfium2 import raw

        points, edges, is_grid = 0, set[int](), False
        with closing(self._document[number]) as page:
            for rule in page.get_objects(filter=[raw.FPDF_PAGEOBJ_PATH]):
                ends = raw.FPDFPath_CountSegments(rule)
                points, is_grid = points + ends, is_grid or ends >= LEAST_POINTS
                if points > MOST_POINTS:
                    return False
                left, bottom, right, top = rule.get_bounds()
                if top - bottom >= LEAST_HEIGHT:
                    edges |= {round(left), round(right)}
        return points >= LEAST_POINTS and (is_grid or len(edges) >= LEAST_EDGES)

    def _tables(self, number: int) -> list[PageTable]:
        import pdfplumber

        if self._opened is None:
            self._opened = pdfplumber.open(self._path)
        page = self._opened.pages[number]
        try:
            found = []
            for table in page.find_tables():
                cells = [[_on_one_line(cell or "") for cell in row] for row in table.extract()]
                rows = [row for row in cells if any(row)]
                if _is_table(rows):
                    edges = {round(edge) for left, _, right, _ in table.cells for edge in (left, right)}
                    found.append(PageTable(rows, tuple(sorted(edges))))
            return found
        finally:
            page.close()  # else it keeps all of the page's letters


def with_table_rows(text: str, tables: Sequence[Table], names: Sequence[str] | None = None) -> str:
    """The text with these tables row by row, each if it has the letters of the cells in this order.

    names: of the first table's columns, if they stand on the page before.
    """
    letters, places = fold(text)
    pieces, cursor, done = list[str](), 0, 0
    for number, table in enumerate(tables):
        sizes = [[len(fold(cell)[0]) for cell in row] for row in table]
        found = letters.find("".join(fold(cell)[0] for row in table for cell in row), cursor)
        if found < 0:
            continue
        rows, cursor = list[list[str]](), found
        for row, row_sizes in zip(table, sizes, strict=True):
            rows.append([])
            for cell, size in zip(row, row_sizes, strict=True):
                # pdfium tells words apart more surely; a cell of signs alone, such as a dash, has no letters.
                rows[-1].append(_cell(text, places[cursor : cursor + size]) if size else cell)
                cursor += size
        start, stop = _with_signs(text, places[found], places[cursor - 1] + 1, EDGE)
        pieces += [text[done : max(start, done)].rstrip(), rows_as_text(rows, None if number else names)]
        done = stop
    return "\n\n".join(filter(None, [*pieces, text[done:].lstrip() if done else text]))


def _cell(text: str, places: Sequence[int]) -> str:
    start, stop = _with_signs(text, places[0], places[-1] + 1, HYPHENS)
    return _on_one_line(text[start:stop])


def _with_signs(text: str, start: int, stop: int, signs: Set[str]) -> tuple[int, int]:
    """The part of the text with the signs beside it, such as the minus of its first number."""
    while start and text[start - 1] in signs:
        start -= 1
    while stop < len(text) and text[stop] in signs:
        stop += 1
    return start, stop


def _is_table(table: Table) -> bool:
    cells = [cell for row in table for cell in row]
    return (
        len(table) > 1
        and len(table[0]) > 1
        and sum(map(bool, cells)) >= LEAST_FILLED * len(cells)
        and max(map(len, cells)) <= CELL_CHARACTERS  # else the lines are the page's layout
    )


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
