"""What the library keeps of a document and of its passages."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

SCANNED = "it is probably scanned"  # how such a file is known by its failure


class DocumentState(StrEnum):
    """How far a document came: pending work is taken up by the next ingest."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class FileFacts:
    """What a file was like when it was read: the two cheap facts first, the sure one last."""

    size: int
    mtime_ns: int
    sha256: str

    def fit(self, path: Path) -> bool:
        """Whether the file has that size and that time; False for one that is gone."""
        with suppress(OSError):
            found = path.stat()
            return (self.size, self.mtime_ns) == (found.st_size, found.st_mtime_ns)
        return False


@dataclass(frozen=True)
class Document:
    """One row of the registry. `recipe` names how its text was cut: another recipe means cutting again.

    reason: why it failed; uploaded: the home has the file, as far as somebody looked.
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
    uploaded: bool = False

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def size(self) -> int:
        """In bytes; 0 before it was read."""
        return max(0, self.facts.size)

    @property
    def scanned(self) -> bool:
        return SCANNED in self.reason


@dataclass(frozen=True)
class DocumentPassage:
    """One chunk of a document: the unit of retrieval and of stored KV."""

    node_id: str
    document_id: str
    index: int
    text: str
    location: str


def document_id(collection: str, path: str) -> str:
    """The same for one path in one collection, for ever: 16 hex digits."""
    return _digest(collection, path)[:16]


def node_id(document: str, index: int, text: str) -> str:
    """The same for the same text at the same place of a document, so that its KV survives edits elsewhere."""
    return _digest(document, str(index), text)[:32]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()


def content_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
