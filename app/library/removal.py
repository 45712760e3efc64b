"""Removes documents: vectors, hashes, KV, their jobs, uploaded copies, and last the registry's row.

After an interruption the row is still there, so removing it again finishes the work. Text that the registry no longer
has is erased from conversations and Chroma's files at the end of `Workspaces.writing`.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from ragblend.app.home import Home
from ragblend.app.library.documents import Document
from ragblend.app.library.uploads import delete_upload
from ragblend.app.workspace import Workspace, Workspaces
from ragblend.kvstore import system
from ragblend.kvstore.files import make_private_file


@dataclass(frozen=True)
class RemovedDocument:
    """What was removed. bytes_freed: by KV files that no other document shares, and by the uploaded copy."""

    path: str
    passages: int
    bytes_freed: int


def hide_document(workspace: Workspace, document: Document) -> None:
    """Delete a document as `remove_document` does, except for what `ingest.restore_document` needs.

    Call it inside `workspaces.writing()`. The registry comes first: after an interruption the document is deleted.
    """
    library, nodes = workspace.library, workspace.library.node_ids(document.id)
    library.set_hidden(document.id, True)
    for index in workspace.indexes:
        index.delete(nodes)
    workspace.known_passages.remove(nodes)
    workspace.engine.hide(nodes)
    _forget_jobs(workspace, document)


def lock_undo(home: Home) -> int | None:
    """Lock the home's hidden documents, so that no other process deletes them. Returns the file to close, or None if
    another process has the lock.
    """
    make_private_file(home.undo_lock)
    file = system.open_existing(home.undo_lock, writable=True)
    if system.try_to_lock(file):
        return file
    os.close(file)
    return None


def delete_permanently(workspaces: Workspaces, documents: Iterable[Document]) -> None:
    """Delete hidden documents permanently, except those whose file is queued again: ingest restores them."""
    for document in documents:
        workspace, queued = workspaces.of(document.collection), set[str]()
        if workspaces.home.jobs.exists():
            queued = workspaces.jobs.open_among(document.collection, [document.path])
        if not queued:
            remove_document(workspace, document)


def delete_abandoned(workspaces: Workspaces) -> None:
    """Delete the hidden documents that cannot be restored any more, because the process that hid them has ended.

    Call it inside `workspaces.writing()`.
    """
    if (hidden := workspaces.library.hidden()) and (lock := lock_undo(workspaces.home)) is not None:
        try:
            delete_permanently(workspaces, hidden)
        finally:
            os.close(lock)


def remove_document(workspace: Workspace, document: Document) -> RemovedDocument:
    """Remove a document and everything made from it. Call it inside `workspaces.writing()`.

    At its end `writing` erases the deleted text from files that still hold it.
    """
    library, home = workspace.library, workspace.home
    nodes = library.node_ids(document.id)
    all_nodes = [*nodes, *library.stale(document.id)]
    freed = 0
    if all_nodes:
        for index in workspace.indexes:
            index.delete(all_nodes)
        workspace.known_passages.remove(all_nodes)
        freed = workspace.engine.forget(all_nodes)
    _forget_jobs(workspace, document)
    freed += delete_upload(home, document.file)
    library.remove(document.id)
    return RemovedDocument(document.path, len(nodes), freed)


def _forget_jobs(workspace: Workspace, document: Document) -> None:
    if workspace.home.jobs.exists():
        workspace.workspaces.jobs.forget(document.collection, [document.path])
