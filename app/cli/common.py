"""Shared by all commands: options, the open workspace, and output."""

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_type_hints

import typer

from ragblend.app import remote
from ragblend.app.home import Home
from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.kvstore.errors import Cancelled, UsageError

if TYPE_CHECKING:
    from ragblend.app.services import AppServices
    from ragblend.app.workspace import Workspace

Command = Callable[..., int | None]
# By name: the commands that run in the process that has the home open, if there is one.
FORWARDED: dict[str, Command] = {}
UNENCRYPTED = (
    "It is served without encryption: on a network you do not trust, put a proxy with TLS in front of it."
)
ADVANCED = "Advanced"  # the help's group of options that are seldom needed
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def option(default: Any, help: str, *names: str, advanced: bool = False, **more: Any) -> Any:
    """Declare a command-line option as a field of a dataclass that a command takes as one argument.

    Such a class is written once and used by several commands, so that options are not repeated. advanced: the help
    lists it last, in a group of its own.
    """
    group = ADVANCED if advanced else None
    return field(
        default=default, metadata={"option": typer.Option(*names, help=help, rich_help_panel=group, **more)}
    )


def parse_ratio(text: str) -> float | str:
    """A number, or a word that `Settings` accepts or refuses."""
    try:
        return float(text)
    except ValueError:
        return text


def absolute_folder(text: str) -> str:
    """An existing folder as an absolute path, since another process may run the command; else the text."""
    path = os.path.expanduser(text)
    return os.path.realpath(path) if text and os.path.isdir(path) else text


@dataclass(frozen=True)
class PromptOptions:
    """How prompts with passages are answered: settings for one command."""

    method: str | None = option(
        None, f"How to prefill: full, reuse, cacheblend, ... (default: {DEFAULT_METHOD}).", advanced=True
    )
    ratio: str | None = option(
        None,
        "Share of the stored tokens to recompute, or `auto`: as many as fit into the loading time "
        f"(default: {DEFAULT_RATIO}).",
        parser=parse_ratio,
        advanced=True,
    )
    top_k: int | None = option(None, "How many passages to read (default: 6).")
    max_new_tokens: int | None = option(
        None, "Longest answer, in tokens (default: what suits the model, else 256).", advanced=True
    )
    keep_tokens: int | None = option(
        None, "Keep only N passage tokens per head while decoding (default: all).", advanced=True
    )
    temperature: float | None = option(
        None, "0 for the likeliest answer, higher for variety (default: 0).", advanced=True
    )


@dataclass(frozen=True)
class AnswerOptions(PromptOptions):
    """How passages are found and the question is answered: settings for one command."""

    search: str | None = option(
        None,
        "How passages are found: hybrid (meaning and words) or vectors (default: hybrid).",
        advanced=True,
    )
    reranker: str | None = option(
        None,
        "Cross-encoder that ranks the passages: a hub id or a folder (default: none).",
        parser=absolute_folder,
        advanced=True,
    )


