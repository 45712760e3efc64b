"""RAGBlendSynthesizer: LlamaIndex's response modes, with each node's passage named to the LLM."""

from collections.abc import Sequence
from typing import Any

from llama_index.core import Settings
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    ResponseMode,
    SimpleSummarize,
    get_response_synthesizer,
)
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE

from ragblend.integrations.llama_index.llm import RAGBlendLLM
from ragblend.integrations.llama_index.nodes import passages_of
from ragblend.integrations.llama_index.packing import WholePassages
from ragblend.kvstore.errors import UsageError


class RAGBlendSynthesizer(BaseSynthesizer):
    """Any of LlamaIndex's response modes, with passages kept whole and named to the LLM by their nodes' ids.

    response_mode: compact, refine, tree_summarize, accumulate, compact_accumulate or simple_summarize; further options
    are those of `get_response_synthesizer` (streaming, use_async, text_qa_template, ...). The nodes need not be
    registered. Raises UsageError for another LLM or mode.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        response_mode: ResponseMode | str = ResponseMode.COMPACT,
        callback_manager: CallbackManager | None = None,
        streaming: bool = False,
        **options: Any,
    ) -> None:
        llm = llm or Settings.llm
        if not isinstance(llm, RAGBlendLLM):
            raise UsageError(f"RAGBlendSynthesizer works with a RAGBlendLLM, not with {type(llm).__name__}")
        options.setdefault("prompt_helper", WholePassages.of_llm(llm))
        options |= {"callback_manager": callback_manager, "streaming": streaming}
        self._inner = _synthesizer_for(ResponseMode(response_mode), llm, options)
        super().__init__(
            llm,
            callback_manager,
            options["prompt_helper"],
            streaming=streaming,
            output_cls=options.get("output_cls"),
        )

    @property
    def _streaming(self) -> bool:
        """The inner synthesizer's: chat engines set and read it here."""
        return self._inner._streaming

    @_streaming.setter
    def _streaming(self, is_streaming: bool) -> None:
        self._inner._streaming = is_streaming

    def synthesize(
        self, query: QueryType, nodes: list[NodeWithScore], *sources: Any, **response_kwargs: Any
    ) -> RESPONSE_TYPE:
        response_kwargs.setdefault("passages", passages_of(nodes))
        return super().synthesize(query, nodes, *sources, **response_kwargs)

    async def asynthesize(
        self, query: QueryType, nodes: list[NodeWithScore], *sources: Any, **response_kwargs: Any
    ) -> RESPONSE_TYPE:
        response_kwargs.setdefault("passages", passages_of(nodes))
        return await super().asynthesize(query, nodes, *sources, **response_kwargs)

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        return self._inner.get_response(query_str, text_chunks, **response_kwargs)

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        return await self._inner.aget_response(query_str, text_chunks, **response_kwargs)

    def _get_prompts(self) -> PromptDictType:
        return self._inner._get_prompts()

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._inner._update_prompts(prompts)


class WholeSummarize(SimpleSummarize):
    """simple_summarize with the passages in the prompt; LlamaIndex's own shows the repr of a Python list (#22392)."""

    def get_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> RESPONSE_TEXT_TYPE:
        ask = self._llm.stream if self._streaming else self._llm.predict
        answer: RESPONSE_TEXT_TYPE = ask(**self._prompt_arguments(query_str, text_chunks), **kwargs)
        return answer or "Empty Response"

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        ask = self._llm.astream if self._streaming else self._llm.apredict
        answer: RESPONSE_TEXT_TYPE = await ask(**self._prompt_arguments(query_str, text_chunks), **kwargs)
        return answer or "Empty Response"

    def _prompt_arguments(self, query_str: str, text_chunks: Sequence[str]) -> dict[str, Any]:
        """The prompt's template, and the context in it."""
        template = self._text_qa_template.partial_format(query_str=query_str)
        context = self._prompt_helper.repack(template, text_chunks, llm=self._llm)[0]
        return {"prompt": template, "context_str": context}


MODES = ("compact", "refine", "tree_summarize", "accumulate", "compact_accumulate", "simple_summarize")


def _synthesizer_for(mode: ResponseMode, llm: RAGBlendLLM, options: dict[str, Any]) -> BaseSynthesizer:
    """LlamaIndex's own synthesizer, except for simple_summarize; options: `get_response_synthesizer`'s."""
    if mode.value not in MODES:
        names = ", ".join(MODES)
        raise UsageError(f"response_mode {mode.value!r} shows the model no passage; there are {names}")
    if mode is not ResponseMode.SIMPLE_SUMMARIZE:
        return get_response_synthesizer(llm, response_mode=mode, **options)
    template = options.get("text_qa_template") or DEFAULT_TEXT_QA_PROMPT_SEL
    shared = {name: options[name] for name in ("callback_manager", "prompt_helper", "streaming")}
    return WholeSummarize(llm, text_qa_template=template, **shared)
