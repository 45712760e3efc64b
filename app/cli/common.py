"""What every command shares: its options, the workspace, and where its words go."""

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_type_hints

import typer

from ragblend.app import remote
from ragblend.app.home import Home
from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.kvstore.errors import Cancelled

if TYPE_CHECKING:
    from ragblend.app.desk import Desk
    from ragblend.app.serve.commands import Shared
    from ragblend.app.workspace import Workspace

Command = Callable[..., int | None]
SHARED: dict[str, Command] = {}  # by name, what the process runs that has the home open
UNENCRYPTED = "It is served without encryption: put a proxy with TLS before it on a network you do not trust."
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """A field of a class that a command takes: an option of that name, or of these names, with its words.

    Such a class is written once and holds what was given, so that a command need not name each option again.
    """
    return field(default=default, metadata={"option": typer.Option(*names, help=help, **more)})


def ratio_of(text: str) -> float | str:
    """A number, or a word for the settings to judge."""
    try:
        return float(text)
    except ValueError:
        return text


def folder_or_id(text: str) -> str:
    """A folder by its whole path: the process that runs the command may stand in another one."""
    path = os.path.expanduser(text)
    return os.path.realpath(path) if text and os.path.isdir(path) else text


@dataclass(frozen=True)
class AnswerOptions:
    """How a question is answered: settings that hold for one command."""

    method: str | None = option(None, f"How to prefill: full, reuse, cacheblend, ... [{DEFAULT_METHOD}].")
    ratio: str | None = option(
        None,
        f"Share of the stored tokens to compute again, or `auto`: what loading hides [{DEFAULT_RATIO}].",
        parser=ratio_of,
    )
    top_k: int | None = option(None, "How many passages to read [6].")
    search: str | None = option(None, "How they are found: hybrid (meaning and words) or vectors [hybrid].")
    reranker: str | None = option(
        None, "Cross-encoder that puts them in order: a hub id or a folder [none].", parser=folder_or_id
    )
    max_new_tokens: int | None = option(None, "Longest answer, in tokens [what suits the model, else 256].")
    keep_tokens: int | None = option(
        None, "Of the passages keep so many tokens a head after the first token [all]."
    )
    temperature: float | None = option(None, "0 for the likeliest answer, higher for variety [0].")


