"""CSV -> one text a row, "column: value" a line, as LlamaIndex's PagedCSVReader writes rows for a model.

The reading is ours: that reader opens UTF-8 only, knows no other separator than it is told, and fails at a row that
is shorter or longer than the header.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from ragblend.app.guards import MAX_TEXT_BYTES, read_text

SNIFF_CHARACTERS = 16_384


def csv_rows(path: Path) -> Iterator[tuple[int, str]]:
    """(row number, text) of every row that says something; the header is row 1."""
    text = read_text(path)
    csv.field_size_limit(MAX_TEXT_BYTES)  # of the whole process; 131,072 otherwise
    rows = csv.reader(io.StringIO(text, newline=""), dialect=_dialect(text))
    header = [name.strip() for name in next(rows, [])]
    empty = True
    for number, row in enumerate(rows, start=2):
        if line := _row_text(header, row):
            empty = False
            yield number, line
    if empty and any(header):  # a header alone, or a list of one line
        yield 1, ", ".join(name for name in header if name)


def _dialect(text: str) -> type[csv.Dialect] | csv.Dialect:
    try:
        return csv.Sniffer().sniff(text[:SNIFF_CHARACTERS], delimiters=",;\t|")
    except csv.Error:
        return csv.excel


def _row_text(header: list[str], row: list[str]) -> str:
    names = header + [f"column {n}" for n in range(len(header) + 1, len(row) + 1)]
    pairs = ((name, " ".join(value.split())) for name, value in zip(names, row, strict=False))
    return "\n".join(f"{name}: {value}" if name else value for name, value in pairs if value)
