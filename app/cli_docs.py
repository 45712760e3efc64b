"""`ragblend docs`: what is in the library, one document's passages, taking documents out."""

from typing import Annotated, Any

import typer

from ragblend.app.cli_common import Cli, plural, size
from ragblend.app.documents import Document
from ragblend.kvstore.errors import UsageError

Collection = Annotated[str | None, typer.Option(help="Which collection.")]
Reference = Annotated[
    str, typer.Argument(metavar="DOCUMENT", help="Its id (or the beginning), path or file name.")
]


def list_documents(
    cli: Cli,
    collection: Collection = None,
    every: Annotated[bool, typer.Option("--all", help="Those of all collections.")] = False,
) -> None:
    """The documents of one collection, or of all, with their state."""
    if every and collection is not None:
        raise UsageError("--all lists every collection, and --collection one; give one of the two")
    with cli.open_collection(collection) as workspace:
        names = workspace.library.collections() if every else [workspace.settings.collection]
        documents = {name: workspace.library.documents(name) for name in names}
    rows = [_row(document) for listed in documents.values() for document in listed]
    tables = [f"{name}:\n{_table(listed)}" for name, listed in documents.items()]
    text = (
        "\n\n".join(tables)
        if every and tables
        else _table([one for listed in documents.values() for one in listed])
    )
    cli.result({"documents": rows}, text)


def show(cli: Cli, document: Reference, collection: Collection = None) -> None:
    """One document: its state and its passages."""
    with cli.open_collection(collection) as workspace:
        found = workspace.library.find(workspace.settings.collection, document)
        passages = workspace.library.passages_of(found.id)
    rows = [{"node_id": p.node_id, "location": p.location, "text": p.text} for p in passages]
    texts = (f"--- {p.index} {p.location} ({p.node_id})\n{p.text}" for p in passages)
    cli.result({**_row(found), "passage_list": rows}, "\n".join([_table([found]), *texts]))


def remove(
    cli: Cli,
    documents: Annotated[list[str], typer.Argument(metavar="DOCUMENT...", help="Ids, paths or file names.")],
    collection: Collection = None,
) -> None:
    """Take documents out of the library: text, vectors and KV. The files themselves stay."""
    from ragblend.app.removal import remove_document

    with cli.open_collection(collection) as workspace, workspace.workspaces.writing():
        found = [workspace.library.find(workspace.settings.collection, name) for name in documents]
        removed = [remove_document(workspace, document) for document in dict.fromkeys(found)]
    freed = sum(one.bytes_freed for one in removed)
    lines = (
        f"removed {one.path}: {plural(one.passages, 'passage')}, {size(one.bytes_freed)}" for one in removed
    )
    value = {"removed": [one.__dict__ for one in removed], "bytes_freed": freed}
    cli.result(value, "\n".join([*lines, f"{size(freed)} freed"]))


def _row(document: Document) -> dict[str, Any]:
    return {
        "id": document.id,
        "document": document.name,
        "collection": document.collection,
        "path": document.path,
        "state": str(document.state),
        "reason": document.reason,
        "passages": document.passages,
        "size": document.facts.size,
        "updated_at": document.updated_at,
    }


def _table(documents: list[Document]) -> str:
    if not documents:
        return "No documents yet. Run `ragblend ingest PATH...`."
    lines = (
        f"{d.id}  {d.state:<8}{d.passages:>5}  {d.path}" + (f"\n{'':>33}{d.reason}" if d.reason else "")
        for d in documents
    )
    return "\n".join([f"{'id':<16}  {'state':<8}{'parts':>5}  path", *lines])
