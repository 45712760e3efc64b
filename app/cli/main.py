"""`ragblend`: the command line. To add a command, write its module in this folder and add a row to COMMANDS."""

import atexit
import codecs
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Annotated, Any

import typer

from ragblend.app.cli.common import command
from ragblend.app.system import raise_open_file_limit
from ragblend.kvstore.errors import Cancelled, RagBlendError, UsageError

DONE, FAILED, WRONG_USAGE = 0, 1, 2
# Imports create 0.8 million permanent objects. With Python's own thresholds the garbage collector would search them for
# a fifth of the time to the first token, and as long at exit, so it starts later.
GC_WHILE_IMPORTING, GC_AFTERWARDS = (1_000_000, 50, 100), (100_000, 50, 100)
OPEN_FILES = 16_384  # a prompt of 1,000 stored passages opens 1,000 files at once; the usual limit is 1,024
PRIVATE_UMASK = 0o077  # new files of all libraries are private
# By group of the help: module, command or group of commands in it, and whether it is run by the process that has the
# home open, if there is one.
COMMANDS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "Your documents": (
        ("cli.ui", "up", False),
        ("cli.ui", "ui", False),
        ("cli.ingest", "ingest", True),
        ("cli.ask", "ask", True),
        ("cli.ask", "chat", True),
        ("cli.ask", "digest", True),
        ("cli.docs", "docs", False),
        ("cli.docs", "collections", False),
    ),
    "Models and this installation": (
        ("cli.models", "models", False),
        ("cli.store", "doctor", False),
        ("cli.store", "store", False),
    ),
    "For other programs": (
        ("cli.serve", "serve", False),
        ("cli.serve", "keys", False),
        ("cli.mcp", "mcp", True),
        ("cli.vllm", "vllm", False),
    ),
    "Measuring": (
        ("cli.demo", "demo", False),
        ("cli.tune", "tune", False),
        ("quality.cli", "bench_app", False),
    ),
}

app = typer.Typer(
    name="ragblend",
    no_args_is_help=True,
    rich_markup_mode="rich",
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
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Fast questions over your own documents: each passage is read once, and its KV cache is kept and fused."""


for group, commands_of_group in COMMANDS.items():
    for module, name, forwarded in commands_of_group:
        found = getattr(import_module(f"ragblend.app.{module}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, rich_help_panel=group)
        else:
            command(app, forwarded=forwarded, group=group)(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 1 the work failed, 2 wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        atexit.register(gc.freeze)
    with _process_limits():
        code = DONE
        try:
            app(given, prog_name="ragblend")
        except SystemExit as stop:
            code = _exit_code(stop)
            if code == WRONG_USAGE:  # typer has said why on stderr
                _print_json_error(given, "UsageError", "wrong usage: see the message on stderr")
        except (RagBlendError, OSError) as error:  # OSError: the output's disk is full, for example
            code = WRONG_USAGE if isinstance(error, UsageError) else FAILED
            with suppress(OSError):
                message = str(error) if isinstance(error, Cancelled) else f"error: {error}"
                print(message, file=sys.stderr, flush=True)
                _print_json_error(given, type(error).__name__, str(error))
        _flush()
        return code


@contextmanager
def _process_limits() -> Iterator[None]:
    """Set the process's open file limit, encodings, umask and garbage collection."""
    raise_open_file_limit(OPEN_FILES)
    _accept_any_text()
    umask, thresholds = os.umask(PRIVATE_UMASK), gc.get_threshold()
    gc.set_threshold(*GC_WHILE_IMPORTING)
    gc.callbacks.append(_set_later_thresholds)
    try:
        yield
    finally:
        gc.callbacks.remove(_set_later_thresholds)
        gc.set_threshold(*thresholds)
        os.umask(umask)


def _accept_any_text() -> None:
    """Accept input that is not UTF-8, and escape characters that the output's encoding does not have."""
    codecs.register_error("escaped", _json_escape)
    streams: tuple[tuple[Any, str], ...] = ((sys.stdin, "surrogateescape"), (sys.stdout, "escaped"))
    for stream, errors in streams:
        with suppress(AttributeError, ValueError, OSError):  # a replaced stream, or None
            stream.reconfigure(errors=errors)


def _json_escape(error: UnicodeError) -> tuple[str, int]:
    """Escape as JSON does; Python's `backslashreplace` would make JSON invalid."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _set_later_thresholds(phase: str, info: dict[str, int]) -> None:
    """A callback of the garbage collector's first run, by which time most imports are done."""
    gc.set_threshold(*GC_AFTERWARDS)


def _exit_code(stop: SystemExit) -> int:
    if isinstance(stop.__context__, BrokenPipeError):  # `ragblend ask ... | head`
        return DONE
    code = stop.code if isinstance(stop.code, int) else FAILED
    return code if code in (DONE, WRONG_USAGE) else FAILED


def _flush() -> None:
    """Flush the output; where that fails, redirect it, or Python would report an error at exit."""
    for stream in (sys.__stdout__, sys.__stderr__):  # typer may have wrapped sys.stdout and sys.stderr
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _print_json_error(given: list[str], kind: str, message: str) -> None:
    if "--json" in given:
        print(json.dumps({"error": {"type": kind, "message": message}}, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
