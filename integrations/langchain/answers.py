"""Turns the engine's results into LangChain's: usage and response metadata."""

from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from ragblend.integrations.backend import kv_statistics, logprobs, usage
from ragblend.integrations.calls import Call

if TYPE_CHECKING:
    from ragblend.engine.results import Result

PROVIDER = "ragblend"


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
