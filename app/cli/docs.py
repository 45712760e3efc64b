"""`ragblend docs` and `collections`: list, show and remove documents and collections."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.app.cli.common import Cli, command, typer_callback
from ragblend.app.library.documents import Document, on_one_line
from ragblend.app.words import plural, size
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.app.workspace import Workspace

docs = typer.Typer(name="docs", help="List, show and remove documents.", no_args_is_help=True)
collections = typer.Typer(name="collections")
Collection = Annotated[str | None, typer.Option(help="Which collection.")]
# "~" is expanded here: the command may be run by another process.
Reference = Annotated[
    str,
    typer.Argument(
        metavar="DOCUMENT", help="Its id (or the beginning), path or file name.", parser=os.path.expanduser
    ),
]
References = Annotated[
    list[str],
    typer.Argument(metavar="DOCUMENT...", help="Ids, paths or file names.", parser=os.path.expanduser),
]


@command(docs, "list")
def list_documents(
    cli: Cli,
    collection: Collection = None,
    every: Annotated[bool, typer.Option("--all", help="List all collections.")] = False,
) -> None:
    """List the documents of one collection, or of all, with their state."""
    if every and collection is not None:
        raise UsageError("--all lists every collection, and --collection one; give one of the two")
    with cli.open_collection(collection) as workspace:
        names = workspace.library.collections() if every else [workspace.settings.collection]
        documents = {name: workspace.library.documents(name) for name in names}
    everything = [document for listed in documents.values() for document in listed]
    text = _table(everything)
    if every and documents:
        text = "\n\n".join(f"{name}:\n{_table(listed)}" for name, listed in documents.items())
    cli.result({"documents": [_row(document) for document in everything]}, text)


@command(docs)
def show(cli: Cli, document: Reference, collection: Collection = None) -> None:
    """Show one document: its state and its passages."""
    with cli.open_collection(collection) as workspace:
        found = workspace.library.find(workspace.settings.collection, document)
        passages = workspace.library.passages_of(found.id)
    rows = [{"node_id": p.node_id, "location": p.location, "text": p.text} for p in passages]
    texts = (f"--- {p.index} {p.location} ({p.node_id})\n{p.text}" for p in passages)
    cli.result({**_row(found), "passage_list": rows}, "\n".join([_table([found]), *texts]))


@command(docs, "rm", forwarded=True)
def remove_documents(cli: Cli, documents: References, collection: Collection = None) -> None:
    """Remove documents from the library: text, vectors and KV. The files themselves stay."""
    from ragblend.app.library.removal import delete_abandoned, remove_document

    with cli.open_collection(collection) as workspace, workspace.workspaces.writing():
        delete_abandoned(workspace.workspaces)
        library, name = workspace.library, workspace.settings.collection
        found = [library.find(name, each, cli.folder) for each in documents]
        removed = [remove_document(workspace, document) for document in dict.fromkeys(found)]
    freed = sum(one.bytes_freed for one in removed)
    lines = (
        f"removed {on_one_line(one.path)}: {plural(one.passages, 'passage')}, {size(one.bytes_freed)}"
        for one in removed
    )
    value = {"removed": [one.__dict__ for one in removed], "bytes_freed": freed}
    cli.result(value, "\n".join([*lines, f"{size(freed)} freed"]))


def list_collections(cli: Cli, context: typer.Context) -> None:
    """List the collections with their documents, passages and KV; `rm NAME` removes one."""
    if context.invoked_subcommand is not None:
        return
    with cli.open() as workspace:
        nbytes, current = kv_bytes(workspace), workspace.settings.collection
        rows: list[dict[str, Any]] = [
            {
                "collection": name,
                "documents": sum(workspace.library.counts_by_state(name).values()),
                "passages": workspace.library.count_passages(name),
                "kv_bytes": nbytes[name],
                "current": name == current,
            }
            for name in nbytes
        ]
    lines = [
        f"{row['collection']:<24} {plural(row['documents'], 'document'):>14} {plural(row['passages'], 'passage'):>15} "
        f"{size(row['kv_bytes']):>11}{' <- default' if row['current'] else ''}"
        for row in rows
    ]
    text = "\n".join(lines) or "No collections yet. Run `ragblend ingest PATH...`."
    cli.result({"collections": rows}, text)


# `ragblend collections` without a subcommand lists them.
collections.callback(invoke_without_command=True)(typer_callback(list_collections))


def kv_bytes(workspace: "Workspace") -> dict[str, int]:
    """The bytes of stored KV by collection, of all models together."""
    from ragblend.kvstore.nodes import NodeIndex

    names = workspace.library.collections()
    if not workspace.home.nodes.exists():  # nothing was ever encoded
        return dict.fromkeys(names, 0)
    sizes = workspace.store.sizes()
    with NodeIndex.open(workspace.home.nodes) as nodes:
        return {name: sum(sizes.get(key, 0) for key in nodes.keys(name)) for name in names}


@command(collections, "rm", forwarded=True)
def remove_collection(
    cli: Cli, name: Annotated[str, typer.Argument(help="The collection to remove.")]
) -> None:
    """Remove a collection: its documents, passages, vectors and KV. The files themselves stay."""
    cli.open_collection(name).close()
    with cli.services() as services:
        removed, freed = services.remove_collection(name)
    value = {"collection": name, "removed": [one.__dict__ for one in removed], "bytes_freed": freed}
    cli.result(value, f"removed {name}: {plural(len(removed), 'document')}, {size(freed)} freed")


def _row(document: Document) -> dict[str, Any]:
    names = ("id", "collection", "path", "state", "reason", "notes", "passages", "updated_at")
    row = {name: getattr(document, name) for name in names}
    return row | {"document": document.name, "size": document.facts.size}


def _remarks(document: Document) -> list[str]:
    """What is shown under its row: why it failed, and what was guessed, replaced or left out."""
    return [document.reason] * bool(document.reason) + [f"note: {note}" for note in document.notes]


def _table(documents: list[Document]) -> str:
    if not documents:
        return "No documents yet. Run `ragblend ingest PATH...`."
    lines = (
        f"\n{'':>36}".join([f"{d.id}  {d.state:<8}{d.passages:>8}  {on_one_line(d.path)}", *_remarks(d)])
        for d in documents
    )
    return "\n".join([f"{'id':<16}  {'state':<8}{'passages':>8}  path", *lines])
