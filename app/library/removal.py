"""Removes documents: vectors, hashes, KV, their jobs, uploaded copies, and last the registry's row.

After an interruption the row is still there, so removing it again finishes the work. Text that the registry no longer
has is erased from conversations and Chroma's files at the end of `Workspaces.writing`.
"""

from dataclasses import dataclass

from ragblend.app.library.documents import Document
from ragblend.app.library.job_store import JobStore
from ragblend.app.library.uploads import delete_upload
from ragblend.app.workspace import Workspace


@dataclass(frozen=True)
class RemovedDocument:
    """What was removed. bytes_freed: KV files that no other document shares, and the uploaded copy."""

    path: str
    passages: int
    bytes_freed: int


def remove_document(workspace: Workspace, document: Document) -> RemovedDocument:
    """Remove a document and everything made from it. Call it inside `workspaces.writing()`, which erases the rest."""
    library, home = workspace.library, workspace.home
    nodes = library.node_ids(document.id)
    everything = [*nodes, *library.stale(document.id)]
    freed = 0
    if everything:
        for index in workspace.indexes:
            index.delete(everything)
        workspace.known_passages.remove(everything)
        freed = workspace.engine.forget(everything)
    if home.jobs.exists():
        with JobStore(home.jobs) as jobs:
            jobs.forget(document.collection, [document.path])
    freed += delete_upload(home, document.file)
    library.remove(document.id)
    return RemovedDocument(document.path, len(nodes), freed)
