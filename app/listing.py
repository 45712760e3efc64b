"""The list of documents as a page shows it: some rows, searched, quick however many there are."""

from dataclasses import dataclass
from typing import Any, Literal

from ragblend.app.documents import Document, State
from ragblend.app.library import Library
from ragblend.app.readers import SCANNED

ORDERS = {"name": "path", "newest": "updated_at DESC, path"}


@dataclass(frozen=True)
class ListedDocument:
    """One row. reason: why it failed; scanned: because its pages hold no text; uploaded: the home has the file."""

    id: str
    name: str
    path: str
    collection: str
    state: State
    reason: str
    scanned: bool
    size: int
    passages: int
    updated_at: str
    uploaded: bool


@dataclass(frozen=True)
class DocumentPage:
    """Some rows; total: how many the search found; counts: of the whole collection, by state."""

    documents: tuple[ListedDocument, ...]
    total: int
    counts: dict[str, int]


def list_documents(
    library: Library,
    collection: str,
    search: str = "",
    state: str | None = None,
    offset: int = 0,
    limit: int = 50,
    order: Literal["name", "newest"] = "name",
) -> DocumentPage:
    """Documents whose path has all words of the search, folded; those of one state, or of all."""
    where, values = "collection = ?", list[Any]([collection])
    if state is not None:
        where += " AND state = ?"
        values.append(state)
    for word in search.casefold().split():
        where += " AND instr(folded(path), ?)"
        values.append(word)
    counts = library.counts_by_state(collection)
    if search.strip():  # looked through once, for the rows and for how many there are
        ids = library.ids_where(where, values, ORDERS[order])
        shown, total = ids[offset : offset + limit], len(ids)
    else:
        shown = library.ids_where(where, values, ORDERS[order], limit, offset)
        total = sum(counts.values()) if state is None else counts.get(state, 0)
    found = library.documents_with(shown)  # only what is shown has its row read, and its passages counted
    rows = tuple(_listed(found[key], library) for key in shown if key in found)
    return DocumentPage(rows, total, counts)


def _listed(document: Document, library: Library) -> ListedDocument:
    originals = library.path.parent / "originals"
    return ListedDocument(
        document.id,
        document.name,
        document.path,
        document.collection,
        document.state,
        document.reason,
        SCANNED in document.reason,
        max(0, document.facts.size),
        document.passages,
        document.updated_at,
        document.path.startswith(f"{originals}/"),
    )
