"""One call of a model, whichever framework makes it: what it was told, and the four ways to have it answered."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Timer
from typing import TYPE_CHECKING, Any, Self

from ragblend.integrations.backend import Backend, Turn
from ragblend.integrations.passages import Passage
from ragblend.integrations.threads import in_thread, items_of_thread
from ragblend.integrations.tools import Wanted
from ragblend.kvstore.errors import Cancelled, UsageError

if TYPE_CHECKING:
    from ragblend.engine.prompts.segments import Prompt
    from ragblend.engine.prompts.session import Session
    from ragblend.engine.prompts.tools import ParsedAnswer, TextBeforeCalls
    from ragblend.engine.results import Result, Stream

log = logging.getLogger("ragblend")
_said: set[tuple[Backend, str]] = set()
_ROOM = 1000  # characters: a shorter prompt (a title's, a condensed question's) holds no passage by design
# Why nothing of a prompt is reused, and what helps; each is said once for a model and collection.
REASONS = {
    "named": "passages that this call names (passages=, nodes=, documents of a tool) do not stand in its prompt "
    "unchanged; name the texts as they stand there",
    "changed": "passages were retrieved, and none of them stands in this prompt unchanged: they were cut, or written "
    "in another form. In LlamaIndex configure(llm) keeps them from being cut, and RegisterNodes as the last "
    "postprocessor tells what others made of them; elsewhere encode_documents(), or passages= in the call, tells the "
    "texts as they stand in prompts",
    "unknown": "nothing is known in this collection, and learn_from_prompts is off. A text becomes known through a "
    "retriever, encode_index() or encode_documents(), or passages= in the call",
}
# The engine's names for what users of other models write.
OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "stop_sequences": "stop",
    "request_timeout": "timeout",
}
# What models of services take besides, each with the values that say what is the case here anyway.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "stream_usage": (True, False),
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


def without_neutral(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what says nothing here. Raises UsageError for a value of those that cannot be had."""
    for name, value in options.items():
        if (same := NEUTRAL.get(name)) and value is not None and value not in same:
            raise UsageError(
                f"{name}={value!r} cannot be done by this model; leave it out, or pass {same[0]!r}"
            )
    return {name: value for name, value in options.items() if name not in NEUTRAL}


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same by the engine's names; None says nothing. Raises UsageError."""
    told = without_neutral(options)
    named = {name: value for name, value in one_name_each(told, OTHER_NAMES).items() if value is not None}
    sampled = named.pop("do_sample", None)
    if sampled is False:  # transformers' way of saying temperature 0
        named["temperature"] = 0.0
    elif sampled and not named.get("temperature"):
        named["temperature"] = 1.0
    # OpenAI's two parameters; ours is the second.
    likely, wants = named.pop("top_logprobs", None), named.get("logprobs")
    if isinstance(wants, bool) or (wants is None and likely is not None):
        named["logprobs"] = (likely or 0) if wants or wants is None else None
    return named


