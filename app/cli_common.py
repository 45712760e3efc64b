"""What every command shares: its options, the workspace, and where its words go."""

import contextlib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

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


@dataclass(frozen=True)
class Cli:
    """One running command: what it was given, and its two outputs."""

    home: Path | None = None
    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    json: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)

    def open(self, **overrides: Any) -> "Workspace":
        """The workspace that the options name. Raises LibraryError, SettingsError."""
        from ragblend.app.workspace import Workspace

        given = {"model": self.model, "device": self.device, "dtype": self.dtype}
        return Workspace.open(self.home, **given, **overrides)

    def result(self, value: dict[str, Any], text: str) -> None:
        """The command's result: the object with --json, else the text."""
        print(json.dumps(value, ensure_ascii=False) if self.json else text, file=self.out, flush=True)

    def note(self, text: str) -> None:
        """Something on the way, for people."""
        print(text, file=sys.stderr, flush=True)


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Register a command with the shared options. It is called as f(cli, ...) and returns its exit code (None: 0)."""

    def decorate(function: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            cli = Cli(**{key: values.pop(key) for key in SHARED})
            with _only_results_on_stdout(cli):
                code = function(cli, **values) or 0
            if code:
                raise typer.Exit(code)

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        run.__signature__ = inspect.Signature([*own, *_shared_parameters()])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*own, *_shared_parameters()]}
        del run.__wrapped__  # else typer reads the annotations of what is wrapped
        app.command(name)(run)
        return run

    return decorate


def _shared_parameters() -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    defaults = {"json": False}
    return [
        inspect.Parameter(name, kind, default=defaults.get(name), annotation=annotation)
        for name, annotation in SHARED.items()
    ]


@contextlib.contextmanager
def _only_results_on_stdout(cli: Cli) -> Iterator[None]:
    """With --json, whatever a library prints goes to stderr; `Cli.out` still is the real stdout."""
    if not cli.json:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


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
