"""`ragblend`: the command line. Commands only parse and print; nothing heavy is imported before one runs."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ragblend.app import cli_demo, cli_docs, cli_doctor, cli_models, cli_store, cli_tune, cli_ui
from ragblend.app.cli_ask import register as register_ask
from ragblend.app.cli_common import Cli, command, plural
from ragblend.kvstore.errors import RagBlendError, UsageError

DONE, FAILED, WRONG_USAGE = 0, 1, 2
PRIVATE_UMASK = 0o077  # everything that any library writes from here on is for this user only

app = typer.Typer(
    name="ragblend",
    help="Questions over your own documents, answered fast: each passage is read once, its KV cache kept and fused.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback with locals would print the documents
    context_settings={"help_option_names": ["-h", "--help"]},
)


@command(app, "ingest")
def ingest(
    cli: Cli,
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files, and folders with all in them.")
    ],
    collection: Annotated[str | None, typer.Option(help="Which collection to put them in.")] = None,
) -> int:
    """Read documents, embed their passages and store each passage's KV. What is unchanged costs nothing."""
    from ragblend.app.cli_progress import progress_bars
    from ragblend.app.ingest import ingest as run

    with cli.open(collection=collection) as workspace, progress_bars() as show:
        report = run(workspace, paths, show)
    _print_ingest(cli, report)
    return FAILED if report.failed or report.interrupted else DONE


def _print_ingest(cli: Cli, report: Any) -> None:
    for path, (_, reason) in report.failed.items():
        cli.note(f"failed   {path}\n         {reason}")
    for label, listed in (("skipped", report.skipped), ("gone", report.gone)):
        for path in listed:
            cli.note(f"{label:<8} {path}")
    if report.gone:
        cli.note("Gone files still answer questions; `ragblend docs rm` removes them from the library.")
    if report.interrupted:
        cli.note("Interrupted. What is done is kept; run the same command again to go on.")
    if report.notice:
        cli.note(report.notice)
    kinds = ("added", "updated", "resumed", "unchanged", "failed", "skipped")
    counts = ", ".join(f"{len(getattr(report, kind))} {kind}" for kind in kinds if getattr(report, kind))
    work = f"{plural(report.embedded, 'passage')} embedded, {plural(report.encoded, 'passage')} encoded"
    cli.result(report.to_json(), f"{counts or 'nothing to do'}; {work}")


register_ask(app)
cli_docs.register(app)
cli_store.register(app)
cli_doctor.register(app)
cli_models.register(app)
cli_demo.register(app)
cli_tune.register(app)
cli_ui.register(app)


def _add_bench() -> None:
    from ragblend.app.bench.cli import bench_app

    app.add_typer(bench_app, name="bench")


_add_bench()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 the work failed, 2 wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Read when torch is loaded: with OpenMP threads that spin while they wait, as they do by default, one other busy
    # process on the machine makes everything ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    umask = os.umask(PRIVATE_UMASK)
    try:
        return _run(given)
    finally:
        os.umask(umask)


def _run(given: list[str]) -> int:
    try:
        app(given, prog_name="ragblend")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else FAILED
        if code == WRONG_USAGE:  # typer has said why on stderr
            _print_error(given, "UsageError", "wrong usage: see the message on stderr")
        return code if code in (DONE, WRONG_USAGE) else FAILED
    except RagBlendError as error:
        print(f"error: {error}", file=sys.stderr)
        _print_error(given, type(error).__name__, str(error))
        return WRONG_USAGE if isinstance(error, UsageError) else FAILED
    except BrokenPipeError:  # `ragblend ask ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains while it exits
        return FAILED
    return DONE


def _print_error(given: list[str], kind: str, message: str) -> None:
    if "--json" in given:
        print(json.dumps({"error": {"type": kind, "message": message}}, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
