"""ChatRAGBlend: LangChain's chat model on RAGBlend's engine. Start here."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import model_validator

from ragblend.integrations.langchain.answers import answer_message, last_chunk
from ragblend.integrations.langchain.calls import Call, settle
from ragblend.integrations.langchain.errors import framework_errors
from ragblend.integrations.langchain.listener import listen_for
from ragblend.integrations.langchain.messages import named_in, turns_of
from ragblend.integrations.langchain.parameters import Parameters

if TYPE_CHECKING:
    from ragblend.engine.prompt import Prompt
    from ragblend.engine.results import Result


class ChatRAGBlend(Parameters, BaseChatModel):
    """A chat model that has read your documents before they are asked about.

    It takes the place of any other chat model. Documents are found in a prompt by the ids of its content blocks, by
    `ToolMessage.artifact`, by `passages=` in the call, and, where nobody hands over ids, by their text.

    ```python
    llm = ChatRAGBlend(max_tokens=64)
    llm.invoke([HumanMessage([{"type": "text", "text": doc.page_content, "id": doc.id}, "\\n\\nWho built it?"])])
    ```
    """

    @model_validator(mode="after")
    def _listen(self) -> Self:
        listen_for(self)
        return self

    @property
    def _llm_type(self) -> str:
        return "ragblend-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._changing_answers()

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._traced(super()._get_ls_params(stop=stop, **kwargs), stop, kwargs)

    def _resolve_model_profile(self) -> ModelProfile:
        """What is known without loading anything: the window is the model's own."""
        return ModelProfile(text_inputs=True, text_outputs=True, image_inputs=False, tool_calling=False)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that these messages make, the chat template's included."""
        with framework_errors():
            prompt = self.backend().chat_prompt(turns_of(messages))
            return len(prompt.token_ids)

    # --- answers

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with framework_errors():
            call, prompt = self._prepare(messages, stop, kwargs)
            return _whole(call.generate(prompt), call)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with framework_errors():
            call, prompt = await asyncio.to_thread(self._prepare, messages, stop, kwargs)
            return _whole(await call.agenerate(prompt), call)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with framework_errors():
            call, prompt = self._prepare(messages, stop, kwargs)
            with closing(call.stream(prompt)) as items:
                for item in items:
                    chunk = _chunk(item, call)
                    # `BaseChatModel.stream` passes no run manager and reports the tokens itself.
                    if run_manager is not None:
                        run_manager.on_llm_new_token(str(chunk.message.text), chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with framework_errors():
            call, prompt = await asyncio.to_thread(self._prepare, messages, stop, kwargs)
            async with aclosing(call.astream(prompt)) as items:
                async for item in items:
                    chunk = _chunk(item, call)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(str(chunk.message.text), chunk=chunk)
                    yield chunk

    def _prepare(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, arguments: Mapping[str, Any]
    ) -> "tuple[Call, Prompt]":
        """May load the tokenizer and read the registry: not for an event loop."""
        call = settle(self, stop, arguments)
        return call, call.chat_prompt(turns_of(messages), named_in(messages))


def _whole(result: "Result", call: Call) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=answer_message(result, call.model_name))])


def _chunk(item: "str | Result", call: Call) -> ChatGenerationChunk:
    """A piece of text, or the end of the stream with all that is known by then."""
    message = AIMessageChunk(content=item) if isinstance(item, str) else last_chunk(item, call.model_name)
    return ChatGenerationChunk(message=message)
