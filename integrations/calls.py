"""One call of a model, whichever framework makes it: what it was told, and the four ways to have it answered."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from threading import Event, Timer
from typing import TYPE_CHECKING, Any, Self, cast

from ragblend.integrations.backend import Backend
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import Cancelled, UsageError

if TYPE_CHECKING:
    from ragblend.engine.prompt import Prompt
    from ragblend.engine.results import Result, Stream

# The engine's names for what users of other models write.
OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "stop_sequences": "stop",
}


class TimedOut(Cancelled):
    """The answer took longer than `timeout`."""


def one_name_each(arguments: Mapping[str, Any], other_names: Mapping[str, str]) -> dict[str, Any]:
    """The arguments under one name each. Raises UsageError where two names say the same thing."""
    result: dict[str, Any] = {}
    for name, value in arguments.items():
        known = other_names.get(name, name)
        if known in result:
            same = [known, *(other for other in arguments if other_names.get(other) == known)]
            raise UsageError(f"{' and '.join(same)} mean the same; pass one of them")
        result[known] = value
    return result


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same by the engine's names; None says nothing. Raises UsageError."""
    named = {name: value for name, value in one_name_each(options, OTHER_NAMES).items() if value is not None}
    sampled = named.pop("do_sample", None)
    if sampled is False:  # transformers' way of saying temperature 0
        named["temperature"] = 0.0
    elif sampled and not named.get("temperature"):
        named["temperature"] = 1.0
    return named


@dataclass(frozen=True)
class Call:
    """Where and how one prompt is answered. named: passages that the caller says are in the prompt.

    arguments: method, ratio, and those of the engine's `DecodeOptions`.
    """

    backend: Backend
    named: tuple[Passage, ...]
    timeout: float | None
    arguments: dict[str, Any]

    @classmethod
    def of(cls, backend: Backend, named: Sequence[Passage], *layers: Mapping[str, Any]) -> Self:
        """The last layer that says something wins. Raises UsageError for a name nobody knows, and a timeout of none."""
        from ragblend.engine.config import DecodeOptions

        merged: dict[str, Any] = {}
        for layer in layers:
            merged |= engine_options(layer)
        timeout = merged.pop("timeout", None)
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise UsageError(f"timeout must be a number of seconds above 0, not {timeout!r}")
        DecodeOptions.of({name: value for name, value in merged.items() if name not in ("method", "ratio")})
        return cls(backend, tuple(named), timeout, merged)

    def generate(self, prompt: "Prompt") -> "Result":
        cancel = Event()
        with _limited(self.timeout, cancel.set):
            return self.backend.generate(prompt, cancel=cancel, **self.arguments)

    def stream(self, prompt: "Prompt") -> Generator["str | Result", None, None]:
        """The pieces, then the result. The device begins at once; closing it stops the device."""
        return self._items(self.backend.stream(prompt, **self.arguments))

    def _items(self, stream: "Stream") -> Generator["str | Result", None, None]:
        with _limited(self.timeout, stream.close), closing(stream):
            yield from stream
            yield stream.result

    async def agenerate(self, prompt: "Prompt") -> "Result":
        async with _within(self._deadline(), self.timeout):
            return await self.backend.agenerate(prompt, **self.arguments)

    async def astream(self, prompt: "Prompt") -> AsyncGenerator["str | Result", None]:
        """The same, in an event loop; it begins when its first item is asked for."""
        deadline = self._deadline()
        items = self.backend.astream(prompt, **self.arguments)
        async with aclosing(cast("AsyncGenerator[str | Result, None]", items)):
            while True:
                try:
                    # Around one step only: a limit held over a `yield` would strike at whoever consumes the stream.
                    async with _within(deadline, self.timeout):
                        item = await anext(items)
                except StopAsyncIteration:
                    return
                yield item

    def _deadline(self) -> float | None:
        return None if self.timeout is None else asyncio.get_running_loop().time() + self.timeout


@contextmanager
def _limited(seconds: float | None, stop: Callable[[], None]) -> Iterator[None]:
    """Stops the work after that time, and says so."""
    if seconds is None:
        yield
        return
    late = Event()

    def end() -> None:
        late.set()
        stop()

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Cancelled as error:
        if late.is_set():
            raise _timed_out(seconds) from error
        raise
    finally:
        timer.cancel()


@asynccontextmanager
async def _within(deadline: float | None, seconds: float | None) -> AsyncIterator[None]:
    """deadline: on the loop's clock; what is cancelled inside stops the device."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise _timed_out(seconds) from error


def _timed_out(seconds: float | None) -> TimedOut:
    return TimedOut(f"no whole answer within timeout={seconds} seconds; allow more, or fewer max_tokens")
