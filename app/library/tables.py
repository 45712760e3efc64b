"""Writes tables as text: each row of CSV (RFC 4180, else clevercsv's guess of the dialect) and of XLSX (openpyxl) as a
part, and the tables within documents.

Each value stands after its column's name: a small model does not find the name in the table's first row, and a passage
may begin below that row.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext
from functools import partial
from itertools import chain, islice, pairwise, takewhile, zip_longest
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

from ragblend.app.library.file_checks import MAX_TEXT_BYTES, open_archive

SNIFF_CHARACTERS = 16_384
# Tried in this order: texts and numbers have commas too.
DELIMITERS = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "vertical bars"}
FIRST_ROWS = 10  # the header is one of them
# A number format of XLSX: digits such as `#,##0.00` or `0.0#` between texts, of which `"kg"`, `\x`, `[$€-407]` and
# signs are shown, and `[Red]`, `_-` and `*-` are not. A format with a condition, such as `[>=1000]`, does not match.
SHOWN = re.compile(r'"([^"]*)"|\\(.)|\[\$([^\]-]*+)[^\]]*+\]|([€$£¥%+() -])|\[[^$<=>\]][^<=>\]]*\]|[_*].')
NUMBER_FORMAT = re.compile(
    rf"(?P<before>(?:{SHOWN.pattern})*+)(?P<whole>[#0?,]*[0#?])(?:\.(?P<decimals>0*)(?P<optional>[#?]*))?"
    rf"(?P<after>(?:{SHOWN.pattern})*+)"
)
MERGED = re.compile(rb'<(?:\w+:)?mergeCell\b[^<>]*\bref="([A-Z]{1,3}\d{1,7}:[A-Z]{1,3}\d{1,7})"')
# A formula without a stored value, unless its value is an empty text.
UNCOMPUTED = re.compile(
    rb'<(?:\w+:)?c\b(?![^<>]*\bt="str")[^<>]*>\s*+<(?:\w+:)?f\b[^<>]*(?:/>|>[^<]*</(?:\w+:)?f>)\s*+'
    rb"(?:<(?:\w+:)?v\s*+/>|<(?:\w+:)?v>\s*+</(?:\w+:)?v>)?\s*+</(?:\w+:)?c>"
)
COMMENTS = re.compile(r"xl/(?:threaded)?comments", re.IGNORECASE)
UNUSED_CHARACTER = "\x1f"  # a delimiter that no table has
# Tables within documents: in a table of two columns the first names the second; a single row needs no names.
MIN_COLUMNS, MIN_ROWS = 3, 2
MAX_NAME = 40  # characters of a column's name
CELL_NAME = re.compile(r"[^\n:]+: ")  # the column's name before a value
CELL_END = re.compile(r"(?<!\S)\|(?!\S)")  # a bar that separates two cells
DATE = re.compile(r"\d{1,4}([-./])\d{1,2}\1\d{2,4}([T ][\d:.]+Z?)?")
VALUE = re.compile(rf"[-+]?[$€£¥]?[-+]?\d[\d.,' ]*[%$€£¥]?|{DATE.pattern}")
DIGIT, LETTER = re.compile(r"[\d¹²³⁰-₉]"), re.compile(r"[^\W\d_]")
INTEGER = re.compile(r"-?\d{1,15}")  # int() refuses more than 4300
YEAR = re.compile(r"(?:19|20)\d\d")
MAX_SPANNING_COLUMNS = 1000
Row = tuple[str, str]  # its text as lines of "column: value", and its location


class TableCell(NamedTuple):
    """A cell that spans columns and rows. rows: 0 if it continues the cell above it."""

    text: str
    columns: int = 1
    rows: int = 1


def spread_cells(
    rows: Iterable[Sequence[TableCell]], header_rows: int | None = None, columns: int = MAX_SPANNING_COLUMNS
) -> Iterator[list[str]]:
    """The texts of each row, with a spanning cell's text in all rows that it spans and that have more text. Of the
    columns that it spans, only the first gets the text; in a header row all do.

    header_rows: None if the header is the first row with several texts. A cell right of `columns` spans only itself:
    else spanning cells in each row would fill memory.
    """
    above = dict[int, str]()  # texts by column
    spanning = dict[int, tuple[str, int]]()  # with the number of the row below
    for number, row in enumerate(rows):
        if not any(cell.text for cell in row):
            yield []
            continue
        spanning = {column: each for column, each in spanning.items() if each[1] > number}
        texts = {column: text for column, (text, _) in spanning.items()}
        has_several = sum(map(bool, [*texts.values(), *(cell.text for cell in row)])) > 1
        is_header = has_several if header_rows is None else number < header_rows
        header_rows = 0 if header_rows is None and has_several else header_rows
        is_line, column = len(row) == 1 and not texts, 0  # across the table
        for cell in row:
            while column in texts:
                column += 1
            text = cell.text if cell.rows else above.get(column, cell.text)
            width = 1 if is_line else max(1, min(cell.columns, columns - column))
            for n in range(column, column + width):
                texts[n] = text if n == column or is_header else ""
                if cell.rows > 1 and column < columns:
                    spanning[n] = texts[n], number + cell.rows
        above = texts
        yield [texts.get(column, "") for column in range(max(texts) + 1)]


def csv_rows(text: str, notes: list[str], expected: str) -> Iterator[Row]:
    """The rows with values, except the header. A first line `sep=;` names the delimiter, as in Excel.

    expected: the delimiter that the file's suffix names. notes: a sentence is added if another one was guessed.
    """
    csv.field_size_limit(MAX_TEXT_BYTES)  # for the whole process; the default is 131,072
    first, _, rest = text.partition("\n")
    if named := re.fullmatch(r"sep=(.)\r?", first, re.IGNORECASE):
        return table_rows(_csv(rest, named[1]))
    delimiter, escape = _dialect(text, expected)
    if delimiter not in {expected, UNUSED_CHARACTER}:
        notes.append(f"its columns were guessed to be separated by {DELIMITERS.get(delimiter, delimiter)}")
    return table_rows(_csv(text, delimiter, escapechar=escape))


def _csv(text: str, delimiter: str, **dialect: Any) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, **dialect)


def _dialect(text: str, expected: str) -> tuple[str, str | None]:
    """The delimiter, the first of `DELIMITERS` with which all rows have the same number of columns (RFC 4180), else
    clevercsv's guess; and the character that is before quotes within a value, if it is not another quote.

    Lines before the first delimiter are a title above the table, or the values of a single column.
    """
    source, start = io.StringIO(text, newline=""), 0
    for row in csv.reader(source, delimiter=UNUSED_CHARACTER):  # a quoted name may have line ends
        if any(delimiter in cell for cell in row for delimiter in DELIMITERS):
            break
        start = source.tell()
    table, is_titled = text[start:], bool(text[:start].strip())
    if expected == "\t" and expected in table:
        return expected, None
    for delimiter in DELIMITERS:
        if _is_regular(table, delimiter, is_titled):
            return delimiter, None
    if is_titled or not table:
        return UNUSED_CHARACTER, None
    from clevercsv import Detector

    found = Detector().detect(text[:SNIFF_CHARACTERS], delimiters=list(DELIMITERS))
    return (found.delimiter, found.escapechar or None) if found and found.delimiter else (expected, None)


def _is_regular(table: str, delimiter: str, is_titled: bool) -> bool:
    """Whether all rows have the same number of columns; if a title is above them, the first has to name the columns:
    else it may be a single column of texts with commas.
    """
    rows = filter(None, _csv(table, delimiter, strict=True))
    with suppress(csv.Error):
        first = list(islice(rows, FIRST_ROWS))
        width = len(first[0]) if first else 0
        has_names = not is_titled or (
            _count_header_rows(first) > 0 and any(VALUE.fullmatch(cell) for row in first[1:] for cell in row)
        )
        return width > 1 and has_names and all(len(row) == width for row in chain(first, rows))
    return False


def table_rows(rows: Iterable[Sequence[str]], prefix: str = "") -> Iterator[Row]:
    """The rows, each value after its column's name, or `a | b | c` if there are no names.

    prefix: put before each location, such as a sheet's name.

    Lines above the header, such as a title, have fewer values than most rows, and are rows of their own.
    """
    lines = ((n, [" ".join(cell.split()) for cell in row]) for n, row in enumerate(rows, start=1))
    filled = ((number, row) for number, row in lines if any(row))
    first = list(islice(filled, FIRST_ROWS))
    if not first:
        return
    widths = [sum(map(bool, row)) for _, row in first]
    header_at = next(at for at, width in enumerate(widths) if width > median_high(widths) / 2)
    if header_at == len(first) - 1:  # the table is only a header, or a list of one line
        header_at += 1
    for number, row in first[:header_at]:
        yield ", ".join(filter(None, row)), f"{prefix}row {number}"
    table = first[header_at:]
    first_block = [row for at, (number, row) in enumerate(table) if number == table[0][0] + at]
    header_rows = _count_header_rows(first_block)
    names = _joined_names(first_block[:header_rows])
    following = chain(table[header_rows:], filled, [(0, [])])
    before, last = table[0] if table else (0, [])
    for (number, row), (_, after) in pairwise(following):
        if number > before + 1 and _begins_table(last, row, after):
            names = row
        else:
            yield (_row_text(names, row) if names else _as_line(row)), f"{prefix}row {number}"
        before, last = number, row


def _begins_table(before: Sequence[str], row: Sequence[str], after: Sequence[str]) -> bool:
    """Whether a row after an empty one is the header of another table: it has no figures, the rows before and after it
    have values, and each value after it gets a name.
    """
    have_values = all(any(map(VALUE.fullmatch, each)) for each in (before, after))
    names, values = (sum(map(bool, each)) for each in (row, after))
    return have_values and not any(map(DIGIT.search, row)) and names >= max(2, values)


def _count_header_rows(rows: Sequence[Sequence[str]]) -> int:
    """How many rows name the columns of CSV or of a sheet: nearly always one, or two (`has_subheader`).

    0 if the first row has values, or if each row is a label and its value, and of the values more than a quarter are
    numbers and at least half are different texts.
    """
    if not rows or not _may_be_names(*rows[:2]):
        return 0
    values = [row[1] for row in rows[1:] if len(row) > 1 and row[1]]
    texts = [value for value in values if not VALUE.fullmatch(value)]
    are_mixed = len(values) < 4 * (len(values) - len(texts)) and len(values) <= 2 * len(set(texts))
    return 0 if sum(map(bool, rows[0])) == 2 and are_mixed else 1 + has_subheader(rows)


def _may_be_names(header: Sequence[str], below: Sequence[str] = ()) -> bool:
    """Whether a row has no numbers and dates but years, 1 to n, and a scale at its end: rising numbers, as in
    `Hour | 6 | 12 | 18`, or dates that have no dates below.
    """
    values = list(filter(VALUE.fullmatch, header))
    one_to_n = [str(number) for number in range(1, max(2, len(values)) + 1)]
    if all(map(YEAR.fullmatch, values)) or values == one_to_n:
        return True
    if len(values) < 2 or header[0] in values or list(filter(None, header))[-len(values) :] != values:
        return False
    if any(map(DATE.fullmatch, values)):
        return all(map(DATE.fullmatch, values)) and not any(map(DATE.fullmatch, below[1:]))
    sizes = [(int(number[0]), value[number.end() :]) for value in values if (number := INTEGER.search(value))]
    return all(size < following for size, following in pairwise(sizes))


def has_subheader(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the second row divides columns that share a name, and no other ones: `Q1 | Q2` below `2024 | 2024`."""
    names = list(filter(None, rows[0]))
    have_values = [any(map(VALUE.fullmatch, row)) for row in rows[1:3]]
    if len(set(names)) == len(names) or have_values != [False, True]:
        return False
    columns = zip_longest(*rows[:2], fillvalue="")
    return all(below in ("", name) for name, below in columns if names.count(name) == 1)


