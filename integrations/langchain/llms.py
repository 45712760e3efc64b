"""RAGBlendLLM: LangChain's text model on RAGBlend's engine. The prompt is used unchanged, without a chat template."""

from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from ragblend.integrations.backend import usage
from ragblend.integrations.calls import Call, PreparedCall
from ragblend.integrations.langchain.errors import langchain_errors
from ragblend.integrations.langchain.parameters import LangChainParameters, Stop, response_metadata

if TYPE_CHECKING:
    from ragblend.engine.results import Result


class RAGBlendLLM(LangChainParameters, BaseLLM):  # type: ignore[misc]  # `_stream` names arguments differently
    """A text model that reuses the KV of your documents.

    Documents are found in a prompt by their text, and by `passages=` in the call. For chat models use `ChatRAGBlend`,
    which applies their chat template.
    """

    @property
    def _llm_type(self) -> str:
        return "ragblend"

    def _generate(
        self, prompts: list[str], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        call = self._call_with(stop, kwargs)
        return _llm_result([self._result(_prepared(call, each), run_manager) for each in prompts], call)

    async def _agenerate(
        self, prompts: list[str], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        """One prompt after the other, because there is one device. Cancelling one cancels all."""
        call = self._call_with(stop, kwargs)
        return _llm_result(
            [await self._aresult(_prepared(call, each), run_manager) for each in prompts], call
        )

    def _result(self, prepared: PreparedCall, run_manager: Any) -> "Result":
        """The whole answer; with `streaming`, each piece is reported, as `BaseLLM` expects."""

        def report(piece: str) -> None:
            run_manager.on_llm_new_token(piece, chunk=GenerationChunk(text=piece))

        return prepared.generate(report if self.streaming and run_manager is not None else None)

    async def _aresult(self, prepared: PreparedCall, run_manager: Any) -> "Result":
        async with aclosing(await prepared.astream(wait_on_close=True)) as items:
            async for item in items:
                if isinstance(item, str) and self.streaming and run_manager is not None:
                    await run_manager.on_llm_new_token(item, chunk=GenerationChunk(text=item))
        assert not isinstance(item, str), "the result is the last item"
        return item

    def _prepare(self, model_input: str, stop: Stop, arguments: Mapping[str, Any]) -> PreparedCall:
        return _prepared(self._call_with(stop, arguments), model_input)

    @staticmethod
    def _chunk(item: "str | Result", call: Call) -> GenerationChunk:
        if isinstance(item, str):
            return GenerationChunk(text=item)
        return GenerationChunk(text="", generation_info=response_metadata(item, call))


def _prepared(call: Call, prompt: str) -> PreparedCall:
    return PreparedCall(call, partial(call.text_prompt, prompt), langchain_errors)


def _llm_result(results: "list[Result]", call: Call) -> LLMResult:
    counts = [usage(result.report) for result in results]
    total = {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}
    return LLMResult(
        generations=[[Generation(text=r.text, generation_info=response_metadata(r, call))] for r in results],
        llm_output={"token_usage": total, "model_name": call.backend.engine.model_name},
    )
