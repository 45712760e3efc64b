"""`ragblend ingest`: read documents, embed their passages, and store each passage's KV."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragblend.app.cli.bars import encoding_bar, progress_bars
from ragblend.app.cli.common import Cli, absolute_folder
from ragblend.app.cli.models import note_larger_models
from ragblend.app.library.documents import on_one_line
from ragblend.app.words import plural

if TYPE_CHECKING:
    from ragblend.app.library.ingest import IngestReport


def ingest(
    cli: Cli,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.")],
    collection: Annotated[str | None, typer.Option(help="Collection to put them in.")] = None,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="Embedder of the collection: `default`, a hub id or a folder of sentence-transformers. Another one "
            "embeds everything anew (default: the collection's).",
            parser=absolute_folder,
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove documents of these folders whose file is gone.")
    ] = False,
    no_encode: Annotated[
        bool, typer.Option("--no-encode", help="Do not store KV now; it is stored as questions are asked.")
    ] = False,
) -> int:
    """Read documents and make them askable, then store each passage's KV. Unchanged files cost nothing.

    Scans in other letters than Latin, Chinese or Japanese need a setting, such as RAGBLEND_OCR_LANGUAGE=korean.
    """
    from ragblend.app.library.ingest import embed_in_full, encode_and_report, ingest_paths
    from ragblend.app.library.language import language_notice
    from ragblend.app.library.switching import switch_to_next_embedder

    with cli.open(collection=collection, embedder=embedder) as workspace:
        workspace.check_engine()
        with progress_bars(cli.terminal) as show:
            report = ingest_paths(workspace, paths, show, prune, cli.terminal.check)
        if report.added or report.updated or report.resumed:
            count = workspace.library.count_passages(workspace.settings.collection)
            cli.note(f'Askable now: {plural(count, "passage")}. `ragblend ask "..."` answers from here on.')
            note_larger_models(cli, workspace)
        if not report.interrupted:
            with progress_bars(cli.terminal) as show:
                report.interrupted = not (
                    embed_in_full(workspace, show, cli.terminal.check)
                    and switch_to_next_embedder(workspace, show, cli.terminal.check)
                )
            if notice := language_notice(workspace):
                cli.note(notice)
        if not (no_encode or report.interrupted):
            with encoding_bar(cli) as follow:
                encode_and_report(workspace, report, follow, cli.terminal.check)
    _print_report(cli, report)
    return 1 if report.failed or report.interrupted else 0


def note_left_out(cli: Cli, failed: Mapping[str, str], skipped: Mapping[str, str]) -> None:
    """Note the files that were not read, and why."""
    for path, reason in failed.items():
        cli.note(f"failed   {on_one_line(path)}\n         {on_one_line(reason)}")
    for path, reason in skipped.items():
        cli.note(f"skipped  {on_one_line(path)}: {reason}")


def _print_report(cli: Cli, report: "IngestReport") -> None:
    note_left_out(cli, {path: reason for path, (_, reason) in report.failed.items()}, report.skipped)
    for path, notes in report.notes.items():
        cli.note(f"noted    {on_one_line(path)}: {'; '.join(map(on_one_line, notes))}")
    for label, listed in (("gone", report.gone), ("removed", report.pruned)):
        for path in listed:
            cli.note(f"{label:<8} {on_one_line(path)}")
    if report.gone:
        cli.note(
            "Gone files still answer questions; `ragblend ingest --prune` removes them from the library."
        )
    if report.interrupted:
        cli.note("Interrupted. What is done is kept; run the same command again to continue.")
    if report.notice:
        cli.note(report.notice)
    kinds = ("added", "updated", "resumed", "unchanged", "failed", "skipped", "pruned")
    counts = ", ".join(f"{len(getattr(report, kind))} {kind}" for kind in kinds if getattr(report, kind))
    counts += f", {len(report.notes)} with notes" if report.notes else ""
    work = f"{plural(report.embedded, 'passage')} embedded, {plural(report.encoded, 'passage')} encoded"
    cli.result(report.to_json(), f"{counts or 'nothing to do'}; {work}")
