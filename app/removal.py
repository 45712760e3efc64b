"""Taking one document out: vectors, hashes, KV, then the registry's row, so that a stop in between can be taken up."""

from dataclasses import dataclass
from pathlib import Path

from ragblend.app.documents import Document
from ragblend.app.workspace import Workspace


@dataclass(frozen=True)
class Removed:
    """What went. bytes_freed counts KV files (what another document shares stays) and an uploaded original."""

    path: str
    passages: int
    bytes_freed: int


def remove_document(workspace: Workspace, document: Document) -> Removed:
    """Remove all that was made of a document. The caller holds the writer lock."""
    library = workspace.library
    nodes = [passage.node_id for passage in library.passages_of(document.id)]
    everything = [*nodes, *library.stale(document.id)]
    freed = 0
    if everything:
        workspace.index.delete(everything)
        workspace.known_passages.remove(everything)
        freed = workspace.engine.forget(everything)
    library.remove(document.id)
    return Removed(document.path, len(nodes), freed + _remove_original(workspace, document))


def _remove_original(workspace: Workspace, document: Document) -> int:
    """The home's own copy of a file that was uploaded; bytes freed. A file elsewhere is its owner's."""
    path = Path(document.path)
    if not path.is_relative_to(workspace.home.originals):
        return 0
    try:
        size = path.stat().st_size
        path.unlink()
    except OSError:
        return 0
    return size
