"""`ragblend collections`: what there is beside the collection that one is in, and taking one out whole."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.app.cli_common import Cli, plural, size

if TYPE_CHECKING:
    from ragblend.app.workspace import Workspace


def list_collections(cli: Cli, context: typer.Context) -> None:
    """The collections, with their documents, passages and KV; `rm NAME` takes one out."""
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
        f"{size(row['kv_bytes']):>11}{' <- asked where none is named' if row['current'] else ''}"
        for row in rows
    ]
    text = "\n".join(lines) or "No collections yet. Run `ragblend ingest PATH...`."
    cli.result({"collections": rows}, text)


def kv_bytes(workspace: "Workspace") -> dict[str, int]:
    """For each collection the bytes of its stored KV, whichever model made it."""
    from ragblend.kvstore.nodes import NodeIndex

    names = workspace.library.collections()
    if not workspace.home.nodes.exists():  # nothing was ever encoded
        return dict.fromkeys(names, 0)
    sizes = workspace.store.sizes()
    with NodeIndex.open(workspace.home.nodes) as nodes:
        return {name: sum(sizes.get(key, 0) for key in nodes.keys(name)) for name in names}


def remove(cli: Cli, name: Annotated[str, typer.Argument(help="The collection to take out.")]) -> None:
    """Take out a collection: its documents, passages, vectors and KV. The files themselves stay."""
    from ragblend.app.desk import Desk

    cli.open_collection(name).close()
    with Desk.open(cli.home, model=cli.model, device=cli.device, dtype=cli.dtype) as desk:
        removed = desk.jobs.remove_collection(name)
    freed = sum(one.bytes_freed for one in removed)
    value = {"collection": name, "removed": [one.__dict__ for one in removed], "bytes_freed": freed}
    cli.result(value, f"removed {name}: {plural(len(removed), 'document')}, {size(freed)} freed")
