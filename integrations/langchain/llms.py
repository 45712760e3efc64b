"""RAGBlendLLM: LangChain's text model on RAGBlend's engine. The prompt goes in as it is, without a chat template."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import model_validator

from ragblend.integrations.backend import usage
from ragblend.integrations.langchain.answers import response_metadata
from ragblend.integrations.langchain.calls import Call, settle
from ragblend.integrations.langchain.errors import framework_errors
from ragblend.integrations.langchain.listener import listen_for
from ragblend.integrations.langchain.parameters import Parameters

if TYPE_CHECKING:
    from ragblend.engine.prompt import Prompt
    from ragblend.engine.results import Result


class RAGBlendLLM(Parameters, BaseLLM):
    """A text model that has read your documents before they are asked about.

    Documents are found in a prompt by their text, and by `passages=` in the call. For models that were trained to
    chat `ChatRAGBlend` is the better choice: it puts their own chat template around the messages.
    """

    @model_validator(mode="after")
    def _listen(self) -> Self:
        listen_for(self)
        return self

    @property
    def _llm_type(self) -> str:
        return "ragblend"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._changing_answers()

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._traced(super()._get_ls_params(stop=stop, **kwargs), stop, kwargs)

    # --- answers

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with framework_errors():
            call = settle(self, stop, kwargs)
            return _whole([call.generate(call.text_prompt(prompt)) for prompt in prompts], call)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """One after the other: there is one device, and the first that is cancelled ends them all."""
        with framework_errors():
            call = settle(self, stop, kwargs)
            results = []
            for text in prompts:
                prompt = await asyncio.to_thread(call.text_prompt, text)
                results.append(await call.agenerate(prompt))
            return _whole(results, call)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with framework_errors():
            call = settle(self, stop, kwargs)
            with closing(call.stream(call.text_prompt(prompt))) as items:
                for item in items:
                    chunk = _chunk(item, call)
                    if run_manager is not None and chunk.text:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with framework_errors():
            call = settle(self, stop, kwargs)
            text_prompt: Prompt = await asyncio.to_thread(call.text_prompt, prompt)
            async with aclosing(call.astream(text_prompt)) as items:
                async for item in items:
                    chunk = _chunk(item, call)
                    if run_manager is not None and chunk.text:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk


def _whole(results: "list[Result]", call: Call) -> LLMResult:
    generations = [
        [Generation(text=r.text, generation_info=response_metadata(r, call.model_name))] for r in results
    ]
    counts = [usage(result.report) for result in results]
    total = {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}
    return LLMResult(
        generations=generations, llm_output={"token_usage": total, "model_name": call.model_name}
    )


def _chunk(item: "str | Result", call: Call) -> GenerationChunk:
    if isinstance(item, str):
        return GenerationChunk(text=item)
    return GenerationChunk(text="", generation_info=response_metadata(item, call.model_name))
