"""From the engine's results to LangChain's: usage, response metadata, streams of chunks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk

from ragblend.integrations.backend import kv_statistics, logprobs, usage
from ragblend.integrations.calls import Call
from ragblend.integrations.langchain.errors import framework_errors
from ragblend.integrations.langchain.parameters import PROVIDER

if TYPE_CHECKING:
    from ragblend.engine.prompts.segments import Prompt
    from ragblend.engine.results import Result

Stop = list[str] | None
Asked = tuple[Call, "Prompt"]
Chunk = TypeVar("Chunk", ChatGenerationChunk, GenerationChunk)
# From a piece of text, or from the end with all that is known by then.
ChunkOf = Callable[["str | Result", Call], Chunk]


def usage_metadata(result: "Result") -> UsageMetadata:
    """Tokens in LangChain's words; what came from the store as it was is `cache_read`."""
    counts = usage(result.report)
    return UsageMetadata(
        input_tokens=counts["prompt_tokens"],
        output_tokens=counts["completion_tokens"],
        total_tokens=counts["total_tokens"],
        input_token_details=InputTokenDetails(cache_read=result.report.tokens.reused),
    )


def response_metadata(result: "Result", call: Call) -> dict[str, Any]:
    """How the answer was made. It holds numbers, so in a stream only one chunk may carry it."""
    likely = logprobs(result, call.backend.engine.tokenizer)
    return {
        **({} if likely is None else {"logprobs": {"content": likely}}),
        "model_name": call.backend.engine.model_name,
        "model_provider": PROVIDER,
        "finish_reason": "stop" if result.stopped else "length",
        "method": result.report.method,
        "ratio": result.report.ratio,
        "kv": kv_statistics(result),
    }


def streamed(prepare: Callable[[], Asked], chunk_of: ChunkOf[Chunk], run_manager: Any) -> Iterator[Chunk]:
    """Chunks as they come, each reported once: `BaseChatModel.stream` passes no run manager and does that itself."""
    with framework_errors():
        call, prompt = prepare()
        with closing(call.stream(prompt)) as items:
            for item in items:
                chunk = chunk_of(item, call)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk


async def astreamed(
    prepare: Callable[[], Asked], chunk_of: ChunkOf[Chunk], run_manager: Any
) -> AsyncIterator[Chunk]:
    """The same in an event loop, which `prepare` would hold."""
    with framework_errors():
        call, prompt = await asyncio.to_thread(prepare)
        async with aclosing(call.astream(prompt)) as items:
            async for item in items:
                chunk = chunk_of(item, call)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