def _joined_names(rows: Sequence[Sequence[str]]) -> list[str]:
    """The columns' names, joined from several header rows."""
    columns = zip_longest(*rows, fillvalue="")
    return [" ".join(dict.fromkeys(filter(None, column))) for column in columns]


def rows_as_text(rows: Sequence[Sequence[str]], may_have_names: bool = True, header_rows: int = 0) -> str:
    """A document's table: if its first row names the columns, each row is a paragraph of "name: value" lines; else each
    row is a line `a | b | c`. From the first row with fewer cells on, such as a total, rows are such lines in any case.

    may_have_names: False if the table began on the page before; header_rows: how many rows are known to be the header.
    """
    if may_have_names and 1 < header_rows < len(rows):
        rows = [_joined_names(rows[:header_rows]), *rows[header_rows:]]
    same = list(takewhile(lambda row: len(row) == len(rows[0]), rows))
    if not may_have_names or not _first_row_has_names(same, header_rows > 0):
        return "\n".join(map(_as_line, rows))
    rest = "\n".join(map(_as_line, rows[len(same) :]))
    return "\n\n".join([*(_row_text(same[0], row) for row in same[1:]), *filter(None, [rest])])


def _as_line(row: Sequence[str]) -> str:
    """`a | b | c`, without empty cells at the end."""
    last = max((number for number, cell in enumerate(row, start=1) if cell), default=0)
    return re.sub(" +", " ", " | ".join(row[:last])).strip()


def _first_row_has_names(rows: Sequence[Sequence[str]], has_header: bool) -> bool:
    """Whether the first row names the columns, as in `Quarter | Q1 | Q2`, and has no values.

    has_header: the document marks a header; else figures must be frequent in a column below.
    """
    header, *rest = rows or [[]]
    columns: list[Sequence[str]] = list(zip(*rest, strict=True))
    is_large = len(rest) >= MIN_ROWS and len(header) >= MIN_COLUMNS
    if not is_large or len(set(header)) < len(header) or max(map(len, header)) > MAX_NAME:
        return False
    if not all(header[1:]) or not all(map(any, columns)):  # a name without a value would be lost
        return False
    if all(map(YEAR.fullmatch, header[1:])):
        return True
    if has_digits := any(
        map(DIGIT.search, header)
    ):  # then only numbers are figures, and no codes such as `B12`
        columns = [[cell for cell in column if not LETTER.search(cell)] for column in columns]
    are_frequent = any(2 * len(list(filter(DIGIT.search, column))) > len(rest) for column in columns)
    return are_frequent and all(map(LETTER.search, header)) if has_digits else are_frequent or has_header


def xlsx_rows(path: Path, notes: list[str]) -> Iterator[Row]:
    """The rows of all sheets, with the values that formulas had when the file was saved.

    Each says its sheet's name, if there are several: the same rows may be in each. notes: gets sentences on formulas
    without values, which programs other than spreadsheets write, and on comments.
    """
    from openpyxl import load_workbook  # type: ignore[import-untyped]
    from openpyxl.utils import range_boundaries  # type: ignore[import-untyped]

    uncomputed = 0
    with open_archive(path) as archive:
        if any(COMMENTS.match(name) for name in archive.namelist()):
            notes.append("the comments on its cells were not read")
    with closing(load_workbook(path, read_only=True, data_only=True, keep_links=False)) as workbook:
        for sheet in workbook.worksheets:
            is_one_of_many = len(workbook.worksheets) > 1
            prefix, named = (f"{sheet.title}, ", f"Sheet: {sheet.title}\n") if is_one_of_many else ("", "")
            sheet.reset_dimensions()  # some programs write `A1` for any sheet, and no more would be read
            with sheet._get_source() as source:  # what openpyxl leaves out of large sheets
                markup = source.read()
            merged = [range_boundaries(cells.decode()) for cells in MERGED.findall(markup)]
            uncomputed += len(UNCOMPUTED.findall(markup))
            rows = ([_as_shown(cell.value, cell.number_format) for cell in row] for row in sheet.iter_rows())
            spread = spread_cells(_sheet_cells(rows, merged)) if merged else rows
            yield from ((named + text, location) for text, location in table_rows(spread, prefix))
    if uncomputed:
        advice = "open and save it in Excel or LibreOffice"
        notes.append(f"{uncomputed} formulas have no stored value, and were left out: {advice}")


def _sheet_cells(rows: Iterable[list[str]], merged: Iterable[Sequence[int]]) -> Iterator[list[TableCell]]:
    """merged: (first column, first row, last column, last row) of each merged cell, from 1."""
    sizes = {(top, left): (1 + right - left, 1 + bottom - top) for left, top, right, bottom in merged}
    covered_until = dict[int, int]()  # rows by columns
    for number, row in enumerate(rows, start=1):
        cells = list[TableCell]()
        for column, text in enumerate(row, start=1):
            if covered_until.get(column, 0) < number:
                width, height = sizes.get((number, column), (1, 1))
                cells.append(TableCell(text, width, height))
                covered_until |= dict.fromkeys(range(column, column + width), number + height - 1)
        yield cells


def _as_shown(value: Any, number_format: str) -> str:
    """A cell as the sheet shows it, except that dates are in ISO format and thousands have no separators."""
    if isinstance(value, datetime | time | timedelta):
        return _time_text(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_text(value, number_format)
    return "" if value is None else str(value)


def _time_text(value: datetime | time | timedelta) -> str:
    """A date or time, rounded to seconds: fractions of a day are stored with an error of milliseconds."""
    if isinstance(value, timedelta):
        minutes, seconds = divmod(round(abs(value).total_seconds()), 60)
        return f"{'-' * (value < timedelta())}{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    moment = datetime.combine(date.min, value) if isinstance(value, time) else value
    moment = (moment + timedelta(microseconds=500_000)).replace(microsecond=0)
    return str(moment.time()) if isinstance(value, time) else str(moment).removesuffix(" 00:00:00")


def _number_text(number: float, number_format: str) -> str:
    """A number with the digits, percent sign and texts of its format: 412.8 as `412.80 €`, 0.19 as `19%`."""
    read = NUMBER_FORMAT.fullmatch(number_format.partition(";")[0])  # of positive numbers
    if read is None:  # "General", or a format that is not supported: scientific, fractions, conditions
        is_whole = isinstance(number, int) or number.is_integer()
        return str(int(number)) if is_whole else f"{number:.15g}"
    decimals, optional = len(read["decimals"] or ""), len(read["optional"] or "")
    is_percent = any(found[4] == "%" for found in SHOWN.finditer(read["before"] + read["after"]))
    with localcontext(rounding=ROUND_HALF_UP):  # of the digits that are written, as Excel does
        exact = abs(Decimal(repr(number))) * (100 if is_percent else 1)
        whole, _, rest = f"{exact:.{decimals + optional}f}".partition(".")
    rest = rest[:decimals] + rest[decimals:].rstrip("0")
    shown = partial(SHOWN.sub, lambda part: part[part.lastindex] if part.lastindex else " ")
    before, after = shown(read["before"]), shown(read["after"])
    digits = f"{whole.zfill(read['whole'].count('0'))}{'.' if rest else ''}{rest}"
    before = f"-{before.lstrip(' +')}" if number < 0 else before
    return " ".join(f"{before}{digits}{after}".split())


def _row_text(header: Sequence[str], row: Sequence[str]) -> str:
    names = [*header, *(f"column {n}" for n in range(len(header) + 1, len(row) + 1))]
    pairs = zip(names, row, strict=False)
    return "\n".join(f"{name}: {value}" if name else value for name, value in pairs if value)
