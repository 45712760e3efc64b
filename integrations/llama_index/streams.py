"""Streams that stop the device when they are closed, even where something keeps a reference to them.

LlamaIndex's callback decorators wrap our generator in one of theirs, and never close ours: it ends when it is garbage
collected. A callback handler that keeps how a closed stream ended (`LlamaDebugHandler` does) keeps the exception, its
traceback and so our generator, and the device would go on to the last token. Hence a third generator around both.
"""

from collections.abc import AsyncGenerator, Callable, Generator
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def closing_with(callback: Callable[..., Any]) -> Callable[[Method], Method]:
    """LlamaIndex's callback decorator, for a method that returns a generator, or a coroutine of an asynchronous one.

    Closing the generator that it makes also closes the method's own.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
            streams: list[Any] = []

            def kept(*given: Any, **more: Any) -> Any:
                streams.append(method(*given, **more))
                return streams[0]

            return _closing(callback(kept)(*args, **kwargs), streams)

        @wraps(method)
        async def awaited(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            streams: list[Any] = []

            async def kept(*given: Any, **more: Any) -> Any:
                streams.append(await method(*given, **more))
                return streams[0]

            return _aclosing(await callback(kept)(*args, **kwargs), streams)

        return cast(Method, awaited if iscoroutinefunction(method) else wrapper)

    return decorate


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
