"""`ragblend docs`: what is in the library, one document's passages, taking documents out."""

from typing import Annotated, Any

import typer

from ragblend.app.cli_common import Cli, command, plural, size
from ragblend.app.documents import Document

Collection = Annotated[str | None, typer.Option(help="Which collection.")]
Reference = Annotated[
    str, typer.Argument(metavar="DOCUMENT", help="Its id (or the beginning), path or file name.")
]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    docs = typer.Typer(help="List, show and remove documents.", no_args_is_help=True)
    command(docs, "list")(list_documents)
    command(docs, "show")(show)
    command(docs, "rm")(remove)
    app.add_typer(docs, name="docs")


def list_documents(cli: Cli, collection: Collection = None) -> None:
    """All documents of the library, with their state."""
    with cli.open(collection=collection) as workspace:
        documents = workspace.library.documents(workspace.settings.collection)
    cli.result({"documents": [_row(document) for document in documents]}, _table(documents))


def show(cli: Cli, document: Reference, collection: Collection = None) -> None:
    """One document: its state and its passages."""
    with cli.open(collection=collection) as workspace:
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

    with cli.open(collection=collection) as workspace, workspace.writing():
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
