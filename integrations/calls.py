"""One request to the model by LangChain, LlamaIndex or the server: its options, and four ways to get the answer.

`Call` is the request, `PreparedCall` gives the answer: whole or in pieces, each for threads and for an event loop.
"""

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Timer
from typing import TYPE_CHECKING, Any, Self

from ragblend.integrations.backend import Backend, ChatTurn
from ragblend.integrations.passages import Passage
from ragblend.integrations.threads import in_thread, iterate_in_thread
from ragblend.integrations.tools import AnswerFormat
from ragblend.kvstore.errors import Cancelled, StoreError, UsageError

if TYPE_CHECKING:
    from ragblend.engine.prompts.segments import Prompt
    from ragblend.engine.prompts.session import Session
    from ragblend.engine.prompts.tools import ParsedAnswer
    from ragblend.engine.results import Result, Stream

log = logging.getLogger("ragblend")
_logged: set[tuple[Backend, str]] = set()  # reasons that were already logged, by backend
_MIN_CONTEXT_CHARS = 1000  # a shorter prompt (for a title, say) is not expected to hold passages
# Reasons why nothing of a prompt is reused, with advice; each is logged once per backend (a model and a collection).
NO_REUSE_REASONS = {
    "named": "the passages that this call names (passages=, nodes=, documents of a tool) are not in its prompt "
    "unchanged; name the texts as they are in the prompt",
    "changed": "passages were retrieved, and none of them is in this prompt unchanged: they were cut, or reformatted. "
    "In LlamaIndex configure(llm) keeps them from being cut, and RegisterNodes as the last postprocessor registers "
    "what other postprocessors made of them; elsewhere use encode_documents(), or passages= in the call, with the "
    "texts as they are in prompts",
    "unknown": "no passage is registered in this collection, and learn_from_prompts is off. Texts are registered by a "
    "retriever, encode_index() or encode_documents(), or passages= in the call",
}
# Other models' names of the engine's options.
ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "stop_sequences": "stop",
    "request_timeout": "timeout",
}
# Options of hosted models that this model does not have, with the values that are accepted because they change nothing.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stream_usage": (True, False),
}


class AnswerTimeout(Cancelled):
    """The answer took longer than `timeout`."""


