"""Finds ruled tables on a PDF's pages with pdfplumber, and writes them row by row into the page's text.

pdfium's text has the cells of a table one after another, and starts a new line within a cell too. A table is written
as rows only where the text has exactly its letters, in the same order: nothing is lost or moved.
"""

from bisect import bisect_left
from collections.abc import Sequence, Set
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.app.library.html_text import CELL_CHARACTERS
from ragblend.app.library.matching import UNFOLDED_SIGNS, fold
from ragblend.app.library.tables import TableCell, has_subheader, rows_as_text, spread_cells

# On a page: points are ends of lines and corners of boxes, of which a table of two by two has 12; two columns have
# three edges. With more points or crossings it is a drawing or squared paper, and pdfplumber would look at all of them.
MIN_POINTS, MAX_POINTS, MIN_EDGES, MAX_CROSSINGS = 12, 4000, 3, 4000
MIN_LENGTH = 5  # of an edge, in typographic points
MIN_FILLED = 0.5  # of the cells: where fewer have text, the lines are a chart's or a form's
TRIMMED_SIGNS = frozenset(" \t") | UNFOLDED_SIGNS


Rows = list[list[TableCell]]


class PageTable(NamedTuple):
    """edges: x-coordinates of its columns' left edges, in points."""

    rows: Rows
    edges: tuple[int, ...] = ()

    @property
    def first_row(self) -> list[str]:
        """The texts of the first row that has text."""
        return next(filter(any, ([cell.text for cell in row] for row in self.rows)))


