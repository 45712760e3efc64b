"""Parts of the page over a home without a model, built without a server and without a browser."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ragblend.app.services import AppServices
from ragblend.ui.serving import gradio_environment

T = TypeVar("T")


@contextmanager
def built(folder: Path, make: Callable[[AppServices], T]) -> Iterator[tuple[T, asyncio.Runner]]:
    """What `make` gives, and the loop in which that was: outside one Gradio makes loops for locks, and closes none."""
    home = folder / "home"
    with (
        AppServices.open(home, model=str(folder / "none.gguf")) as services,
        gradio_environment(home),
        asyncio.Runner() as runner,
    ):

        async def made() -> T:
            return make(services)

        yield runner.run(made()), runner
