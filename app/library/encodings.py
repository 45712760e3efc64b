"""Decodes text of unknown encoding: by byte order mark, as UTF-8, by its declaration, or by a guess, which is noted."""

import codecs
import re
from contextlib import suppress
from pathlib import Path

from ragblend.kvstore.errors import UnreadableDocumentError

HEAD_BYTES = 4096
BOMS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BINARY = re.compile(
    rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]"
)  # bytes that text does not have; it may have escape sequences
SHIFTED_ENCODING = re.compile(
    rb"\x1b\$|\x0e.+\x0f", re.DOTALL
)  # to the Japanese, Korean or Chinese half of 7-bit encodings
DECLARED = re.compile(
    rb"""(?:<meta[^>]*?charset|<\?xml[^>]*?encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE
)
# In UTF-8, at most this share of the characters beyond ASCII may be broken.
MAX_BROKEN = 0.1
REPLACEMENT = "\ufffd"
# A short Windows text with a euro sign may look like a DOS one. If chardet's confidence is below this, and its guess
# among the web's encodings is one of these, that is used: 16 of 25 short lines are right instead of 9, and 95 files of
# chardet's own corpus instead of 97.
MIN_SURE = 0.1
WINDOWS_LATIN = {"Windows-1250", "Windows-1252", "Windows-1254"}


def decode(data: bytes, path: Path, notes: list[str] | None = None) -> str:
    """The text. notes: gets a sentence if the encoding was guessed, and if bytes were replaced."""
    notes = [] if notes is None else notes
    utf8 = None if SHIFTED_ENCODING.search(data) else "utf-8-sig"
    declared = DECLARED.search(data[:HEAD_BYTES])
    label = declared[1].decode("ascii", "replace") if declared else None
    for encoding in (_wide_encoding(data[:HEAD_BYTES]), utf8, label):
        if encoding is not None and (text := decode_as(data, encoding)) is not None:
            return text.replace("\0", "")
    return (_decode_broken_utf8(data, notes) if utf8 else None) or _decode_by_guess(data, path, notes)


def decode_as(data: bytes, label: str) -> str | None:
    """The text in a declared encoding; None if Python does not know it or it does not fit.

    Text that is declared as Latin-1 is decoded as Windows-1252 if that fits, as browsers and mail programs do.
    """
    with suppress(LookupError, ValueError):
        if codecs.lookup(label).name == "iso8859-1":
            with suppress(UnicodeDecodeError):
                return data.decode("cp1252")
        return data.decode(label)
    return None


def _decode_broken_utf8(data: bytes, notes: list[str]) -> str | None:
    """The text as UTF-8 with broken bytes replaced; None if too much of it is broken."""
    text = data.decode("utf-8-sig", errors="replace")
    broken = text.count(REPLACEMENT)
    non_ascii = sum(letter > "\x7f" for letter in text)
    if broken > MAX_BROKEN * non_ascii:
        return None
    notes.append(f"{broken} bytes that are not UTF-8 were replaced by {REPLACEMENT}")
    return text.replace("\0", "")


def _decode_by_guess(data: bytes, path: Path, notes: list[str]) -> str:
    """Decode by chardet's guess: right for more files of `benchmarks.measure_readers` than charset-normalizer's."""
    from chardet import EncodingEra, detect

    found = detect(data)
    encoding = found["encoding"]
    if found["confidence"] < MIN_SURE:
        of_web = detect(data, encoding_era=EncodingEra.MODERN_WEB)["encoding"]
        encoding = of_web if of_web in WINDOWS_LATIN else encoding
    if encoding is None:
        raise UnreadableDocumentError(
            f"Reading {path}: it is not UTF-8, and no other encoding fits it. Save it as UTF-8 text."
        )
    text = data.decode(encoding, errors="replace")
    notes.append(f"its encoding was guessed: {encoding}")
    if broken := text.count(REPLACEMENT):
        notes.append(f"{broken} bytes that do not fit it were replaced by {REPLACEMENT}")
    return text.replace("\0", "")


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, with or without a byte order mark; None for anything else."""
    from chardet import detect

    if b"\0" not in head and not head.startswith(BOMS):
        return None
    head = head[: len(head) // 4 * 4]
    found = detect(head)["encoding"] or ""
    if not found.upper().startswith(("UTF-16", "UTF-32")):
        return None
    return None if BINARY.search(head.decode(found, "replace").encode("utf-8", "replace")) else found


def is_binary(head: bytes) -> bool:
    """Whether a file with this beginning is not text; a stray NUL is allowed."""
    if b"\0" not in head or _wide_encoding(head) is not None:
        return False
    return len(BINARY.findall(head)) > max(1, len(head) // 1000)
