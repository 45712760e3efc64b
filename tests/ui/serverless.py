"""Parts of the page over a home without a model, built without a server and without a browser."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ragblend.app.desk import Desk
from ragblend.ui.serving import gradio_environment

T = TypeVar("T")


@contextmanager
def built(folder: Path, make: Callable[[Desk], T]) -> Iterator[tuple[T, asyncio.Runner]]:
    """What `make` gives, and the loop in which that was: outside one Gradio makes loops for locks, and closes none."""
    home = folder / "home"
    with (
        Desk.open(home, model=str(folder / "none.gguf")) as desk,
        gradio_environment(home),
        asyncio.Runner() as runner,
    ):

        async def made() -> T:
            return make(desk)

        yield runner.run(made()), runner
