"""Changes a collection's embedder: embeds all passages again while searches use the old vectors, then switches.

The choice is stored (`choose_embedder`) -> document by document, passages get vectors by the next embedder -> its index
is built -> one transaction switches -> the old index is deleted. Every step may be interrupted: the next call of
`switch_to_next_embedder` continues. Documents that are ingested meanwhile are embedded by the old embedder first, and
then by the next one.
"""

import os
from collections.abc import Callable

from ragblend.app.library.documents import Document
from ragblend.app.library.removal import remove_document
from ragblend.app.library.similarity import measure_similarity
from ragblend.app.progress import OnProgress, ProgressCounter, silent
from ragblend.app.workspace import Workspace
from ragblend.integrations.embeddings import DEFAULT
from ragblend.kvstore.errors import Cancelled

INDEXED_NODES = 1000  # per call: ten times faster than document by document


def choose_embedder(workspace: Workspace) -> None:
    """Make the settings' embedder the collection's next one, or its current one if it has no passages."""
    library, collection = workspace.library, workspace.settings.collection
    wanted = workspace.settings.embedder
    if wanted is None:
        wanted = DEFAULT if library.embedder(collection) is None else None
    elif os.path.isdir(folder := os.path.expanduser(wanted)):
        wanted = os.path.realpath(folder)
    if wanted is not None:
        library.set_embedder(collection, wanted)


def switch_to_next_embedder(
    workspace: Workspace, on_progress: OnProgress = silent, is_cancelled: Callable[[], bool] = lambda: False
) -> bool:
    """Embed all passages by the collection's next embedder, if it has one, and switch to it.

    False if Ctrl-C or is_cancelled() ended it; what is done is kept. The writer lock is held only for
    moments. Raises ModelError.
    """
    choose_embedder(workspace)
    library, collection = workspace.library, workspace.settings.collection
    meter = ProgressCounter(on_progress, is_cancelled)
    try:
        while (known := library.embedder(collection)) and known.next:
            waiting = library.documents_to_embed(collection)
            meter.count("embed", more=sum(document.passages for document in waiting))
            for document in waiting:
                meter.name = document.name
                _embed_document(workspace, document, known.next, meter)
                meter.count("embed", done=document.passages)
            if not waiting:
                _switch(workspace, known.next)
    except (Cancelled, KeyboardInterrupt):
        return False
    _drop_old_index(workspace)
    measure_similarity(workspace)
    return True


def _embed_document(workspace: Workspace, document: Document, embedder: str, meter: ProgressCounter) -> None:
    library = workspace.library
    passages = library.passages_of(document.id)
    texts = [passage.text for passage in passages]
    rows = workspace.workspaces.embedder(embedder).embed_passages(texts, meter.within("embed"))
    library.store_next_embeddings(embedder, [passage.node_id for passage in passages], rows)


def _switch(workspace: Workspace, embedder: str) -> None:
    """Build the index of the next embedder and switch to it, unless a document was added meanwhile."""
    library, collection = workspace.library, workspace.settings.collection
    with workspace.workspaces.writing():
        index, nodes = workspace.index_by(embedder), list(library.nodes(collection))
        indexed = index.node_ids()
        missing = [node for node in nodes if node not in indexed]
        for start in range(0, len(missing), INDEXED_NODES):
            index.upsert(*library.next_embeddings(missing[start : start + INDEXED_NODES]))
        index.delete([*(indexed - set(nodes))])
        for document in library.hidden(
            collection
        ):  # its deletion cannot be undone: it has no vectors by the next embedder
            remove_document(workspace, document)
        library.switch_embedder(collection, embedder)


def _drop_old_index(workspace: Workspace) -> None:
    library, collection = workspace.library, workspace.settings.collection
    if (known := library.embedder(collection)) and known.old:
        with workspace.workspaces.writing():
            workspace.index_by(known.old).drop()
            library.forget_old_embedder(collection)
