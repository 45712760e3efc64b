"""The records of documents and passages in the library, and how their ids are made."""

import hashlib
import os
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ESCAPED = re.compile(rb"\\x([89a-f][0-9a-f])")
# Control characters, and those that change the writing direction of the rest of a line.
CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
MAX_NAMED = 10  # pages or files that one note names
SCANNED = "it is probably scanned"  # in the reason why such a document failed


class DocumentState(StrEnum):
    """The state of a document: the next ingest continues pending ones."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class FileFacts:
    """Size, modification time and digest of a file when it was read."""

    size: int
    mtime_ns: int
    sha256: str

    def fit(self, path: Path) -> bool:
        """Whether the file still has this size and time; False if it does not exist."""
        with suppress(OSError):
            found = path.stat()
            return (self.size, self.mtime_ns) == (found.st_size, found.st_mtime_ns)
        return False


@dataclass(frozen=True)
class Document:
    """One row of the registry. recipe: how its text was cut and embedded; if that changes, the file is ingested again.

    path: as `printable` writes it; reason: why it failed; notes: what was guessed, replaced or left out of its text, a
    sentence each; uploaded: the home has a copy of the file (set by `Library.page` only).
    """

    id: str
    path: str
    collection: str
    state: DocumentState
    reason: str
    facts: FileFacts
    recipe: str
    updated_at: str
    passages: int
    notes: tuple[str, ...] = ()
    uploaded: bool = False

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def file(self) -> Path:
        return as_path(self.path)

    @property
    def size(self) -> int:
        """In bytes; 0 before it was read."""
        return max(0, self.facts.size)

    @property
    def scanned(self) -> bool:
        return SCANNED in self.reason


@dataclass(frozen=True)
class DocumentPassage:
    """One passage of a document: the unit of retrieval and of stored KV."""

    node_id: str
    document_id: str
    index: int
    text: str
    location: str


def printable(path: Path | str) -> str:
    """A path, or a text with one, that can be printed and stored: a byte that is not UTF-8 is written as `\\xe9`."""
    try:
        return os.fsencode(path).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half a surrogate pair, which no file's name gives
        return str(path).encode("utf-8", "replace").decode("utf-8")


def as_path(text: str) -> Path:
    """The path that `printable` wrote."""
    path = Path(text)
    if "\\x" in text and not os.path.lexists(path):  # else its name has a backslash
        return Path(
            os.fsdecode(ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), os.fsencode(text)))
        )
    return path


def on_one_line(path: str) -> str:
    """A path as it is shown in a terminal, with escapes for line ends and other control characters."""
    return CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), path)


def composed(path: str) -> str:
    """A path in Unicode's form NFC, in which paths are compared: file systems and programs write `é` in two ways."""
    return unicodedata.normalize("NFC", path)


def id_of_document(collection: str, path: str) -> str:
    """A stable id of one path in one collection: 16 hex digits."""
    return _digest(collection, composed(path))[:16]


def node_id(document_id: str, index: int, text: str) -> str:
    """A stable id of the text at an index of a document: its KV survives edits elsewhere in the document."""
    return _digest(document_id, str(index), text)[:32]


def shortened(names: Sequence[str]) -> str:
    """A list for use in a sentence: the first ten names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def note_names(notes: list[str], what: str, names: Sequence[str]) -> None:
    """Add a sentence on these pages or files to the notes on a document, if there are any."""
    notes += [f"{what}: {shortened(names)}"] if names else []


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()


def content_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