class TableFinder:
    """Finds the tables of one PDF. document: as pdfium opened it."""

    def __init__(self, path: Path, document: Any) -> None:
        self._path, self._document = path, document
        self._plumber_pdf: Any = None
        self._last_table = -2, PageTable([])  # with its page

    def close(self) -> None:
        if self._plumber_pdf is not None:
            self._plumber_pdf.close()

    def with_rows(self, text: str, number: int) -> str:
        """The page's text with its tables as rows; unchanged if none is found. number: of the page, from 0."""
        try:
            tables = self._find_tables(number) if self._may_have_tables(number) else []
            if not tables:
                return text
            # If a table continues from the page before, its first row does not name the columns.
            (page, last), first = self._last_table, tables[0]
            continues = page == number - 1 and last.edges == first.edges and last.first_row != first.first_row
            self._last_table = number, tables[-1]
            return with_table_rows(text, tables, continues)
        except MemoryError:
            raise
        except Exception:  # pdfium, pdfplumber and pdfminer raise anything for a damaged page
            return text

    def _may_have_tables(self, number: int) -> bool:
        from pypdfium2 import raw

        points, of_grids, edges, levels = 0, 0, set[int](), set[int]()
        with closing(self._document[number]) as page:
            for rule in page.get_objects(filter=[raw.FPDF_PAGEOBJ_PATH]):
                ends = raw.FPDFPath_CountSegments(rule)
                points, of_grids = points + ends, of_grids + (ends if ends >= MIN_POINTS else 0)
                left, bottom, right, top = rule.get_bounds()
                if top - bottom >= MIN_LENGTH:
                    edges |= {round(left), round(right)}
                if right - left >= MIN_LENGTH:
                    levels |= {round(bottom), round(top)}
                # A path of many lines is taken to have as many across as down.
                crossings = len(edges) * len(levels) + (of_grids // 4) ** 2
                if points > MAX_POINTS or crossings > MAX_CROSSINGS:
                    return False
        return points >= MIN_POINTS and (of_grids > 0 or len(edges) >= MIN_EDGES)

    def _find_tables(self, number: int) -> list[PageTable]:
        import pdfplumber

        if self._plumber_pdf is None:
            self._plumber_pdf = pdfplumber.open(self._path)
        with closing(self._plumber_pdf.pages[number]) as page:  # else it keeps all of the page's letters
            return [found for table in page.find_tables() if (found := _page_table(table)) is not None]


def _page_table(table: Any) -> PageTable | None:
    """A table as pdfplumber found it; None if its lines are a chart's, a form's, or the page's layout."""
    columns, rows = (sorted({box[at] for box in table.cells}) for at in (0, 1))
    cells = [
        [
            TableCell(
                " ".join(text.split()),
                bisect_left(columns, box[2]) - bisect_left(columns, box[0]),
                bisect_left(rows, box[3]) - bisect_left(rows, box[1]),
            )
            for text, box in zip(texts, row.cells, strict=True)
            if box is not None  # else another cell spans it
        ]
        for texts, row in zip(table.extract(), table.rows, strict=True)
    ]
    texts = [[cell.text for cell in row if cell.text] for row in cells]
    lengths = [len(text) for row in texts for text in row]
    is_filled = sum(map(bool, texts)) > 1 and len(lengths) >= MIN_FILLED * len(table.cells)
    if len(columns) < 2 or not is_filled or max(lengths) > CELL_CHARACTERS:
        return None
    return PageTable(cells, tuple(map(round, columns)))


def with_table_rows(text: str, tables: Sequence[PageTable], continues: bool = False) -> str:
    """The text with tables row by row: each table whose cells' letters are in the text in this order, exactly once.

    continues: whether the first table began on the page before.
    """
    letters, indexes = fold(text)
    pieces, cursor, done = list[str](), 0, 0
    for index, table in enumerate(tables):
        wanted = "".join(fold(cell.text)[0] for row in table.rows for cell in row)
        found = letters.find(wanted, cursor)
        if found < 0 or letters.find(wanted, found + 1) >= 0:
            continue
        at = found + len(wanted)
        rows = _cells_from_text(text, indexes[found:at], table.rows)
        if rows is None:
            continue
        start, stop = _widened(text, indexes[found], indexes[at - 1] + 1, TRIMMED_SIGNS)
        spread, header_rows = _spread_cells(rows)
        named = rows_as_text(spread, may_have_names=index > 0 or not continues, header_rows=header_rows)
        pieces += [text[done : max(start, done)].rstrip(), named]
        cursor, done = at, stop
    return "\n\n".join(filter(None, [*pieces, text[done:].lstrip() if done else text]))


def _cells_from_text(text: str, indexes: Sequence[int], table: Rows) -> Rows | None:
    """The cells with their text from pdfium, which separates words better; None if a cell would begin or end in a word.

    indexes: of the cells' letters in the text.
    """
    rows, at = Rows(), 0
    for row in table:
        rows.append([])
        for cell in row:
            size = len(fold(cell.text)[0])
            if size:  # else it has only signs, such as a dash
                start, stop = _widened(text, indexes[at], indexes[at + size - 1] + 1, UNFOLDED_SIGNS)
                if text[start - 1 : start].strip() or text[stop : stop + 1].strip():
                    return None
                cell = cell._replace(text=" ".join(text[start:stop].split()))
            rows[-1].append(cell)
            at += size
    return rows


def _spread_cells(rows: Rows) -> tuple[list[list[str]], int]:
    """The rows that have text, with a spanning cell's text in all rows that it spans; and how many are the header.

    These are 2 if cells of the first row, but not all, span columns that the second row names. They are in all of these
    columns then. If all span some, it is a form: `Tenant | Guarantor` above `Name | Ann | Name | Ben`.
    """
    in_all_columns, in_one = (list(filter(None, spread_cells(rows, n))) for n in (None, 0))
    names = in_all_columns[0]
    have_spans = names != in_one[0] and any(names.count(name) == 1 for name in names)
    return (in_all_columns, 2) if have_spans and has_subheader(in_all_columns) else (in_one, 0)


def _widened(text: str, start: int, stop: int, signs: Set[str]) -> tuple[int, int]:
    """start and stop, moved outwards over adjacent signs, such as a minus before a number."""
    while start and text[start - 1] in signs:
        start -= 1
    while stop < len(text) and text[stop] in signs:
        stop += 1
    return start, stop