@dataclass(frozen=True)
class Call:
    """Where and how one prompt is answered. named: passages that the caller says are in the prompt.

    learn: whether what comes back from an earlier prompt becomes a passage. wanted: tools and schemas.
    arguments: method, ratio, and those of the engine's `DecodeOptions`. session: of the conversation, if it has one.
    client: whose it is, where several share a device.
    """

    backend: Backend
    named: tuple[Passage, ...]
    learn: bool
    timeout: float | None
    arguments: dict[str, Any]
    wanted: Wanted = field(default_factory=Wanted)
    session: "Session | None" = None
    client: str = ""

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
        told = (
            merged.pop(name, None) for name in ("tools", "tool_choice", "parallel_tool_calls", "json_schema")
        )
        wanted = Wanted.of(*told)
        DecodeOptions.of({name: value for name, value in merged.items() if name not in ("method", "ratio")})
        return cls(backend, tuple(named), learn and merged.get("method") != "full", timeout, merged, wanted)

    def chat_prompt(self, turns: Sequence[Turn], named: Sequence[Passage] = ()) -> "Prompt":
        """May load the tokenizer and read the registry: not for an event loop."""
        named = (*self.named, *named)
        prompt = self.backend.chat_prompt(turns, named, self.learn, self.wanted.tools)
        return self._noted(prompt, bool(named))

    def text_prompt(self, text: str, parts: Sequence[str] = ()) -> "Prompt":
        return self._noted(self.backend.text_prompt(text, self.named, parts, self.learn), bool(self.named))

    def _noted(self, prompt: "Prompt", is_named: bool) -> "Prompt":
        """Says once for each reason that nothing of the prompt is reused, where passages were to be expected in it."""
        registry = self.backend.registry
        if prompt.chunks:
            registry.awaited = 0
            return prompt
        length = sum(len(segment.text or "") for segment in prompt.segments)
        is_unknown = not self.learn and length >= _ROOM and not len(registry)
        expected = {"named": is_named, "changed": 0 < registry.awaited <= length, "unknown": is_unknown}
        reason = next((reason for reason, is_so in expected.items() if is_so), None)
        if reason and (self.backend, reason) not in _said and self.arguments.get("method") != "full":
            _said.add((self.backend, reason))
            collection = self.backend.collection
            log.warning("a prompt is read in full (collection %r): %s", collection, REASONS[reason])
        return prompt

    def generate(self, prompt: "Prompt") -> "Result":
        return self._work(prompt, Event())

    def stream(self, prompt: "Prompt") -> Generator["str | Result", None, None]:
        """The pieces, then the result. The device begins at once; closing it stops the device within one layer."""
        return self._items(self.backend.engine.stream(prompt, session=self.session, **self._options()))

    def said(self, result: "Result") -> "ParsedAnswer":
        """The answer's words, and the tools that it calls."""
        from ragblend.engine.prompts.tools import ParsedAnswer, parse_answer

        if not self.wanted.tools:
            return ParsedAnswer(result.text)
        return parse_answer(result.text, self.backend.engine.call_format, self.wanted.tools)

    def _options(self) -> dict[str, Any]:
        grammar = self.wanted.grammar(self.backend.engine)
        return self.arguments if grammar is None else self.arguments | {"grammar": grammar}

    def _items(self, stream: "Stream") -> Generator["str | Result", None, None]:
        with _limited(self.timeout, stream.stop), closing(stream):  # what is finished is still given
            words = _Words(self)
            for piece in stream:
                yield from words.of(piece)
            result = self._checked(stream.result)
            yield from words.of(result)
            yield result

    def _checked(self, result: "Result") -> "Result":
        if result.stopped:
            return result
        said, most = self.said(result), len(result.token_ids)
        if said.broken is not None:
            log.warning(
                "the answer reached its most tokens (%d) in a call of %s, which is not made; allow more with "
                "max_new_tokens",
                most,
                said.broken_name or "a tool",
            )
        elif self.wanted.schema is not None:
            log.warning(
                "the answer reached its most tokens (%d): what its JSON says last may be cut short; allow more with "
                "max_tokens",
                most,
            )
        return result

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
        cancel, words = Event(), _Words(self)
        try:
            async with aclosing(items_of_thread(partial(self._work, prompt, cancel))) as items:
                async for item in items:
                    for piece in words.of(item):
                        yield piece
                    if not isinstance(item, str):
                        yield item
        finally:
            cancel.set()

    def _work(
        self, prompt: "Prompt", cancel: Event, on_text: Callable[[str], None] | None = None
    ) -> "Result":
        with _limited(self.timeout, cancel.set) as deadline:
            options = self._options()
            result = self.backend.engine.generate(
                prompt,
                cancel=cancel,
                on_text=on_text,
                session=self.session,
                client=self.client,
                deadline=deadline,
                **options,
            )
            return self._checked(result)


class _Words:
    """Of a call's stream the words alone: what calls a tool comes with the result."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._words: TextBeforeCalls | None = None

    def of(self, item: "str | Result") -> Iterator[str]:
        """What is said with this piece, or what is left to say when all is known."""
        from ragblend.engine.prompts.tools import TextBeforeCalls

        if not self._call.wanted.tools:
            yield from [item] if isinstance(item, str) else []
            return
        words = self._words = self._words or TextBeforeCalls(self._call.backend.engine.call_format)
        piece = words.feed(item) if isinstance(item, str) else words.finish(self._call.said(item).text)
        if piece:
            yield piece


@contextmanager
def _limited(seconds: float | None, stop: Callable[[], None]) -> Iterator[float]:
    """Stops the work after that time, and says so. Gives when that is, by `time.monotonic`."""
    if seconds is None:
        yield math.inf
        return
    late, deadline = Event(), time.monotonic() + seconds

    def end() -> None:
        late.set()
        stop()

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield deadline
    except Cancelled as error:
        if late.is_set() or time.monotonic() >= deadline:
            said = f"no whole answer within timeout={seconds} seconds; allow more, or fewer max_tokens"
            raise TimedOut(said) from error
        raise
    finally:
        timer.cancel()
