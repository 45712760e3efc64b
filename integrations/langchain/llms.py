"""RAGBlendLLM: LangChain's text model on RAGBlend's engine. The prompt goes in as it is, without a chat template."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from ragblend.integrations.backend import usage
from ragblend.integrations.calls import Call
from ragblend.integrations.langchain.answers import Asked, Stop, astreamed, response_metadata, streamed
from ragblend.integrations.langchain.errors import framework_errors
from ragblend.integrations.langchain.parameters import Parameters

if TYPE_CHECKING:
    from ragblend.engine.prompts.segments import Prompt
    from ragblend.engine.results import Result


class RAGBlendLLM(Parameters, BaseLLM):
    """A text model that has read your documents before they are asked about.

    Documents are found in a prompt by their text, and by `passages=` in the call. For models that were trained to
    chat `ChatRAGBlend` is the better choice: it puts their own chat template around the messages.
    """

    @property
    def _llm_type(self) -> str:
        return "ragblend"

    def _generate(
        self, prompts: list[str], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        with framework_errors():
            call = self._settle(stop, kwargs)
            results = [self._said(call, call.text_prompt(prompt), run_manager) for prompt in prompts]
            return _whole(results, call)

    async def _agenerate(
        self, prompts: list[str], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        """One after the other: there is one device, and the first that is cancelled ends them all."""
        with framework_errors():
            call = self._settle(stop, kwargs)
            asked = [await asyncio.to_thread(call.text_prompt, prompt) for prompt in prompts]
            return _whole([await self._asaid(call, prompt, run_manager) for prompt in asked], call)

    def _said(self, call: Call, prompt: "Prompt", run_manager: Any) -> "Result":
        """With `streaming` each piece is told as it comes; `BaseLLM` leaves that to its models."""
        if not self.streaming or run_manager is None:
            return call.generate(prompt)
        with closing(call.stream(prompt)) as items:
            for item in items:
                if not isinstance(item, str):
                    return item
                run_manager.on_llm_new_token(item, chunk=_chunk(item, call))
        raise AssertionError("the result is the last item of a stream that ends")

    async def _asaid(self, call: Call, prompt: "Prompt", run_manager: Any) -> "Result":
        if not self.streaming or run_manager is None:
            return await call.agenerate(prompt)
        async with aclosing(call.astream(prompt)) as items:
            async for item in items:
                if not isinstance(item, str):
                    return item
                await run_manager.on_llm_new_token(item, chunk=_chunk(item, call))
        raise AssertionError("the result is the last item of a stream that ends")

    def _stream(
        self, prompt: str, stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        return streamed(partial(self._prepare, prompt, stop, kwargs), _chunk, run_manager)

    def _astream(
        self, prompt: str, stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[GenerationChunk]:
        return astreamed(partial(self._prepare, prompt, stop, kwargs), _chunk, run_manager)

    def _prepare(self, prompt: str, stop: Stop, arguments: Mapping[str, Any]) -> Asked:
        call = self._settle(stop, arguments)
        return call, call.text_prompt(prompt)


def _whole(results: "list[Result]", call: Call) -> LLMResult:
    counts = [usage(result.report) for result in results]
    total = {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}
    return LLMResult(
        generations=[[Generation(text=r.text, generation_info=response_metadata(r, call))] for r in results],
        llm_output={"token_usage": total, "model_name": call.backend.engine.model_name},
    )


def _chunk(item: "str | Result", call: Call) -> GenerationChunk:
    if isinstance(item, str):
        return GenerationChunk(text=item)
    return GenerationChunk(text="", generation_info=response_metadata(item, call))
