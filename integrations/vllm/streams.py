"""Reports in the streams of vLLM's OpenAI routes, which by themselves have them in whole answers only."""

import inspect
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import reduce, wraps
from importlib import import_module
from typing import Any

from ragblend.integrations.vllm.versions import STREAM_NAMES, missing_name

log = logging.getLogger("ragblend")
DONE = "data: [DONE]\n\n"
Events = AsyncGenerator[str, None]


def report_in_streams() -> None:
    """Give the last event of each stream of this server the `kv_transfer_params` of its answer. Idempotent."""
    if (reason := missing_name(STREAM_NAMES)) is not None:
        log.warning("%s", reason)
        return
    for module, path, _ in STREAM_NAMES:
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, import_module(module))
        if not hasattr(original := getattr(owner, name), "__wrapped__"):
            setattr(owner, name, reported(original))


def reported(generate: Callable[..., Events]) -> Callable[..., Events]:
    """The same generator of a stream's events, which looks at the results that it is given."""
    parameters = inspect.signature(generate)

    @wraps(generate)
    def generator(*args: Any, **kwargs: Any) -> Events:
        found, given = dict[str, Any](), parameters.bind(*args, **kwargs)

        async def watched(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for item in results:
                output = item[1] if isinstance(item, tuple) else item  # with the prompt's number
                found.update(output.kv_transfer_params or {})
                yield item

        given.arguments["result_generator"] = watched(given.arguments["result_generator"])
        return _with_report(generate(*given.args, **given.kwargs), found)

    return generator


async def _with_report(events: Events, found: dict[str, Any]) -> Events:
    """Events are held back by one only once the report is there, with the last result."""
    held = ""
    async for event in events:
        if event == DONE and held:
            last = json.loads(held.removeprefix("data: "))
            if "choices" in last:  # no error
                held = f"data: {json.dumps(last | {'kv_transfer_params': found}, ensure_ascii=False)}\n\n"
        if held:
            yield held
        held = event if found else ""
        if not held:
            yield event
    if held:
        yield held
