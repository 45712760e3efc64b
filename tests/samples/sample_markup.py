"""The few marks the sample sources use, read into blocks that the PDF and the DOCX writers lay out.

A source starts with a head (`key: value` lines between `---`), then blocks parted by empty lines:
`## heading`, `> note`, `- list`, `1. steps`, `| table |`, `***` (new page) and plain paragraphs, with
`*italic*` and `**bold**`. A Markdown library was rejected: this is the whole subset, and the built files must
not change with a library's version.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

Kind = Literal["heading", "paragraph", "note", "list", "steps", "table", "page"]
Style = Literal["plain", "italic", "bold"]

_INLINE = re.compile(r"\*\*(?P<bold>.+?)\*\*|\*(?P<italic>.+?)\*")


@dataclass(frozen=True)
class Block:
    """One block; `lines` holds one item each for lists, one row each for tables, else a single string."""

    kind: Kind
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A sample document before it is laid out."""

    title: str
    subtitle: str
    author: str
    written: date
    blocks: tuple[Block, ...]


def read_source(path: Path) -> Source:
    """Read one source file."""
    _, lines, body = path.read_text(encoding="utf-8").split("---\n", 2)
    head = dict(line.split(": ", 1) for line in lines.splitlines())
    blocks = tuple(_block(text.strip()) for text in re.split(r"\n{2,}", body.strip()))
    return Source(head["title"], head["subtitle"], head["author"], date.fromisoformat(head["date"]), blocks)


def inline(text: str) -> Iterator[tuple[Style, str]]:
    """Split a line into runs of one style, in order; the runs' texts are typeset."""
    text, position = typeset(text), 0
    for match in _INLINE.finditer(text):
        if match.start() > position:
            yield "plain", text[position : match.start()]
        yield ("bold", match["bold"]) if match["bold"] else ("italic", match["italic"])
        position = match.end()
    if position < len(text):
        yield "plain", text[position:]


def typeset(text: str) -> str:
    """Turn typewriter quotes into curly ones: a quote after a space, a bracket or nothing opens."""
    text = re.sub(r'(^|[\s(*])"', "\\1\N{LEFT DOUBLE QUOTATION MARK}", text)
    text = text.replace('"', "\N{RIGHT DOUBLE QUOTATION MARK}")
    return text.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}")


def table_cells(row: str) -> list[str]:
    """The cells of one `| a | b |` row."""
    return [typeset(cell.strip()) for cell in row.strip().strip("|").split("|")]


def _block(text: str) -> Block:
    lines = tuple(text.splitlines())
    if text == "***":
        return Block("page", ())
    if text.startswith("## "):
        return Block("heading", (text[3:],))
    if text.startswith("| "):
        return Block("table", lines)
    if text.startswith("- "):
        return Block("list", tuple(line.removeprefix("- ") for line in lines))
    if text.startswith("1. "):
        return Block("steps", tuple(line.split(". ", 1)[1] for line in lines))
    if text.startswith("> "):
        return Block("note", (text[2:],))
    return Block("paragraph", (" ".join(lines),))
