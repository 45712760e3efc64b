"""Erases deleted text from the files that still hold it: node index, conversations, registry, Chroma."""

import logging
from contextlib import closing

from ragblend.app.answering.chats import Chats
from ragblend.app.home import Home
from ragblend.app.library.registry import Library
from ragblend.integrations.chroma import VectorIndex
from ragblend.integrations.embeddings import DEFAULT
from ragblend.kvstore.nodes import NodeIndex

log = logging.getLogger("ragblend")


def erase_removed(library: Library, home: Home) -> None:
    """Erase passages that the registry no longer has, in all collections. The caller holds the writer lock.

    In a conversation their location, document name and number stay, and so do the answers, which are the user's.
    """
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
        known = library.embedder(collection)
        for embedder in filter(None, (known.name, known.next) if known else (DEFAULT,)):
            with closing(VectorIndex(home.chroma, collection, embedder)) as index:
                index.erase()
        if erased:
            library.erased(collection)
    if not erased:
        log.warning(
            "deleted text stays in files of %s until other processes close them and there is room", home.root
        )
