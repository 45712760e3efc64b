"""vLLM's OpenAI routes: reports in streams, which vLLM has in whole answers only, and a 400 for what is no text."""

import inspect
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import reduce, wraps
from importlib import import_module
from typing import Any

from ragblend.integrations.vllm.versions import ROUTE_NAMES, missing_name

log = logging.getLogger("ragblend")
DONE = "data: [DONE]\n\n"
Events = AsyncGenerator[str, None]


def change_routes() -> None:
    """Change the routes of this server. Idempotent."""
    if (reason := missing_name(ROUTE_NAMES)) is not None:
        log.warning("%s", reason)
        return
    for module, path, _ in ROUTE_NAMES:
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, import_module(module))
        if not hasattr(original := getattr(owner, name), "__wrapped__"):
            setattr(owner, name, (_reported if name.endswith("generator") else _checked)(original))


def _checked(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The same answer, after a look at what vLLM sends on unchecked, and then fails to encode (a 500)."""

    @wraps(answer)
    async def answered(serving: Any, request: Any, *more: Any, **options: Any) -> Any:
        given = (request.stop, request.request_id, request.kv_transfer_params, request.vllm_xargs)
        json.dumps(given, ensure_ascii=False).encode()  # raises ValueError, a 400, for a lone surrogate
        replaced = (request.vllm_xargs or {}).get("kv_transfer_params", {})
        if not isinstance(replaced, dict):
            raise ValueError(f"kv_transfer_params in vllm_xargs is an object, not {replaced!r:.80}")
        return await answer(serving, request, *more, **options)

    return answered


def _reported(generate: Callable[..., Events]) -> Callable[..., Events]:
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
