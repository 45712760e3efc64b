"""Streams that stop the device when they are closed, even if something keeps a reference to them.

LlamaIndex's callback decorators wrap our generator in another, and never close ours: it ends only when it is garbage
collected. A callback handler that stores the exception of a closed stream (`LlamaDebugHandler` does) keeps its
traceback and so our generator alive, and the device would continue to the last token. Therefore a third generator wraps
both, and closes ours when it is closed.
"""

from collections.abc import AsyncGenerator, Callable, Generator
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def closing_with(callback: Callable[..., Any]) -> Callable[[Method], Method]:
    """LlamaIndex's callback decorator, for a method that returns a generator, or a coroutine of an asynchronous one.

    Closing its generator also closes the method's.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
            streams: list[Any] = []

            def recording(*given: Any, **more: Any) -> Any:
                streams.append(method(*given, **more))
                return streams[0]

            return _closing(callback(recording)(*args, **kwargs), streams)

        @wraps(method)
        async def async_wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            streams: list[Any] = []

            async def recording(*given: Any, **more: Any) -> Any:
                streams.append(await method(*given, **more))
                return streams[0]

            return _aclosing(await callback(recording)(*args, **kwargs), streams)

        return cast(Method, async_wrapper if iscoroutinefunction(method) else wrapper)

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
