"""One call of a model, whichever framework makes it: what it was told, and the four ways to have it answered."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, Timer
from typing import TYPE_CHECKING, Any, Self

from ragblend.integrations.backend import Backend, Turn
from ragblend.integrations.passages import Passage
from ragblend.integrations.threads import in_thread, items_of_thread
from ragblend.kvstore.errors import Cancelled, UsageError

if TYPE_CHECKING:
    from ragblend.engine.prompt import Prompt
    from ragblend.engine.results import Result, Stream

log = logging.getLogger("ragblend")
_said: set[Backend] = set()
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

    learn: whether what comes back from an earlier prompt becomes a passage.
    arguments: method, ratio, and those of the engine's `DecodeOptions`.
    """

    backend: Backend
    named: tuple[Passage, ...]
    learn: bool
    timeout: float | None
    arguments: dict[str, Any]

    @classmethod
    def of(cls, backend: Backend, named: Sequence[Passage], learn: bool, *layers: Mapping[str, Any]) -> Self:
        """The last layer that says something wins. Raises UsageError for a name nobody knows, and a timeout of none.

        Of prompts that are read in full nothing is learnt, so that they are tokenized as any other model would.
        """
        from ragblend.engine.config import DecodeOptions

        merged: dict[str, Any] = {}
        for layer in layers:
            merged |= engine_options(layer)
        timeout = merged.pop("timeout", None)
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise UsageError(f"timeout must be a number of seconds above 0, not {timeout!r}")
        DecodeOptions.of({name: value for name, value in merged.items() if name not in ("method", "ratio")})
        return cls(backend, tuple(named), learn and merged.get("method") != "full", timeout, merged)

    def chat_prompt(self, turns: Sequence[Turn], named: Sequence[Passage] = ()) -> "Prompt":
        """May load the tokenizer and read the registry: not for an event loop."""
        return self._noted(self.backend.chat_prompt(turns, (*self.named, *named), self.learn))

    def text_prompt(self, text: str, parts: Sequence[str] = ()) -> "Prompt":
        return self._noted(self.backend.text_prompt(text, self.named, parts, self.learn))

    def _noted(self, prompt: "Prompt") -> "Prompt":
        """Says once for each model and collection that nothing can be reused."""
        if not prompt.chunks and self.backend not in _said:
            _said.add(self.backend)
            log.warning(
                "no known passage stands in this prompt, so it is read in full, as by any other model (%d are known in "
                "the collection %r). A passage is found where its text stands unchanged; it becomes known through a "
                "retriever, encode_index() or encode_documents(), or passages= in the call. This is said once.",
                len(self.backend.registry),
                self.backend.collection,
            )
        return prompt

    def generate(self, prompt: "Prompt") -> "Result":
        return self._work(prompt, Event())

    def stream(self, prompt: "Prompt") -> Generator["str | Result", None, None]:
        """The pieces, then the result. The device begins at once; closing it stops the device within one layer."""
        return self._items(self.backend.engine.stream(prompt, **self.arguments))

    def _items(self, stream: "Stream") -> Generator["str | Result", None, None]:
        with _limited(self.timeout, stream.close), closing(stream):
            yield from stream
            yield stream.result

    async def agenerate(self, prompt: "Prompt") -> "Result":
        """In a thread of its own; cancelling the task stops the device within one layer, and waits for that."""
        cancel = Event()
        work = asyncio.ensure_future(in_thread(partial(self._work, prompt, cancel)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            cancel.set()
            with suppress(Cancelled):
                await work
            raise

    async def astream(self, prompt: "Prompt") -> AsyncGenerator["str | Result", None]:
        """As `stream`, in an event loop; it begins when its first item is asked for."""
        cancel = Event()
        try:
            async with aclosing(items_of_thread(partial(self._work, prompt, cancel))) as items:
                async for item in items:
                    yield item
        finally:
            cancel.set()

    def _work(
        self, prompt: "Prompt", cancel: Event, on_text: Callable[[str], None] | None = None
    ) -> "Result":
        with _limited(self.timeout, cancel.set):
            return self.backend.engine.generate(prompt, cancel=cancel, on_text=on_text, **self.arguments)


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
            said = f"no whole answer within timeout={seconds} seconds; allow more, or fewer max_tokens"
            raise TimedOut(said) from error
        raise
    finally:
        timer.cancel()
