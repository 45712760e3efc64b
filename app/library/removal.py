"""Taking documents out, for all ways in: vectors, hashes, KV, the queue's note of it, then the registry's row.

A stop in between leaves the row, and the next try goes on. What the registry no longer has is then erased from the
conversations and from Chroma's files by `erase_removed`, which every writer of the home runs before it lets go.
"""

import logging
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ragblend.app.answering.chats import Chats
from ragblend.app.library.documents import Document
from ragblend.app.library.job_store import JobStore
from ragblend.app.library.uploads import drop_upload
from ragblend.app.workspace import Workspace, Workspaces
from ragblend.integrations.chroma import VectorIndex
from ragblend.kvstore.nodes import NodeIndex

log = logging.getLogger("ragblend")


@dataclass(frozen=True)
class RemovedDocument:
    """What went. bytes_freed counts KV files (what another document shares stays) and an uploaded original."""

    path: str
    passages: int
    bytes_freed: int


def remove_document(workspace: Workspace, document: Document) -> RemovedDocument:
    """Remove all that was made of a document. The caller is in `workspaces.writing()`, whose end erases the rest."""
    library, home = workspace.library, workspace.home
    nodes = library.node_ids(document.id)
    everything = [*nodes, *library.stale(document.id)]
    freed = 0
    if everything:
        workspace.index.delete(everything)
        workspace.known_passages.remove(everything)
        freed = workspace.engine.forget(everything)
    if home.jobs.exists():
        with JobStore(home.jobs) as jobs:
            jobs.forget(document.collection, [document.path])
    freed += drop_upload(home, Path(document.path))
    library.remove(document.id)
    return RemovedDocument(document.path, len(nodes), freed)


def erase_removed(workspaces: Workspaces) -> None:
    """Leave nothing, in any collection, of passages that the registry no longer has. The caller holds the writer lock.

    In a conversation their place, name and number stay, and what the answers made of them, which is the user's.
    """
    library, home = workspaces.library, workspaces.home
    unerased = library.unerased()
    if not unerased:
        return
    with NodeIndex.open(home.nodes) as nodes:
        erased = nodes.erase()
    if home.chats.exists():
        with Chats(home.chats) as chats:
            erased = chats.forget_removed(library.known) and erased
    erased = library.erase() and erased
    for collection in unerased:
        index = VectorIndex(home.chroma, collection)
        with closing(index):
            index.erase()
        if erased:
            library.erased(collection)
    if not erased:
        log.warning(
            "deleted text stays in files of %s until others let go of them and there is room", home.root
        )