class Terminal:
    """A command's input and output: the streams of this process.

    environment: the variables that decide how progress is drawn, if they are another process's.
    """

    out: TextIO
    err: TextIO
    environment: Mapping[str, str] | None = None

    def __init__(self) -> None:
        self.out, self.err = sys.stdout, sys.stderr

    def read_line(self) -> str:
        """The next line of input; "" at its end."""
        return sys.stdin.readline()

    def check(self) -> bool:
        """An `is_cancelled` callback: raise KeyboardInterrupt if a remote user has interrupted the command."""
        return False

    def stopping(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """If a remote user interrupts within the block, call stop(), and raise KeyboardInterrupt at the block's end."""
        return contextlib.nullcontext()


@dataclass(frozen=True)
class CommandHost:
    """The process that has the home open, seen by a command that was forwarded to it.

    folder, environment: those of the shell in which the command was typed.
    """

    services: "AppServices"
    folder: Path
    environment: Mapping[str, str]

    def workspace(self, overrides: dict[str, Any]) -> "Workspace":
        """The workspace for a command. Raises UsageError if the command asks for another value of a process setting."""
        from ragblend.app.settings import PROCESS_SETTINGS, Settings

        spaces = self.services.workspaces
        wanted = Settings.read(spaces.home.settings, self.environment, overrides)
        here = {name: getattr(spaces.settings, name) for name in PROCESS_SETTINGS}
        for name, value in here.items():
            asked = getattr(wanted, name)
            if self._comparable(name, asked, self.folder) != self._comparable(name, value, Path.cwd()):
                has, asks = ("the default" if each is None else repr(each) for each in (value, asked))
                raise UsageError(
                    f"Process {os.getpid()} has the home {spaces.home.root} open, and its {name} is {has}; this "
                    f"command asks for {asks}. Leave that out, or end the process and run this again."
                )
        return spaces.with_settings(wanted.changed(here)).first

    def _comparable(self, name: str, value: Any, folder: Path) -> Any:
        """A form in which equal settings compare equal: absolute paths, the default device by its name."""
        if name == "model" and value != "default":
            path = os.path.join(folder, os.path.expanduser(value))
            return os.path.realpath(path) if os.path.exists(path) else value
        if name in ("device", "dtype") and not value:
            from ragblend.engine.model.device import pick_device, pick_dtype

            device = pick_device(self.services.settings.device)
            return str(pick_device(None)) if name == "device" else pick_dtype(device, None)
        return value


@dataclass(frozen=True)
class Cli:
    """One running command: the options that all commands have, and the command's output.

    host: the process that the command was forwarded to; None if it runs in its own process.
    """

    home: Path | None = option(None, "Where all data lives (default: RAGBLEND_HOME or your data folder).")
    model: str | None = option(None, "'default', a hub id, a folder or a .gguf file.")
    device: str | None = option(None, "cpu, cuda or mps (default: the best there is).", advanced=True)
    dtype: str | None = option(None, "float32, bfloat16 or float16 (default: what is fast).", advanced=True)
    vllm: str | None = option(
        None,
        "Address of a vLLM server that has the model (default: the model is loaded here).",
        advanced=True,
    )
    remote: str | None = option(
        None, "URL of a KV store that machines share, such as redis://host:6379/0.", advanced=True
    )
    json: bool = option(False, "One JSON object on stdout, all else on stderr.", "--json")
    terminal: Terminal = field(default_factory=Terminal)
    host: CommandHost | None = None

    @property
    def out(self) -> TextIO:
        return self.terminal.out

    @property
    def overrides(self) -> dict[str, Any]:
        names = ("model", "device", "dtype", "vllm", "remote")
        return {name: getattr(self, name) for name in names}

    @property
    def folder(self) -> Path:
        """The folder that relative paths on the command line start from."""
        return Path.cwd() if self.host is None else self.host.folder

    def create_home(self) -> Home:
        """The home, created if it does not exist. Raises LibraryError."""
        return Home.resolve(self.home).create()

    def open(self, **overrides: Any) -> "Workspace":
        """Open the workspace with these options and overrides. Raises LibraryError, SettingsError."""
        if self.host is not None:
            return self.host.workspace(self.overrides | overrides)
        from ragblend.app.models import check_model
        from ragblend.app.workspace import Workspace

        workspace = Workspace.open(self.home, **self.overrides, **overrides)
        if self.model is not None:
            check_model(self.model, workspace.home.models)
        return workspace

    def open_collection(self, name: str | None, **overrides: Any) -> "Workspace":
        """As `open`, for one collection. Raises UsageError if it is named and does not exist."""
        from ragblend.app.answering.retrieval import check_collection

        workspace = self.open(collection=name, **overrides)
        if name is not None:
            check_collection(workspace.library, name)
        return workspace

    @contextlib.contextmanager
    def services(self) -> "Iterator[AppServices]":
        """The services over the home: the host's, or those of this process, closed after the block."""
        if self.host is not None:
            yield self.host.services
            return
        from ragblend.app.services import AppServices

        with AppServices.open(self.home, **self.overrides) as services:
            yield services

    def result(self, value: dict[str, Any], text: str) -> None:
        """Print the command's result: the object with --json, else the text."""
        print(json.dumps(value, ensure_ascii=False) if self.json else text, file=self.out, flush=True)

    def note(self, text: str) -> None:
        """Print a note for people on stderr."""
        with contextlib.suppress(BrokenPipeError):  # the result may still be read
            print(text, file=self.terminal.err, flush=True)


def command(
    app: typer.Typer, name: str | None = None, forwarded: bool = False, group: str | None = None
) -> Callable[[Command], Command]:
    """Register a command, by default under the function's name; it returns an exit code (None: 0).

    forwarded: the command runs in the process that has the home open, if there is one. group: the help lists it there.
    """

    def decorate(function: Command) -> Command:
        register = app.command(name or getattr(function, "__name__", None), rich_help_panel=group)
        register(typer_callback(function, forwarded))
        return function

    return decorate


def run_forwarded(name: str, arguments: dict[str, Any], terminal: Terminal, host: CommandHost) -> int:
    """Run a command that another process sent, and return its exit code. arguments: as `typer_callback` packs them."""
    function = FORWARDED[name]
    given = {each: kind(**arguments.pop(each)) for each, kind in _option_classes(function).items()}
    given["cli"] = replace(given["cli"], terminal=terminal, host=host)
    return function(**given, **arguments) or 0


def _option_classes(function: Command) -> dict[str, Any]:
    """The dataclasses of options among a command's parameters, by parameter name."""
    parameters = inspect.signature(function, eval_str=True).parameters
    return {name: one.annotation for name, one in parameters.items() if is_dataclass(one.annotation)}


def typer_callback(function: Command, forwarded: bool = False) -> Callable[..., None]:
    """The function that typer calls for a command: its classes of options are spread into single options."""
    classes = _option_classes(function)
    name = getattr(function, "__name__", "")
    if forwarded:
        FORWARDED[name] = function
    options = {each: _option_parameters(kind) for each, kind in reversed(classes.items())}  # `Cli`'s last

    def run(**values: Any) -> None:
        packed = {each: {one.name: values.pop(one.name) for one in options[each]} for each in classes}
        given = {each: kind(**packed[each]) for each, kind in classes.items()}
        cli: Cli = given["cli"]
        # With --json, whatever a library prints goes to stderr; `Cli.out` still is the real stdout.
        library_output = contextlib.redirect_stdout(sys.stderr) if cli.json else contextlib.nullcontext()
        try:
            root = Home.resolve(cli.home).root
            channel = remote.connect(root) if forwarded else None
            if channel is None:
                with library_output:
                    code = function(**given, **values) or 0
            else:
                with channel:
                    code = remote.run(channel, root, name, packed | values, cli.out)
        except KeyboardInterrupt:
            raise Cancelled("Interrupted.") from None
        if code:
            raise typer.Exit(code)

    own = inspect.signature(function, eval_str=True).parameters
    parameters = [one.replace(kind=KEYWORD_ONLY) for each, one in own.items() if each not in classes]
    parameters += [one for listed in options.values() for one in listed]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__doc__ = function.__doc__
    return run


def _option_parameters(kind: Any) -> list[inspect.Parameter]:
    types = get_type_hints(kind)
    return [
        inspect.Parameter(
            each.name,
            KEYWORD_ONLY,
            default=each.default,
            annotation=Annotated[types[each.name], each.metadata["option"]],
        )
        for each in fields(kind)
        if "option" in each.metadata
    ]
