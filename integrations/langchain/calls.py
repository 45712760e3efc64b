"""One call of a model: its arguments settled, and the four ways to have it answered."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from threading import Event, Timer
from typing import TYPE_CHECKING, Any, cast

from ragblend.integrations.backend import Backend, Turn
from ragblend.integrations.langchain.documents import passages_of
from ragblend.integrations.langchain.errors import TimedOut
from ragblend.integrations.langchain.parameters import DECODING, Parameters, renamed
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import Cancelled, UsageError

if TYPE_CHECKING:
    from ragblend.engine.prompt import Prompt
    from ragblend.engine.results import Result

ENGINE_NAMES = {"max_tokens": "max_new_tokens"}  # the engine's names of what LangChain calls otherwise
TOOLS = ("tools", "tool_choice", "functions", "function_call")
FRAMEWORKS_OWN = ("stream",)  # LangChain's own switches, which it hands on to the model


log = logging.getLogger("ragblend")
_said: set[Backend] = set()


@dataclass(frozen=True)
class Call:
    """Where and how one prompt is answered. named: passages that the caller says are in the prompt."""

    backend: Backend
    named: tuple[Passage, ...]
    method: str | None
    ratio: float | str | None
    timeout: float | None
    options: dict[str, Any]

    @property
    def model_name(self) -> str:
        return self.backend.engine.model_name

    def chat_prompt(self, turns: Sequence[Turn], named: Sequence[Passage] = ()) -> "Prompt":
        return self._noted(self.backend.chat_prompt(turns, (*self.named, *named)))

    def text_prompt(self, text: str) -> "Prompt":
        return self._noted(self.backend.text_prompt(text, self.named))

    def _noted(self, prompt: "Prompt") -> "Prompt":
        """Says once a model and home that nothing can be reused; the prompt is answered all the same."""
        if not prompt.chunks and self.backend not in _said:
            _said.add(self.backend)
            log.warning(
                "no known document stands in this prompt, so it is read in full, as by any other model. Documents "
                "become known through a retriever, encode_documents(), content blocks with ids, or passages=."
            )
        return prompt

    def generate(self, prompt: "Prompt") -> "Result":
        cancel = Event()
        with _limited(self.timeout, cancel.set):
            return self.backend.generate(
                prompt, method=self.method, ratio=self.ratio, cancel=cancel, **self.options
            )

    def stream(self, prompt: "Prompt") -> Generator["str | Result", None, None]:
        """The pieces, then the result. Closing it stops the device."""
        stream = self.backend.stream(prompt, method=self.method, ratio=self.ratio, **self.options)
        with _limited(self.timeout, stream.close), stream:
            yield from stream
            yield stream.result

    async def agenerate(self, prompt: "Prompt") -> "Result":
        async with _within(self._deadline(), self.timeout):
            return await self.backend.agenerate(prompt, method=self.method, ratio=self.ratio, **self.options)

    async def astream(self, prompt: "Prompt") -> AsyncGenerator["str | Result", None]:
        deadline = self._deadline()
        items = self.backend.astream(prompt, method=self.method, ratio=self.ratio, **self.options)
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


def settle(parameters: Parameters, stop: Sequence[str] | None, arguments: Mapping[str, Any]) -> Call:
    """The call's own arguments go over the parameters. Raises UsageError for tools."""
    given = renamed(arguments)
    if refused := [name for name in TOOLS if given.get(name)]:
        raise UsageError(f"{', '.join(refused)}: this model calls no tools; leave them out")
    given = {name: value for name, value in given.items() if name not in (*TOOLS, *FRAMEWORKS_OWN)}
    if stop is not None:
        given["stop"] = stop
    passages = passages_of(given.pop("passages", None) or ())
    _check_timeout(given.get("timeout"))
    backend = parameters.backend(given.pop("model", None))
    method, ratio, timeout = (_taken(given, name, parameters) for name in ("method", "ratio", "timeout"))
    options = {name: _taken(given, name, parameters) for name in DECODING}
    options["stop"] = options["stop"] or ()
    options = {ENGINE_NAMES.get(name, name): value for name, value in options.items()}
    # The engine refuses a name that it does not know, and says which one is near.
    return Call(backend, tuple(passages), method, ratio, timeout, options | parameters.model_kwargs | given)


def _check_timeout(seconds: Any) -> None:
    """The field's own check, for a call. Raises UsageError."""
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise UsageError(f"timeout must be a number of seconds above 0, not {seconds!r}")


def _taken(given: dict[str, Any], name: str, parameters: Parameters) -> Any:
    value = given.pop(name, None)
    return getattr(parameters, name) if value is None else value


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
