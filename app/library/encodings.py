"""Decodes text of unknown encoding: by its mark, its declaration, as UTF-8, or by a guess, and says what it guessed."""

import codecs
import re
from pathlib import Path

from ragblend.kvstore.errors import UnreadableDocumentError

HEAD_BYTES = 4096
BOMS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # not in texts, which may have escape sequences
DECLARED = re.compile(
    rb"""(?:<meta[^>]*?charset|<\?xml[^>]*?encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE
)
# Of the characters beyond ASCII: up to so many may be broken in a text that is still UTF-8.
MOST_BROKEN = 0.1
# Nearly all old texts of the West. A guess that finds a rarer code page must fit better to be believed.
USUAL = "cp1252"
REPLACED = "\ufffd"


def decode(data: bytes, path: Path, notes: list[str] | None = None) -> str:
    """The text. notes: gets a sentence where the encoding was guessed, or bytes were replaced."""
    notes = [] if notes is None else notes
    marked = "utf-32" if data.startswith(BOMS[:2]) else "utf-16" if data.startswith(BOMS) else None
    likely = ("utf-8-sig", marked) if marked else (utf16_without_mark(data[:HEAD_BYTES]), "utf-8-sig")
    for encoding in (*likely, _declared(data)):
        if encoding is not None:
            try:
                return data.decode(encoding).replace("\0", "")
            except UnicodeDecodeError:
                continue
    return _broken_utf8(data, notes) or _guessed(data, path, notes)


def _declared(data: bytes) -> str | None:
    """The encoding that HTML or XML declares, if Python knows it."""
    found = DECLARED.search(data[:HEAD_BYTES])
    try:
        return codecs.lookup(found.group(1).decode("ascii")).name if found else None
    except LookupError:
        return None


def _broken_utf8(data: bytes, notes: list[str]) -> str | None:
    """The text as UTF-8 with broken bytes replaced; None if too much of it is broken."""
    text = data.decode("utf-8-sig", errors="replace")
    broken = text.count(REPLACED)
    beyond_ascii = sum(letter > "\x7f" for letter in text)
    if broken > MOST_BROKEN * beyond_ascii:
        return None
    notes.append(f"{broken} bytes that are not UTF-8 were replaced by {REPLACED}")
    return text.replace("\0", "")


def _guessed(data: bytes, path: Path, notes: list[str]) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(data).best()
    if best is None:
        raise UnreadableDocumentError(
            f"Reading {path}: it is not UTF-8, and no other encoding fits it. Save it as UTF-8 text."
        )
    notes.append(f"its encoding was guessed: {best.encoding}")
    return str(best)


def utf16_without_mark(head: bytes) -> str | None:
    """Recognise UTF-16 of Western text: every other byte is NUL, few others are, and no other control characters."""
    even, odd = head[::2].count(0), head[1::2].count(0)
    others = len(NO_TEXT.findall(head)) - even - odd
    if max(even, odd) * 8 < len(head) or max(min(even, odd), others) * 20 > max(even, odd):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def is_binary(head: bytes) -> bool:
    """Whether it is not text; a stray NUL is allowed."""
    if b"\0" not in head or head.startswith(BOMS) or utf16_without_mark(head):
        return False
    return len(NO_TEXT.findall(head)) > max(1, len(head) // 1000)
