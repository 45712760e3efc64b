"""From the engine's result to LangChain's: usage, response metadata, messages."""

from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from ragblend.integrations.backend import kv_statistics, usage
from ragblend.integrations.langchain.parameters import PROVIDER

if TYPE_CHECKING:
    from ragblend.engine.results import Result


def usage_metadata(result: "Result") -> UsageMetadata:
    """Tokens in LangChain's words; what came from the store as it was is `cache_read`."""
    counts = usage(result.report)
    return UsageMetadata(
        input_tokens=counts["prompt_tokens"],
        output_tokens=counts["completion_tokens"],
        total_tokens=counts["total_tokens"],
        input_token_details=InputTokenDetails(cache_read=result.report.tokens.reused),
    )


def response_metadata(result: "Result", model_name: str) -> dict[str, Any]:
    """How the answer was made. It holds numbers, so in a stream only one chunk may carry it."""
    return {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": "stop" if result.stopped else "length",
        "method": result.report.method,
        "ratio": result.report.ratio,
        "kv": kv_statistics(result),
    }


def answer_message(result: "Result", model_name: str) -> AIMessage:
    return AIMessage(
        content=result.text,
        usage_metadata=usage_metadata(result),
        response_metadata=response_metadata(result, model_name),
    )


def last_chunk(result: "Result", model_name: str) -> AIMessageChunk:
    """What ends a stream: no text, and everything that is known when it is over."""
    return AIMessageChunk(
        content="",
        usage_metadata=usage_metadata(result),
        response_metadata=response_metadata(result, model_name),
        chunk_position="last",
    )