def resolve_aliases(arguments: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The arguments by their canonical names. Raises UsageError if two names mean the same option."""
    result: dict[str, Any] = {}
    for name, value in arguments.items():
        canonical = aliases.get(name, name)
        if canonical in result:
            same = [canonical, *(other for other in arguments if aliases.get(other) == canonical)]
            raise UsageError(f"{' and '.join(same)} mean the same; pass one of them")
        result[canonical] = value
    return result


def drop_neutral_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Drop options with a neutral value. Raises UsageError for another value of them."""
    for name, value in options.items():
        if (accepted := NEUTRAL_VALUES.get(name)) and value is not None and value not in accepted:
            raise UsageError(
                f"{name}={value!r} is not supported by this model; leave it out, or pass {accepted[0]!r}"
            )
    return {name: value for name, value in options.items() if name not in NEUTRAL_VALUES}


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the engine's names, without those that are None. Raises UsageError."""
    resolved = resolve_aliases(drop_neutral_options(options), ALIASES)
    resolved = {name: value for name, value in resolved.items() if value is not None}
    do_sample = resolved.pop("do_sample", None)
    if do_sample is False:  # transformers' name for temperature 0
        resolved["temperature"] = 0.0
    elif do_sample and not resolved.get("temperature"):
        resolved["temperature"] = 1.0
    # OpenAI has two parameters, a switch and a number; the engine has the number only.
    top, switch = resolved.pop("top_logprobs", None), resolved.get("logprobs")
    if isinstance(switch, bool) or (switch is None and top is not None):
        resolved["logprobs"] = (top or 0) if switch or switch is None else None
    return resolved


@dataclass(frozen=True)
class Call:
    """The options of one request, and the backend that answers it.

    named: passages that the caller declares to be in the prompt. learn: whether text that recurs from an earlier prompt
    becomes a passage. timeout: in seconds. arguments: method, ratio, and those of the engine's `DecodeOptions`, by
    name. answer_format: tools, and the schema of JSON. session: the conversation's, if it has one. client: the user's
    name, for sharing the device fairly.
    """

    backend: Backend
    named: tuple[Passage, ...]
    learn: bool
    timeout: float | None
    arguments: dict[str, Any]
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    session: "Session | None" = None
    client: str = ""

    @classmethod
    def of(cls, backend: Backend, named: Sequence[Passage], learn: bool, *options: Mapping[str, Any]) -> Self:
        """A call with these options: the model's, then the request's; later ones override earlier ones.

        Raises UsageError for an unknown option and a bad timeout. Nothing is learned from prompts of method `full`, so
        that they are tokenized as by any other model.
        """
        from ragblend.engine.config import DecodeOptions

        merged: dict[str, Any] = {}
        for source in options:
            merged |= engine_options(source)
        timeout = merged.pop("timeout", None)
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise UsageError(f"timeout must be a number of seconds above 0, not {timeout!r}")
        names = ("tools", "tool_choice", "parallel_tool_calls", "json_schema")
        answer_format = AnswerFormat.of(*(merged.pop(name, None) for name in names))
        DecodeOptions.of({name: value for name, value in merged.items() if name not in ("method", "ratio")})
        learn = learn and merged.get("method") != "full"
        return cls(backend, tuple(named), learn, timeout, merged, answer_format)

    def chat_prompt(self, turns: Sequence[ChatTurn], named: Sequence[Passage] = ()) -> "Prompt":
        """The turns as a prompt. named: further passages declared to be in it. May load the tokenizer and read the
        registry, so call it in a thread, not in an event loop.
        """
        named = (*self.named, *named)
        prompt = self.backend.chat_prompt(turns, named, self.learn, self.answer_format.tools)
        return self._warn_without_passages(prompt, bool(named))

    def text_prompt(self, text: str, parts: Sequence[str] = ()) -> "Prompt":
        """The text as a prompt. parts: as in `Backend.text_prompt`. In a thread, as `chat_prompt`."""
        prompt = self.backend.text_prompt(text, self.named, parts, self.learn)
        return self._warn_without_passages(prompt, bool(self.named))

    def _warn_without_passages(self, prompt: "Prompt", is_named: bool) -> "Prompt":
        """Return the prompt. If it has no passage although one was expected, log the reason, once per backend."""
        registry = self.backend.registry
        if prompt.chunks:
            registry.retrieved_chars = 0
            return prompt
        length = sum(len(segment.text or "") for segment in prompt.segments)
        is_unknown = False
        with suppress(StoreError):  # it was logged when passages were looked for
            is_unknown = not self.learn and length >= _MIN_CONTEXT_CHARS and not len(registry)
        expected = {
            "named": is_named,
            "changed": 0 < registry.retrieved_chars <= length,
            "unknown": is_unknown,
        }
        reason = next((reason for reason, applies in expected.items() if applies), None)
        if reason and (self.backend, reason) not in _logged and self.arguments.get("method") != "full":
            _logged.add((self.backend, reason))
            collection = self.backend.collection
            log.warning("a prompt is read in full (collection %r): %s", collection, NO_REUSE_REASONS[reason])
        return prompt

    def parse(self, result: "Result") -> "ParsedAnswer":
        """The answer's text, and the tool calls in it."""
        from ragblend.engine.prompts.tools import ParsedAnswer, parse_answer

        if not (tools := self.answer_format.tools):
            return ParsedAnswer(result.text)
        has_schema = self.answer_format.schema is not None
        return parse_answer(result.text, self.backend.engine.call_format, tools, has_schema)

    def options(self) -> dict[str, Any]:
        """The arguments of the engine's `generate` and `stream`."""
        grammar = self.answer_format.grammar(self.backend.engine)
        return self.arguments | {"session": self.session} | ({} if grammar is None else {"grammar": grammar})

    def warn_if_cut_off(self, result: "Result") -> None:
        """Log that the token limit ended the answer inside a tool call or a JSON text."""
        if result.stopped:
            return
        answer, limit = self.parse(result), len(result.token_ids)
        if answer.broken is not None:
            what = f" within a call of {answer.broken_name or 'a tool'}, which is not made"
        elif self.answer_format.schema is not None:
            what = ": the end of its JSON may be missing"
        else:
            return
        log.warning("the token limit (%d) ended the answer%s; allow more with max_tokens", limit, what)


@dataclass(frozen=True)
class PreparedCall:
    """A call whose prompt is made on use: in the caller's thread, or in another one if the caller is an event loop.

    errors: gives a context manager that turns RAGBlend's errors into the framework's.
    """

    call: Call
    make_prompt: "Callable[[], Prompt]"
    errors: Callable[[], AbstractContextManager[None]] = nullcontext

    def generate(self, on_text: Callable[[str], None] | None = None) -> "Result":
        """The whole answer. on_text: called with each piece of text."""
        with self.errors():
            return self._generate(self.make_prompt(), Event(), on_text)

    def stream(self) -> Generator["str | Result", None, None]:
        """The pieces of text, then the result. Starts at once; closing or dropping it stops the device.

        The timeout starts when the first item is requested.
        """
        with self.errors():
            return self._pieces(self.call.backend.engine.stream(self.make_prompt(), **self.call.options()))

    async def agenerate(self) -> "Result":
        """The whole answer. Cancelling the task stops the device within one layer, and waits for that."""
        *_, result = [item async for item in await self.astream(wait_on_close=True)]
        assert not isinstance(result, str), "the result is the last item"
        return result

    async def astream(self, wait_on_close: bool = False) -> AsyncGenerator["str | Result", None]:
        """As `stream`, but the device starts with the first item. wait_on_close: wait until the device stops."""
        with self.errors():
            return self._apieces(await in_thread(self.make_prompt), wait_on_close)

    def _generate(self, prompt: "Prompt", cancel: Event, on_text: Callable[[str], None] | None) -> "Result":
        call = self.call
        with _time_limit(call.timeout, cancel.set) as deadline:
            result = call.backend.engine.generate(
                prompt,
                cancel=cancel,
                on_text=on_text,
                client=call.client,
                deadline=deadline,
                **call.options(),
            )
            call.warn_if_cut_off(result)
            return result

    def _pieces(self, stream: "Stream") -> Generator["str | Result", None, None]:
        # The limit is for computing: a finished answer is delivered however late the caller reads it.
        with self.errors(), _time_limit(self.call.timeout, stream.stop), closing(stream):
            visible = _visible_text(self.call)
            for piece in stream:
                if shown := visible(piece):
                    yield shown
            result = stream.result
            self.call.warn_if_cut_off(result)
            if shown := visible(result):
                yield shown
            yield result

    async def _apieces(self, prompt: "Prompt", wait_on_close: bool) -> AsyncGenerator["str | Result", None]:
        cancel, visible = Event(), _visible_text(self.call)
        work = partial(self._generate, prompt, cancel)
        try:
            with self.errors():
                async with aclosing(iterate_in_thread(work, cancel.set if wait_on_close else None)) as items:
                    async for item in items:
                        if shown := visible(item):
                            yield shown
                        if not isinstance(item, str):
                            yield item
        finally:
            cancel.set()


def _visible_text(call: Call) -> "Callable[[str | Result], str]":
    """A function from a piece to the text of it to show: tool calls are not shown, but come with the result."""
    from ragblend.engine.prompts.tools import TextBeforeCalls

    if not call.answer_format.tools:
        return lambda item: item if isinstance(item, str) else ""
    text = TextBeforeCalls(call.backend.engine.call_format, call.answer_format.tools)
    return lambda item: text.feed(item) if isinstance(item, str) else text.finish(call.parse(item).text)


@contextmanager
def _time_limit(seconds: float | None, stop: Callable[[], None]) -> Iterator[float]:
    """Call `stop` after that many seconds, and raise AnswerTimeout instead of the Cancelled that the block then raises.

    Yields the deadline, by `time.monotonic`.
    """
    if seconds is None:
        yield math.inf
        return
    expired, deadline = Event(), time.monotonic() + seconds

    def expire() -> None:
        expired.set()
        stop()

    timer = Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield deadline
    except Cancelled as error:
        if expired.is_set() or time.monotonic() >= deadline:
            raise AnswerTimeout(
                f"the answer was not finished within timeout={seconds} seconds; allow more, or fewer max_tokens"
            ) from error
        raise
    finally:
        timer.cancel()