class Terminal:
    """Where a command's words come from and go to: this process's own streams.

    environment: what decides how progress is drawn, where it is not this process's.
    """

    out: TextIO
    err: TextIO
    environment: Mapping[str, str] | None = None

    def __init__(self) -> None:
        self.out, self.err = sys.stdout, sys.stderr

    def read_line(self) -> str:
        """The next line of the input; "" at its end."""
        return sys.stdin.readline()

    def check(self) -> bool:
        """Raises KeyboardInterrupt for a command that was interrupted from afar; else False."""
        return False

    def stopping(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Has stop() called where that happens within the block, whose end then raises KeyboardInterrupt."""
        return contextlib.nullcontext()


@dataclass(frozen=True)
class Cli:
    """One running command: what every command is given, and its two outputs.

    shared: what the process has open that the command was sent to; None where it runs in its own.
    """

    home: Path | None = option(None, "Where all data lives [default: RAGBLEND_HOME or your data folder].")
    model: str | None = option(None, "'default', a hub id, a folder or a .gguf file.")
    device: str | None = option(None, "cpu, cuda or mps [default: the best there is].")
    dtype: str | None = option(None, "float32, bfloat16 or float16 [default: what is fast].")
    vllm: str | None = option(None, "Address of a vLLM server that has the model [none: it is loaded here].")
    remote: str | None = option(None, "URL of a KV store that machines share, such as redis://host:6379/0.")
    json: bool = option(False, "One JSON object on stdout, all else on stderr.", "--json")
    terminal: Terminal = field(default_factory=Terminal)
    shared: Any = None  # a `serve.commands.Shared`

    @property
    def out(self) -> TextIO:
        return self.terminal.out

    @property
    def overrides(self) -> dict[str, Any]:
        names = ("model", "device", "dtype", "vllm", "remote")
        return {name: getattr(self, name) for name in names}

    @property
    def folder(self) -> Path:
        """Where a relative path of the command line begins."""
        return Path.cwd() if self.shared is None else self.shared.folder

    @property
    def place(self) -> Home:
        """The home, made if need be. Raises LibraryError."""
        return Home.resolve(self.home).create()

    def open(self, **overrides: Any) -> "Workspace":
        """The workspace that the options name. Raises LibraryError, SettingsError."""
        if self.shared is not None:
            return self.shared.workspace(self.overrides | overrides)
        from ragblend.app.models import check_model
        from ragblend.app.workspace import Workspace

        workspace = Workspace.open(self.home, **self.overrides, **overrides)
        if self.model is not None:
            check_model(self.model, workspace.home.models)
        return workspace

    def open_collection(self, name: str | None, **overrides: Any) -> "Workspace":
        """The same; a collection that is named must be there. Raises UsageError as well."""
        from ragblend.app.answering.retrieval import check_collection

        workspace = self.open(collection=name, **overrides)
        if name is not None:
            check_collection(workspace.library, name)
        return workspace

    @contextlib.contextmanager
    def desk(self) -> "Iterator[Desk]":
        """The desk over the home: that of the process that has it open, or one of its own."""
        if self.shared is not None:
            yield self.shared.desk
            return
        from ragblend.app.desk import Desk

        with Desk.open(self.home, **self.overrides) as desk:
            yield desk

    def result(self, value: dict[str, Any], text: str) -> None:
        """The command's result: the object with --json, else the text."""
        print(json.dumps(value, ensure_ascii=False) if self.json else text, file=self.out, flush=True)

    def note(self, text: str) -> None:
        """Something on the way, for people."""
        with contextlib.suppress(BrokenPipeError):  # who reads no notes may still read the result
            print(text, file=self.terminal.err, flush=True)


def command(app: typer.Typer, name: str | None = None, shared: bool = False) -> Callable[[Command], Command]:
    """Register a command, under the function's name if no other is given; it returns its exit code (None: 0).

    shared: where a process has the home open, the command is run by that.
    """

    def decorate(function: Command) -> Command:
        app.command(name or getattr(function, "__name__", None))(runner(function, shared))
        return function

    return decorate


def run_shared(name: str, arguments: dict[str, Any], terminal: Terminal, shared: "Shared") -> int:
    """Run a command that another process sent; its exit code. arguments: as `runner` packs them."""
    function = SHARED[name]
    given = {each: kind(**arguments.pop(each)) for each, kind in _classes(function).items()}
    given["cli"] = replace(given["cli"], terminal=terminal, shared=shared)
    return function(**given, **arguments) or 0


def _classes(function: Command) -> dict[str, Any]:
    """The classes of options that a command takes, by its names for them."""
    asked = inspect.signature(function, eval_str=True).parameters
    return {name: one.annotation for name, one in asked.items() if is_dataclass(one.annotation)}


def runner(function: Command, shared: bool = False) -> Callable[..., None]:
    """What typer calls: with the function's arguments and options, those of classes of options one by one."""
    asked = inspect.signature(function, eval_str=True).parameters
    classes = _classes(function)
    called = getattr(function, "__name__", "")
    if shared:
        SHARED[called] = function
    options = {name: _options(kind) for name, kind in reversed(classes.items())}  # the shared ones last

    def run(**values: Any) -> None:
        told = {name: {each.name: values.pop(each.name) for each in options[name]} for name in classes}
        given = {name: kind(**told[name]) for name, kind in classes.items()}
        cli: Cli = given["cli"]
        # With --json, whatever a library prints goes to stderr; `Cli.out` still is the real stdout.
        aside = contextlib.redirect_stdout(sys.stderr) if cli.json else contextlib.nullcontext()
        try:
            root = Home.resolve(cli.home).root
            line = remote.connected(root) if shared else None
            if line is None:
                with aside:
                    code = function(**given, **values) or 0
            else:
                with line:
                    code = remote.run(line, root, called, told | values, cli.out)
        except KeyboardInterrupt:
            raise Cancelled("Interrupted.") from None
        if code:
            raise typer.Exit(code)

    parameters = [one.replace(kind=KEYWORD_ONLY) for name, one in asked.items() if name not in classes]
    parameters += chain(*options.values())
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__ = function.__doc__
    return run


def _options(kind: Any) -> list[inspect.Parameter]:
    types = get_type_hints(kind)
    listed = [each for each in fields(kind) if "option" in each.metadata]
    kinds = [Annotated[types[each.name], each.metadata["option"]] for each in listed]
    named = zip(listed, kinds, strict=True)
    return [inspect.Parameter(f.name, KEYWORD_ONLY, default=f.default, annotation=kind) for f, kind in named]


def plural(count: int, noun: str) -> str:
    """1 passage, 2 passages."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Bytes for people: 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
