"""Turns the engine's results into LangChain's: usage, response metadata, and streams of chunks."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk

from ragblend.integrations.backend import kv_statistics, logprobs, usage
from ragblend.integrations.calls import Call, PreparedCall
from ragblend.integrations.langchain.parameters import PROVIDER

if TYPE_CHECKING:
    from ragblend.engine.results import Result

Stop = list[str] | None
Chunk = TypeVar("Chunk", ChatGenerationChunk, GenerationChunk)
# Of a piece of text, or of the whole result at the end.
ChunkOf = Callable[["str | Result", Call], Chunk]


def usage_metadata(result: "Result") -> UsageMetadata:
    """LangChain's token counts; tokens reused from the store are `cache_read`."""
    counts = usage(result.report)
    return UsageMetadata(
        input_tokens=counts["prompt_tokens"],
        output_tokens=counts["completion_tokens"],
        total_tokens=counts["total_tokens"],
        input_token_details=InputTokenDetails(cache_read=result.report.tokens.reused),
    )


def response_metadata(result: "Result", call: Call) -> dict[str, Any]:
    """How the answer was made. LangChain adds up the numbers in it, so only one chunk of a stream may carry it."""
    tokens = logprobs(result, call.backend.engine.tokenizer)
    return {
        **({} if tokens is None else {"logprobs": {"content": tokens}}),
        "model_name": call.backend.engine.model_name,
        "model_provider": PROVIDER,
        "finish_reason": "stop" if result.stopped else "length",
        "method": result.report.method,
        "ratio": result.report.ratio,
        "kv": kv_statistics(result),
    }


def stream_chunks(prepared: PreparedCall, chunk_of: ChunkOf[Chunk], run_manager: Any) -> Iterator[Chunk]:
    """Chunks as they come, each reported once: `BaseChatModel.stream` passes no run manager and reports itself."""
    with closing(prepared.stream()) as items:
        for item in items:
            chunk = chunk_of(item, prepared.call)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


async def astream_chunks(
    prepared: PreparedCall, chunk_of: ChunkOf[Chunk], run_manager: Any
) -> AsyncIterator[Chunk]:
    """The same in an event loop."""
    async with aclosing(await prepared.astream()) as items:
        async for item in items:
            chunk = chunk_of(item, prepared.call)
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk
