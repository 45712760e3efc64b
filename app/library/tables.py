"""Tables as text: the rows of CSV (RFC 4180 first, then clevercsv's guess of the dialect) and XLSX (openpyxl), a part
each, and those in documents.

A row has its columns' names: a small model does not find a value's name in the table's first row, and a passage may
begin below it.
"""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext
from itertools import chain, islice, pairwise, takewhile, zip_longest
from pathlib import Path
from statistics import median_high
from typing import Any

from ragblend.app.library.file_checks import MAX_TEXT_BYTES, open_archive

SNIFF_CHARACTERS = 16_384
DELIMITERS = ";\t,|"  # in this order: texts and numbers have commas too
NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
FIRST_ROWS = 10  # among which the header is
# A number format of XLSX: digits such as `#,##0.00` or `0.0#` between texts. Of these `"kg"`, `\x`, `[$€-407]` and
# signs are shown; `[Red]`, `_-` and `*-` are not. A format with a condition, such as `[>=1000]`, does not match.
SHOWN = re.compile(r'"([^"]*)"|\\(.)|\[\$([^\]-]*+)[^\]]*+\]|([€$£¥%+() -])|\[[^$<=>\]][^<=>\]]*\]|[_*].')
NUMBER_FORMAT = re.compile(
    rf"(?P<before>(?:{SHOWN.pattern})*+)(?P<whole>[#0?,]*[0#?])(?:\.(?P<decimals>0*)(?P<optional>[#?]*))?"
    rf"(?P<after>(?:{SHOWN.pattern})*+)"
)
MERGED = re.compile(rb'<(?:\w+:)?mergeCell\b[^<>]*\bref="([A-Z]{1,3}\d{1,7}:[A-Z]{1,3}\d{1,7})"')
# A formula without a value, if not an empty text.
UNCOMPUTED = re.compile(
    rb'<(?:\w+:)?c\b(?![^<>]*\bt="str")[^<>]*>\s*+<(?:\w+:)?f\b[^<>]*(?:/>|>[^<]*</(?:\w+:)?f>)\s*+'
    rb"(?:<(?:\w+:)?v\s*+/>|<(?:\w+:)?v>\s*+</(?:\w+:)?v>)?\s*+</(?:\w+:)?c>"
)
COMMENTS = re.compile(r"xl/(?:threaded)?comments", re.IGNORECASE)
NOT_USED = "\x1f"  # a delimiter that no table has
# In a document. Of two columns the first is the name of the second; lines with few cells may be anything.
LEAST_COLUMNS, LEAST_ROWS = 3, 2
MOST_NAME = 40  # characters of a column's name
CELL_NAME = re.compile(r"[^\n:]+: ")  # before the value, in a row with its columns' names
CELL_END = re.compile(r"(?<!\S)\|(?!\S)")
DATE = re.compile(r"\d{1,4}([-./])\d{1,2}\1\d{2,4}([T ][\d:.]+Z?)?")
VALUE = re.compile(rf"[-+]?[$€£¥]?[-+]?\d[\d.,' ]*[%$€£¥]?|{DATE.pattern}")
INTEGER = re.compile(r"-?\d{1,15}")  # int() refuses more than 4300
YEAR = re.compile(r"(?:19|20)\d\d")
Row = tuple[str, str]  # its text as lines of "column: value", and its location


def csv_rows(text: str, notes: list[str], usual: str) -> Iterator[Row]:
    """The rows with values except the header, which is row 1. A first line `sep=;` names the delimiter, as in Excel.

    usual: the delimiter that the file's suffix names. notes: a sentence is added if another one was guessed.
    """
    csv.field_size_limit(MAX_TEXT_BYTES)  # for the whole process; the default is 131,072
    first, _, rest = text.partition("\n")
    if named := re.fullmatch(r"sep=(.)\r?", first, re.IGNORECASE):
        rows = csv.reader(io.StringIO(rest, newline=""), delimiter=named[1])
    else:
        rows = csv.reader(io.StringIO(text, newline=""), _dialect(text, notes, usual))
    yield from table_rows(rows)


def table_rows(rows: Iterable[Sequence[str]], place: str = "") -> Iterator[Row]:
    """The rows, each value after its column's name, or `a | b | c` if there are no names. place: put before each
    location, such as a sheet's name.

    Lines above the header, such as a title, have fewer values than most rows, and are rows of their own.
    """
    lines = ((n, [" ".join(cell.split()) for cell in row]) for n, row in enumerate(rows, start=1))
    filled = ((number, row) for number, row in lines if any(row))
    first = list(islice(filled, FIRST_ROWS))
    if not first:
        return
    widths = [sum(map(bool, row)) for _, row in first]
    above = next(at for at, width in enumerate(widths) if width > median_high(widths) / 2)
    if above == len(first) - 1:  # the table is only a header, or a list of one line
        above += 1
    for number, row in first[:above]:
        yield ", ".join(filter(None, row)), f"{place}row {number}"
    table = first[above:]
    to_empty_row = [row for at, (number, row) in enumerate(table) if number == table[0][0] + at]
    heads = _count_heads(to_empty_row)
    names = _joined(to_empty_row[:heads])
    following = chain(table[heads:], filled, [(0, [])])
    before, last = table[0] if table else (0, [])
    for (number, row), (_, after) in pairwise(following):
        if number > before + 1 and _begins_table(last, row, after):
            names = row
        else:
            yield (_row_text(names, row) if names else _as_line(row)), f"{place}row {number}"
        before, last = number, row


def _begins_table(before: Sequence[str], row: Sequence[str], after: Sequence[str]) -> bool:
    """Whether a row below an empty one names the columns of another table: it has no figures, the rows around have
    values, and no value is without a name.
    """
    have_values = all(any(map(VALUE.fullmatch, each)) for each in (before, after))
    return (
        have_values and not any(map(_has_digit, row)) and sum(map(bool, row)) >= max(2, sum(map(bool, after)))
    )


def _count_heads(rows: Sequence[Sequence[str]]) -> int:
    """How many rows name the columns of CSV or of a sheet: nearly always one, or two (`is_divided`).

    It is none where the first row has numbers or dates that are no scale; and where the rows are labels, each with a
    value, of which some are numbers and at least half are different texts.
    """
    if not rows:
        return 0
    header, *rest = rows
    numbers = list(filter(VALUE.fullmatch, header))
    counted = [str(number) for number in range(1, max(2, len(numbers)) + 1)]
    if not all(map(YEAR.fullmatch, numbers)) and numbers != counted and not _is_scale(header, *rest[:1]):
        return 0
    names = list(filter(None, header))
    values = [row[1] for row in rest if len(row) > 1 and row[1]]
    of_numbers = sum(1 for value in values if VALUE.fullmatch(value))
    texts = {value for value in values if not VALUE.fullmatch(value)}
    if len(names) == 2 and len(values) < 4 * of_numbers and len(values) <= 2 * len(texts):
        return 0
    return 1 + is_divided(rows)


def is_divided(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the second row divides columns of one name, as `Q1 | Q2` do below `2024 | 2024`, and no others."""
    names = list(filter(None, rows[0]))
    have_values = [any(map(VALUE.fullmatch, row)) for row in rows[1:3]]
    if len(set(names)) == len(names) or have_values != [False, True]:
        return False
    columns = zip_longest(*rows[:2], fillvalue="")
    return all(below in ("", name) for name, below in columns if names.count(name) == 1)


def _joined(rows: Sequence[Sequence[str]]) -> list[str]:
    """The names of columns that several rows name."""
    columns = zip_longest(*rows, fillvalue="")
    return [" ".join(dict.fromkeys(filter(None, column))) for column in columns]


def _is_scale(header: Sequence[str], below: Sequence[str] = ()) -> bool:
    """Whether a row of names ends with rising numbers, or with dates that have no dates below: `Hour | 6 | 12 | 18`."""
    values = list(filter(VALUE.fullmatch, header))
    if len(values) < 2 or header[0] in values or list(filter(None, header))[-len(values) :] != values:
        return False
    if any(map(DATE.fullmatch, values)):
        return all(map(DATE.fullmatch, values)) and not any(map(DATE.fullmatch, below[1:]))
    sizes = [(int(number[0]), value[number.end() :]) for value in values if (number := INTEGER.search(value))]
    return all(size < following for size, following in pairwise(sizes))


def rows_as_text(rows: Sequence[Sequence[str]], may_have_names: bool = True, heads: int = 0) -> str:
    """A document's table as CSV's rows, a paragraph each, if its first row names the columns; else a line `a | b | c` a
    row. Rows from the first one on that has fewer cells (a total) are lines, too.

    may_have_names: False if it began on the page before; heads: how many rows are marked as names.
    """
    heads = heads or 2 * (may_have_names and is_divided(rows))
    if 1 < heads < len(rows):
        rows = [_joined(rows[:heads]), *rows[heads:]]
    same = list(takewhile(lambda row: len(row) == len(rows[0]), rows))
    if not may_have_names or not _has_names(same, heads > 0):
        return "\n".join(map(_as_line, rows))
    named = "\n\n".join(_row_text(same[0], row) for row in same[1:])
    rest = "\n".join(map(_as_line, rows[len(same) :]))
    return f"{named}\n\n{rest}" if rest else named


def _as_line(row: Sequence[str]) -> str:
    return re.sub(" +", " ", " | ".join(row)).strip()


def _has_names(rows: Sequence[Sequence[str]], has_header: bool) -> bool:
    """Whether the first row names the columns, as in `Quarter | Q1 | Q2`, and has no values.

    Without a mark, at least one column below must have figures that its name has not.
    """
    if len(rows) <= LEAST_ROWS or len(rows[0]) < LEAST_COLUMNS:
        return False
    header, *rest = rows
    if len(set(header)) < len(header) or not all(header[1:]) or max(map(len, header)) > MOST_NAME:
        return False
    columns = list(zip(*rest, strict=True))
    if not all(map(any, columns)):  # a name without a value would be lost
        return False
    if not any(map(_has_digit, header)):
        return has_header or any(2 * sum(map(_has_digit, column)) > len(rest) for column in columns)
    if all(map(YEAR.fullmatch, header[1:])):
        return True
    are_numbers = ([_has_digit(cell) and not _has_letter(cell) for cell in column] for column in columns)
    return all(map(_has_letter, header)) and any(2 * sum(column) > len(rest) for column in are_numbers)


def _has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))


def _has_letter(text: str) -> bool:
    return any(map(str.isalpha, text))


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
        workbook = load_workbook(path, read_only=True, data_only=True, keep_links=False)
    try:
        for sheet in workbook.worksheets:
            is_one_of_many = len(workbook.worksheets) > 1
            place, named = (f"{sheet.title}, ", f"Sheet: {sheet.title}\n") if is_one_of_many else ("", "")
            sheet.reset_dimensions()  # some programs write `A1` for any sheet, and no more would be read
            rows = ([_cell_text(cell.value, cell.number_format) for cell in row] for row in sheet.iter_rows())
            with sheet._get_source() as source:  # what openpyxl leaves out of large sheets
                markup = source.read()
            merged = [range_boundaries(cells.decode()) for cells in MERGED.findall(markup)]
            uncomputed += len(UNCOMPUTED.findall(markup))
            yield from (
                (named + text, location)
                for text, location in table_rows(with_merged_cells(rows, merged), place)
            )
    finally:
        workbook.close()
    if uncomputed:
        notes.append(
            f"{uncomputed} formulas have no stored value, and were left out: open and save it in Excel or LibreOffice"
        )


def with_merged_cells(
    rows: Iterable[list[str]], merged: Iterable[tuple[int, int, int, int]]
) -> Iterator[list[str]]:
    """The rows with the text of a merged cell in all rows that it spans, and in all columns if it is in the header.

    merged: first column and row, last column and row, from 1.
    """
    beginning = defaultdict[int, list[tuple[int, int, int]]](list)
    for left, top, right, bottom in merged:
        beginning[top].append((left - 1, right, bottom))
    open_cells, is_below_header = list[tuple[int, int, str]](), False
    for number, row in enumerate(rows, start=1):
        open_cells = [each for each in open_cells if each[1] >= number]
        if any(row):  # a title's cell may span empty rows
            for column, _, text in open_cells:
                row += [""] * (column + 1 - len(row))
                row[column] = text
        is_header = not is_below_header and sum(map(bool, row)) > 1
        for left, right, bottom in beginning[number]:
            text = "".join(row[left : left + 1])
            open_cells.append((left, bottom, text))
            if is_header:
                row[left:right] = [text] * (right - left)
        is_below_header |= is_header
        yield row


def _cell_text(value: Any, number_format: str) -> str:
    """A cell as the sheet shows it, but dates as ISO's, and thousands not separated."""
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_text(value, number_format)
    if isinstance(value, datetime | time | timedelta):
        return _time_text(value)
    return str(value)


def _time_text(value: datetime | time | timedelta) -> str:
    """To the second: what is stored as a fraction of a day is milliseconds off."""
    if isinstance(value, timedelta):
        minutes, seconds = divmod(round(abs(value).total_seconds()), 60)
        return f"{'-' * (value < timedelta())}{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    moment = datetime.combine(date.min, value) if isinstance(value, time) else value
    moment = (moment + timedelta(microseconds=500_000)).replace(microsecond=0)
    return str(moment.time()) if isinstance(value, time) else str(moment).removesuffix(" 00:00:00")


def _number_text(number: float, number_format: str) -> str:
    """A number with the digits, percent sign and texts of its format: 412.8 as `412.80 €`, 0.19 as `19%`."""
    read = NUMBER_FORMAT.fullmatch(number_format.partition(";")[0])  # of positive numbers
    if read is None:  # General, or a format that is not read: scientific, a fraction, with a condition
        is_whole = isinstance(number, int) or number.is_integer()
        return str(int(number)) if is_whole else f"{number:.15g}"
    decimals, optional = len(read["decimals"] or ""), len(read["optional"] or "")
    is_percent = any(found[4] == "%" for found in SHOWN.finditer(read["before"] + read["after"]))
    with localcontext(rounding=ROUND_HALF_UP):  # of the digits that are written, as Excel does
        exact = abs(Decimal(repr(number))) * (100 if is_percent else 1)
        whole, _, rest = f"{exact:.{decimals + optional}f}".partition(".")
    rest = rest[:decimals] + rest[decimals:].rstrip("0")
    before, after = (SHOWN.sub(_shown, read[part]) for part in ("before", "after"))
    digits = f"{whole.zfill(read['whole'].count('0'))}{'.' if rest else ''}{rest}"
    return " ".join(
        f"{'-' if number < 0 else ''}{before.lstrip(' +' if number < 0 else None)}{digits}{after}".split()
    )


def _shown(part: re.Match[str]) -> str:
    return part[part.lastindex] if part.lastindex else " "


def _dialect(text: str, notes: list[str], usual: str) -> type[csv.Dialect] | csv.Dialect:
    """The first of `DELIMITERS` by which all rows have the same number of columns (RFC 4180), else the dialect with the
    most regular columns. Lines without any delimiter are a title above the table, or the values of a single column.
    """
    source, start = io.StringIO(text, newline=""), 0
    for row in csv.reader(source, delimiter=NOT_USED):  # a quoted name may have line ends
        if any(delimiter in cell for cell in row for delimiter in DELIMITERS):
            break
        start = source.tell()
    table, is_titled = text[start:], bool(text[:start].strip())
    if usual == "\t" and usual in table:
        return csv.excel_tab
    for delimiter in DELIMITERS:
        if _is_regular(table, delimiter) and (not is_titled or _has_names_above_values(table, delimiter)):
            _note_guess(delimiter, usual, notes)
            return _separated_by(delimiter)
    if is_titled or not table:
        return _separated_by(NOT_USED)
    from clevercsv import Detector

    found = Detector().detect(text[:SNIFF_CHARACTERS], delimiters=list(DELIMITERS))
    if found is None or not found.delimiter:
        return csv.excel
    guessed = found.to_csv_dialect()
    _note_guess(guessed.delimiter, usual, notes)
    # Quotes are doubled in nearly every file, but the beginning that was looked at may have none.
    guessed.quotechar, guessed.quoting, guessed.doublequote = '"', csv.QUOTE_MINIMAL, True
    return guessed


def _note_guess(delimiter: str, usual: str, notes: list[str]) -> None:
    if delimiter != usual:
        notes.append(f"its columns were guessed to be separated by {NAMES.get(delimiter, delimiter)}")


def _separated_by(character: str) -> type[csv.Dialect]:
    class Separated(csv.excel):
        delimiter = character

    return Separated


def _has_names_above_values(table: str, delimiter: str) -> bool:
    """Whether the lines below another one are a table, and it is not the name of a column of texts with commas."""
    rows = list(islice(csv.reader(io.StringIO(table, newline=""), _separated_by(delimiter)), FIRST_ROWS))
    return _count_heads(rows) > 0 and any(VALUE.fullmatch(cell) for row in rows[1:] for cell in row)


def _is_regular(text: str, delimiter: str) -> bool:
    rows = csv.reader(io.StringIO(text, newline=""), _separated_by(delimiter), strict=True)
    widths = (len(row) for row in rows if row)
    try:
        first = next(widths, 0)
        return first > 1 and all(width == first for width in widths)
    except csv.Error:
        return False


def _row_text(header: Sequence[str], row: Sequence[str]) -> str:
    names = [*header, *(f"column {n}" for n in range(len(header) + 1, len(row) + 1))]
    pairs = zip(names, row, strict=False)
    return "\n".join(f"{name}: {value}" if name else value for name, value in pairs if value)
