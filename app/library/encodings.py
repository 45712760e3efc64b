"""Decodes text of unknown encoding: by byte order mark, as UTF-8, by its declaration, or by a guess, which is noted."""

import codecs
import re
from contextlib import suppress
from pathlib import Path

from ragblend.kvstore.errors import UnreadableDocumentError

HEAD_BYTES = 4096
BOMS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Bytes that text does not have; it may have escape sequences.
BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
# To the Japanese, Korean or Chinese half of 7-bit encodings.
SHIFTED_ENCODING = re.compile(rb"\x1b\$|\x0e.+\x0f", re.DOTALL)
DECLARED = re.compile(rb"""(?i)(?:<meta[^>]*?charset|<\?xml[^>]*?encoding)\s*=\s*["']?\s*([\w.:-]+)""")
# In UTF-8, at most this share of the characters beyond ASCII may be broken.
MAX_BROKEN = 0.1
REPLACEMENT = "\ufffd"
# A short Windows text with a euro sign may look like a DOS one. If chardet's confidence is below this, and its guess
# among the web's encodings is one of these, that is used: 16 of 25 short lines are right instead of 9, and 95 files of
# chardet's own corpus instead of 97.
MIN_SURE = 0.1
WINDOWS_LATIN = {"Windows-1250", "Windows-1252", "Windows-1254"}


def decode(data: bytes, path: Path, notes: list[str] | None = None, declared: str = "") -> str:
    """The text. notes: gets a sentence if the encoding was guessed, and if bytes were replaced.

    declared: the encoding that is named elsewhere than in the text, as in a mail; "" if there is none.
    """
    notes = [] if notes is None else notes
    utf8 = "" if SHIFTED_ENCODING.search(data) else "utf-8-sig"
    label = found[1].decode("ascii", "replace") if (found := DECLARED.search(data[:HEAD_BYTES])) else ""
    for encoding in (declared, _wide_encoding(data[:HEAD_BYTES]), utf8, label):
        if (text := _decode_as(data, encoding)) is not None:
            return text.replace("\0", "")
    text, what = data.decode("utf-8-sig", "replace"), "are not UTF-8"
    if not utf8 or text.count(REPLACEMENT) > MAX_BROKEN * sum(letter > "\x7f" for letter in text):
        encoding = _guessed_encoding(data, path)
        notes.append(f"its encoding was guessed: {encoding}")
        text, what = data.decode(encoding, "replace"), "do not fit it"
    if broken := text.count(REPLACEMENT):
        notes.append(f"{broken} bytes that {what} were replaced by {REPLACEMENT}")
    return text.replace("\0", "")


def _decode_as(data: bytes, label: str) -> str | None:
    """The text in this encoding; None if Python does not know it or it does not fit.

    Text that is declared as Latin-1 is decoded as Windows-1252 if that fits, as browsers and mail programs do.
    """
    with suppress(LookupError, ValueError):
        if codecs.lookup(label).name == "iso8859-1":
            with suppress(UnicodeDecodeError):
                return data.decode("cp1252")
        return data.decode(label)
    return None


def _guessed_encoding(data: bytes, path: Path) -> str:
    """chardet's guess: right for more files of `benchmarks.measure_readers` than charset-normalizer's."""
    from chardet import EncodingEra, detect

    found = detect(data)
    encoding = found["encoding"]
    if found["confidence"] < MIN_SURE:
        of_web = detect(data, encoding_era=EncodingEra.MODERN_WEB)["encoding"]
        encoding = of_web if of_web in WINDOWS_LATIN else encoding
    if encoding is None:
        problem = "it is not UTF-8, and no other encoding fits it"
        raise UnreadableDocumentError(f"Reading {path}: {problem}. Save it as UTF-8 text.")
    return encoding


def _wide_encoding(head: bytes) -> str:
    """UTF-16 or UTF-32, with or without a byte order mark; "" for anything else."""
    from chardet import detect

    if b"\0" not in head and not head.startswith(BOMS):
        return ""
    head = head[: len(head) // 4 * 4]
    found = detect(head)["encoding"] or ""
    is_wide = found.upper().startswith(("UTF-16", "UTF-32"))
    text = head.decode(found, "replace").encode("utf-8", "replace") if is_wide else b""
    return found if is_wide and not BINARY.search(text) else ""


def is_binary(head: bytes) -> bool:
    """Whether a file with this beginning is not text; a stray NUL is allowed."""
    is_text = b"\0" not in head or _wide_encoding(head)
    return not is_text and len(BINARY.findall(head)) > max(1, len(head) // 1000)
