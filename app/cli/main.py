"""`ragblend`: the command line. Commands only parse and print; nothing heavy is imported before one runs."""

import atexit
import codecs
import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ragblend.app.cli import ask, demo, docs, mcp, models, serve, store, tune, ui
from ragblend.app.cli.common import Cli, command, plural
from ragblend.app.openmp import set_thread_spinning
from ragblend.app.quality.cli import bench_app
from ragblend.kvstore.errors import Cancelled, RagBlendError, UsageError

DONE, FAILED, WRONG_USAGE = 0, 1, 2
# What is imported stays, 0.8 million objects: by Python's own thresholds a fifth of the time to a first token is spent
# on looking for garbage in it, and as much again when the process ends. So that begins after a million.
IMPORTED, COLLECTED = (1_000_000, 50, 100), (100_000, 50, 100)
OPEN_FILES = 16_384  # a prompt of 1,000 stored passages reads as many files at once; 1,024 is what is usual
PRIVATE_UMASK = 0o077  # everything that any library writes from here on is for this user only

app = typer.Typer(
    name="ragblend",
    no_args_is_help=True,
    rich_markup_mode=None,  # "[default: cpu]" in a help text is no markup
    pretty_exceptions_enable=False,  # a traceback with locals would print the documents
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from ragblend import __version__

        print(f"ragblend {__version__}")
        raise typer.Exit


@app.callback()
def ragblend(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say which version this is.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Questions over your own documents, answered fast: each passage is read once, its KV cache kept and fused."""


@command(app, shared=True)
def ingest(
    cli: Cli,
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files, and folders with all in them.")
    ],
    collection: Annotated[str | None, typer.Option(help="Which collection to put them in.")] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove documents of these folders whose file is gone.")
    ] = False,
    no_encode: Annotated[
        bool, typer.Option("--no-encode", help="Stop once all can be asked; KV comes as it is asked for.")
    ] = False,
) -> int:
    """Read documents and make them askable, then store each passage's KV. What is unchanged costs nothing."""
    from ragblend.app.cli.bars import encoding_bar, progress_bars
    from ragblend.app.library.ingest import embed_in_full, encode_and_report, ingest_paths

    with cli.open(collection=collection) as workspace:
        workspace.check_engine()
        with progress_bars(cli.terminal) as show:
            report = ingest_paths(workspace, paths, show, prune, cli.terminal.check)
        if report.added or report.updated or report.resumed:
            count = workspace.library.count_passages(workspace.settings.collection)
            cli.note(f'Askable now: {plural(count, "passage")}. `ragblend ask "..."` answers from here on.')
            models.name_better_ones(cli, workspace)
        if not report.interrupted:
            with progress_bars(cli.terminal) as show:
                report.interrupted = not embed_in_full(workspace, show, cli.terminal.check)
        if not (no_encode or report.interrupted):
            with encoding_bar(cli) as follow:
                encode_and_report(workspace, report, follow, cli.terminal.check)
    _print_ingest(cli, report)
    return FAILED if report.failed or report.interrupted else DONE


def _print_ingest(cli: Cli, report: Any) -> None:
    for path, (_, reason) in report.failed.items():
        cli.note(f"failed   {path}\n         {reason}")
    for label, listed in (("skipped", report.skipped), ("gone", report.gone), ("removed", report.pruned)):
        for path in listed:
            cli.note(f"{label:<8} {path}")
    if report.gone:
        cli.note(
            "Gone files still answer questions; `ragblend ingest --prune` removes them from the library."
        )
    if report.interrupted:
        cli.note("Interrupted. What is done is kept; run the same command again to go on.")
    if report.notice:
        cli.note(report.notice)
    kinds = ("added", "updated", "resumed", "unchanged", "failed", "skipped", "pruned")
    counts = ", ".join(f"{len(getattr(report, kind))} {kind}" for kind in kinds if getattr(report, kind))
    work = f"{plural(report.embedded, 'passage')} embedded, {plural(report.encoded, 'passage')} encoded"
    cli.result(report.to_json(), f"{counts or 'nothing to do'}; {work}")


for sent in (ask.ask, ask.chat, ask.digest, mcp.mcp):
    command(app, shared=True)(sent)
for each in (store.doctor, demo.demo, tune.tune, ui.ui, serve.serve):
    command(app)(each)
for group in (
    docs.docs,
    docs.collections,
    serve.keys,
    store.store,
    models.models,
    bench_app,
):
    app.add_typer(group)


def main(arguments: Sequence[str] | None = None, commands: typer.Typer = app, name: str = "ragblend") -> int:
    """Run a command line; returns the exit code: 0 done, 1 the work failed, 2 wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        atexit.register(gc.freeze)
    set_thread_spinning()
    _allow_files()
    _allow_text()
    umask, collected = os.umask(PRIVATE_UMASK), gc.get_threshold()
    gc.set_threshold(*IMPORTED)
    gc.callbacks.append(_collect)
    try:
        code = _run(given, commands, name)
        _flush()
        return code
    finally:
        gc.callbacks.remove(_collect)
        gc.set_threshold(*collected)
        os.umask(umask)


def _allow_files() -> None:
    """As many open files as the system gives without being root, up to OPEN_FILES."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _allow_text() -> None:
    """Bytes that come in may be no text, and a terminal may not have every sign: neither ends a command."""
    codecs.register_error("escaped", _escaped)
    streams: tuple[tuple[Any, str], ...] = ((sys.stdin, "surrogateescape"), (sys.stdout, "escaped"))
    for stream, errors in streams:
        with suppress(AttributeError, ValueError, OSError):  # a program's own stream, or none
            stream.reconfigure(errors=errors)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """As JSON has it: Python's own way with what cannot be encoded, `backslashreplace`, makes of JSON what is none."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _collect(phase: str, info: dict[str, int]) -> None:
    """From the first search for garbage on."""
    gc.set_threshold(*COLLECTED)


def _run(given: list[str], commands: typer.Typer, name: str) -> int:
    try:
        commands(given, prog_name=name)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # `ragblend ask ... | head`
            return DONE
        code = stop.code if isinstance(stop.code, int) else FAILED
        if code == WRONG_USAGE:  # typer has said why on stderr
            _print_error(given, "UsageError", "wrong usage: see the message on stderr")
        return code if code in (DONE, WRONG_USAGE) else FAILED
    except RagBlendError as error:
        with suppress(BrokenPipeError):
            print(error if isinstance(error, Cancelled) else f"error: {error}", file=sys.stderr, flush=True)
            _print_error(given, type(error).__name__, str(error))
        return WRONG_USAGE if isinstance(error, UsageError) else FAILED
    return DONE


def _flush() -> None:
    """What nobody reads any more goes nowhere: Python would complain of it while it exits."""
    for stream in (sys.__stdout__, sys.__stderr__):  # typer may have put a wrapper in the place of the others
        if stream is None:
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(given: list[str], kind: str, message: str) -> None:
    if "--json" in given:
        print(json.dumps({"error": {"type": kind, "message": message}}, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
