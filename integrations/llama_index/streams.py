"""Streams that stop the device when they are closed, even where something keeps a reference to them.

LlamaIndex's callback decorators wrap our generator in one of theirs, and never close ours: it ends when it is garbage
collected. A callback handler that keeps how a closed stream ended (`LlamaDebugHandler` does) keeps the exception, its
traceback and so our generator, and the device would go on to the last token. Hence a third generator around both, which
knows the inner one: a context variable takes it past the decorator, for as long as the call that makes it.
"""

from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])
Stream = TypeVar("Stream", bound=Generator[Any, None, None] | AsyncGenerator[Any, None])
_inner: ContextVar[list[Any] | None] = ContextVar("ragblend_inner_streams", default=None)


def tracked(stream: Stream) -> Stream:
    """The stream, made known to the decorated method that is being called."""
    streams = _inner.get()
    if streams is not None:
        streams.append(stream)
    return stream


def close_with_outer(method: Method) -> Method:
    """Decorate a method that returns a generator: closing that also closes the streams `tracked` in the call."""

    @wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        streams: list[Any] = []
        token = _inner.set(streams)
        try:
            return _closing(method(*args, **kwargs), streams)
        finally:
            _inner.reset(token)

    return cast(Method, wrapper)


def aclose_with_outer(method: Method) -> Method:
    """The same for a coroutine that returns an asynchronous generator."""

    @wraps(method)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        streams: list[Any] = []
        token = _inner.set(streams)
        try:
            return _aclosing(await method(*args, **kwargs), streams)
        finally:
            _inner.reset(token)

    return cast(Method, wrapper)


def _closing(outer: Generator[Any, None, None], streams: list[Any]) -> Generator[Any, None, None]:
    try:
        yield from outer
    finally:
        for stream in streams:
            stream.close()


async def _aclosing(outer: AsyncGenerator[Any, None], streams: list[Any]) -> AsyncGenerator[Any, None]:
    try:
        async for item in outer:
            yield item
    finally:
        for stream in (outer, *streams):
            await stream.aclose()
