"""`ragblend store` and `doctor`: statistics, checks and repair of the stored KV, the index and the installation."""

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from ragblend.app.cli.common import Cli, command
from ragblend.app.words import plural, size

store = typer.Typer(
    name="store", help="Check and repair the stored KV and the vector index.", no_args_is_help=True
)
Collection = Annotated[str | None, typer.Option(help="Which collection's passages.")]
OneOrAll = Annotated[str | None, typer.Option(help="Which collection's index (default: all).")]
MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


@command(store)
def stats(cli: Cli, collection: Collection = None) -> None:
    """Show what is stored, its size, and the hits and misses of each tier, in all and of this process."""
    from ragblend.app.library.maintenance import store_stats

    with cli.open_collection(collection) as workspace:
        name = workspace.settings.collection
        value = store_stats(workspace.store)
        holdings = {
            "documents": len(workspace.library.documents(name)),
            "passages": workspace.library.count_passages(name),
        }
    used = f"{size(value['bytes'])} of {size(value['budget_bytes'])}"
    documents, passages = plural(holdings["documents"], "document"), plural(holdings["passages"], "passage")
    text = f"{plural(value['entries'], 'KV value')}, {used}; {documents}, {passages}; evicts by {value['policy']}"
    lines = [f"{tier}: {_tier_text(counts)}" for tier, counts in value["tiers"].items()]
    if "remote" in value:
        lines.append(_remote_text(value["remote"]))
    cli.result(value | holdings | {"collection": name}, "\n".join([text, *lines]))


def _remote_text(remote: dict[str, Any]) -> str:
    read, written = size(remote["read_bytes"]), size(remote["written_bytes"])
    counts = ", ".join(f"{remote[name]:,} {name}" for name in ("errors", "waiting", "dropped", "refused"))
    rate = "" if remote["bytes_per_s"] is None else f" at {size(int(remote['bytes_per_s']))}/s"
    return f"{remote['where']}: {remote['state']}; this process read {read}{rate}, wrote {written}; {counts}"


def _tier_text(tier: dict[str, Any]) -> str:
    process: dict[str, int] = tier["this_process"]
    counts = ", ".join(f"{tier[name]:,} {name}" for name in process)
    of_process = ", ".join(f"{count:,} {name}" for name, count in process.items() if count)
    held = f"{size(tier['bytes'])} of {size(tier['budget_bytes'])}; " if "bytes" in tier else ""
    return f"{held}{counts}" + (f" (this process: {of_process})" if of_process else "")


@command(store)
def check(cli: Cli, collection: OneOrAll = None) -> int:
    """Read everything that is stored and report damage; changes nothing."""
    from ragblend.app.library.maintenance import check as run

    with cli.open_collection(collection) as workspace:
        findings = run(workspace, collection)
    value = {"ok": not findings, "problems": [finding.__dict__ for finding in findings]}
    lines = [f"{finding.part}: {finding.message}" for finding in findings]
    cli.result(value, "\n".join(lines) or "Everything is sound.")
    return 1 if findings else 0


@command(store)
def repair(cli: Cli, collection: OneOrAll = None) -> None:
    """Ingest damaged documents again, rebuild the vector index, remove damaged KV and encode what is missing."""
    from ragblend.app.cli.bars import encoding_bar
    from ragblend.app.library.maintenance import repair as run

    with (
        cli.open_collection(collection) as workspace,
        workspace.workspaces.writing(),
        encoding_bar(cli) as show,
    ):
        workspace.check_engine()
        done = run(workspace, cli.note, show, collection=collection)
    vectors, encoded = plural(done.vectors, "vector"), plural(done.encoded, "passage")
    damaged = plural(done.damaged_kv, "damaged KV value")
    restored = f"{plural(done.restored, 'document')} restored, " if done.restored else ""
    cli.result(done.__dict__, f"{restored}{vectors} indexed, {damaged} removed, {encoded} encoded")


@command(store)
def gc(cli: Cli) -> None:
    """Remove files that nothing refers to, quarantined files, and KV beyond the budget, which a full disk lowers."""
    from ragblend.app.library.removal import delete_abandoned

    with cli.open() as workspace, workspace.workspaces.writing():
        delete_abandoned(workspace.workspaces)
        deleted = workspace.engine.forget(())  # completes a deletion that a kill interrupted
        report = workspace.store.gc()
        workspace.index.erase()
        remote = workspace.store.remote
        shared = {} if remote is None else {"swept": remote.sweep()}
    freed = report.bytes + deleted
    more = f" and {plural(shared['swept'], 'expired value')} of the shared store" if shared else ""
    value = {"files": report.files, "bytes": freed} | shared
    cli.result(value, f"removed {plural(report.files, 'file')}{more}; {size(freed)} freed")


def doctor(
    cli: Cli,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Measure model and disk for `--ratio auto`, and save the result."),
    ] = False,
) -> int:
    """Check environment, device, model, home, store and index, with one line per check."""
    from ragblend.app.doctor import examine

    if profile:
        return _profile(cli)
    results = []
    with cli.open() as workspace:
        for result in examine(workspace):
            results.append(result)
            if not cli.json:  # printed one by one: loading the model takes a while
                print(f"{MARKS[result.status]}  {result.name:<13} {result.detail}", file=cli.out, flush=True)
    healthy = all(result.status != "failed" for result in results)
    text = "All is well." if healthy else "There are problems: see the lines marked FAILED."
    cli.result({"ok": healthy, "checks": [result.__dict__ for result in results]}, text)
    return 0 if healthy else 1


def _profile(cli: Cli) -> int:
    from ragblend.app.cli.bars import progress_bars
    from ragblend.engine.engine import require_local_engine

    with cli.open() as workspace, progress_bars(cli.terminal) as show:
        measured = require_local_engine(workspace.engine, "measuring the device").profile(
            partial(show, "measure")
        )
    grid = measured.prefill
    rows = [
        f"{count:>6} new tokens  " + "".join(f"{row[column]:>9,.0f} ms" for row in grid.prefill_ms)
        for column, count in enumerate(grid.new_tokens)
    ]
    head = "cached tokens      " + "".join(f"{count:>9,} t " for count in grid.cached_tokens)
    tiers = [f"{tier.name}: {tier.bytes_per_s / 1e6:,.0f} MB/s" for tier in measured.tiers]
    lines = [f"Measured {measured.about}:", head, *rows, f"Reads: {', '.join(tiers)}"]
    cli.result(asdict(measured), "\n".join([*lines, "Saved. `ask --ratio auto` uses it."]))
    return 0
