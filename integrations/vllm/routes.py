"""Changes of vLLM's OpenAI routes: reports also in streams, and status 400 for text that is not valid Unicode."""

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
    """Patch the routes of this process. Idempotent."""
    if (reason := missing_name(ROUTE_NAMES)) is not None:
        log.warning("%s", reason)
        return
    for module, path, _ in ROUTE_NAMES:
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, import_module(module))
        if not hasattr(original := getattr(owner, name), "__wrapped__"):
            setattr(owner, name, (_add_reports if name.endswith("generator") else _check_input)(original))


def _check_input(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorate a route: first check fields that vLLM does not check, and later fails to encode (status 500)."""

    @wraps(answer)
    async def answered(serving: Any, request: Any, *more: Any, **options: Any) -> Any:
        unchecked = (request.stop, request.request_id, request.kv_transfer_params, request.vllm_xargs)
        json.dumps(unchecked, ensure_ascii=False).encode()  # raises ValueError, a 400, for a lone surrogate
        in_xargs = (request.vllm_xargs or {}).get("kv_transfer_params", {})
        if not isinstance(in_xargs, dict):
            raise ValueError(f"kv_transfer_params in vllm_xargs must be an object, not {in_xargs!r:.80}")
        return await answer(serving, request, *more, **options)

    return answered


def _add_reports(generate: Callable[..., Events]) -> Callable[..., Events]:
    """Decorate a generator of a stream's events: add the report in the results that it is given."""
    parameters = inspect.signature(generate)

    @wraps(generate)
    def generator(*args: Any, **kwargs: Any) -> Events:
        found, given = dict[str, Any](), parameters.bind(*args, **kwargs)

        async def watched(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for item in results:
                output = item[1] if isinstance(item, tuple) else item  # (number of the prompt, output)
                found.update(output.kv_transfer_params or {})
                yield item

        given.arguments["result_generator"] = watched(given.arguments["result_generator"])
        return _with_report(generate(*given.args, **given.kwargs), found)

    return generator


async def _with_report(events: Events, found: dict[str, Any]) -> Events:
    """Add the report `found` to the last event before DONE.

    It comes with the last result. From then on events are held back by one.
    """
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
