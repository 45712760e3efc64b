"""What every command shares: its options, the workspace, and where its words go."""

import contextlib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.kvstore.errors import Cancelled

if TYPE_CHECKING:
    from ragblend.app.workspace import Workspace

SHARED: dict[str, Any] = {
    "home": Annotated[
        Path | None, typer.Option(help="Where all data lives [default: RAGBLEND_HOME or your data folder].")
    ],
    "model": Annotated[str | None, typer.Option(help="'default', a hub id, a folder or a .gguf file.")],
    "device": Annotated[str | None, typer.Option(help="cpu, cuda or mps [default: the best there is].")],
    "dtype": Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 [default: what is fast].")
    ],
    "json": Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")],
}


def ratio_of(text: str) -> float | str:
    """A number, or a word for the settings to judge."""
    try:
        return float(text)
    except ValueError:
        return text


# How a question is answered: settings that hold for one command.
ANSWERING: dict[str, Any] = {
    "method": Annotated[
        str | None, typer.Option(help=f"How to prefill: full, reuse, cacheblend, ... [{DEFAULT_METHOD}].")
    ],
    "ratio": Annotated[
        str | None,
        typer.Option(
            help=f"Share of the stored tokens to compute again, or `auto`: what loading hides [{DEFAULT_RATIO}].",
            parser=ratio_of,
        ),
    ],
    "top_k": Annotated[int | None, typer.Option(help="How many passages to read [6].")],
    "max_new_tokens": Annotated[
        int | None, typer.Option(help="Longest answer, in tokens [what suits the model, else 256].")
    ],
    "keep_tokens": Annotated[
        int | None,
        typer.Option(help="Of the passages keep so many tokens a head after the first token [all]."),
    ],
    "temperature": Annotated[
        float | None, typer.Option(help="0 for the likeliest answer, higher for variety [0].")
    ],
}


@dataclass(frozen=True)
class Cli:
    """One running command: what it was given, and its two outputs. changes: settings that were named, `ANSWERING`."""

    home: Path | None = None
    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    json: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    out: TextIO = field(default_factory=lambda: sys.stdout)

    def open(self, **overrides: Any) -> "Workspace":
        """The workspace that the options name. Raises LibraryError, SettingsError."""
        from ragblend.app.workspace import Workspace

        given = {"model": self.model, "device": self.device, "dtype": self.dtype}
        workspace = Workspace.open(self.home, **given, **self.changes, **overrides)
        if self.model is not None:
            from ragblend.app.models import check_model

            check_model(self.model, workspace.home.models)
        return workspace

    def open_collection(self, name: str | None, **overrides: Any) -> "Workspace":
        """The same; a collection that is named must be there. Raises UsageError as well."""
        from ragblend.app.retrieval import check_collection

        workspace = self.open(collection=name, **overrides)
        if name is not None:
            check_collection(workspace.library, name)
        return workspace

    def result(self, value: dict[str, Any], text: str) -> None:
        """The command's result: the object with --json, else the text."""
        print(json.dumps(value, ensure_ascii=False) if self.json else text, file=self.out, flush=True)

    def note(self, text: str) -> None:
        """Something on the way, for people."""
        with contextlib.suppress(BrokenPipeError):  # who reads no notes may still read the result
            print(text, file=sys.stderr, flush=True)


def command(
    app: typer.Typer, name: str, options: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Register a command with the shared options, and some more. It is called as f(cli, ...) and returns its exit code
    (None: 0).
    """

    def decorate(function: Callable[..., int | None]) -> Callable[..., None]:
        run = runner(function, options)
        app.command(name)(run)
        return run

    return decorate


def runner(
    function: Callable[..., int | None], options: Mapping[str, Any] = MappingProxyType({})
) -> Callable[..., None]:
    """What typer calls, with the function's own options and the shared ones."""

    @functools.wraps(function)
    def run(**values: Any) -> None:
        shared = {key: values.pop(key) for key in SHARED}
        cli = Cli(**shared, changes={key: values.pop(key) for key in options})
        try:
            with _only_results_on_stdout(cli):
                code = function(cli, **values) or 0
        except KeyboardInterrupt:
            raise Cancelled("Interrupted.") from None
        if code:
            raise typer.Exit(code)

    kind, defaults = inspect.Parameter.KEYWORD_ONLY, {"json": False}
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    parameters += [
        inspect.Parameter(name, kind, default=defaults.get(name), annotation=annotation)
        for name, annotation in {**options, **SHARED}.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # else typer reads the annotations of what is wrapped
    return run


def _only_results_on_stdout(cli: Cli) -> contextlib.AbstractContextManager[Any]:
    """With --json, whatever a library prints goes to stderr; `Cli.out` still is the real stdout."""
    return contextlib.redirect_stdout(sys.stderr) if cli.json else contextlib.nullcontext()


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
