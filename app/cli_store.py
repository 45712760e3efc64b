"""`ragblend store`: how much KV is kept, whether it is sound, making it sound, sweeping up."""

from typing import Annotated

import typer

from ragblend.app.cli_common import Cli, command, plural, size

Collection = Annotated[str | None, typer.Option(help="Which collection's passages.")]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    store = typer.Typer(help="Look after the stored KV and the vector index.", no_args_is_help=True)
    command(store, "stats")(stats)
    command(store, "check")(check)
    command(store, "repair")(repair)
    command(store, "gc")(gc)
    app.add_typer(store, name="store")


def stats(cli: Cli, collection: Collection = None) -> None:
    """What is kept, and how much room it takes."""
    with cli.open(collection=collection) as workspace:
        found = workspace.store.stats()
        name = workspace.settings.collection
        documents = len(workspace.library.documents(name))
        passages = workspace.library.count_passages(name)
    share = f"{size(found.bytes)} of {size(found.budget_bytes)}"
    values, holdings = plural(found.entries, "KV value"), plural(documents, "document")
    text = f"{values}, {share}; {holdings}, {plural(passages, 'passage')}"
    value = {"entries": found.entries, "bytes": found.bytes, "budget_bytes": found.budget_bytes}
    cli.result({**value, "documents": documents, "passages": passages, "collection": name}, text)


def check(cli: Cli, collection: Collection = None) -> int:
    """Read everything that is stored and say what is wrong with it; changes nothing."""
    from ragblend.app.upkeep import check as run

    with cli.open(collection=collection) as workspace:
        findings = run(workspace)
    value = {"ok": not findings, "problems": [finding.__dict__ for finding in findings]}
    lines = [f"{finding.part}: {finding.message}" for finding in findings]
    cli.result(value, "\n".join(lines) or "Everything is sound.")
    return 1 if findings else 0


def repair(cli: Cli, collection: Collection = None) -> None:
    """Build the vector index again from the registry, take damaged KV out and encode what is missing."""
    from ragblend.app.cli_progress import progress_bars
    from ragblend.app.upkeep import repair as run

    with cli.open(collection=collection) as workspace, workspace.writing(), progress_bars() as show:
        done = run(workspace, cli.note, lambda at, total: show("encode", at, total))
    vectors, encoded = plural(done.vectors, "vector"), plural(done.encoded, "passage")
    damaged = plural(done.damaged_kv, "damaged KV value")
    cli.result(done.__dict__, f"{vectors} indexed, {damaged} taken out, {encoded} encoded")


def gc(cli: Cli) -> None:
    """Remove what nothing refers to: left-over files and what is in quarantine."""
    with cli.open() as workspace, workspace.writing():
        deleted = workspace.engine.forget(())  # what a kill left of an earlier deletion
        report = workspace.store.gc()
    freed = report.bytes + deleted
    cli.result({"files": report.files, "bytes": freed}, f"{plural(report.files, 'file')}, {size(freed)}")
