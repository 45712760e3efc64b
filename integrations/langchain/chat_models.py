"""ChatRAGBlend: LangChain's chat model on RAGBlend's engine. Start here."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from ragblend.integrations.calls import Call
from ragblend.integrations.langchain.answers import (
    Asked,
    Stop,
    astreamed,
    response_metadata,
    streamed,
    usage_metadata,
)
from ragblend.integrations.langchain.errors import framework_errors
from ragblend.integrations.langchain.messages import named_in, turns_of
from ragblend.integrations.langchain.parameters import Parameters

if TYPE_CHECKING:
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

    @property
    def _llm_type(self) -> str:
        return "ragblend-chat"

    def _resolve_model_profile(self) -> ModelProfile:
        """What is known without loading anything: the window is the model's own."""
        return ModelProfile(text_inputs=True, text_outputs=True, image_inputs=False, tool_calling=False)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that these messages make, the chat template's included."""
        with framework_errors():
            return len(self.backend.chat_prompt(turns_of(messages)).token_ids)

    def _generate(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        with framework_errors():
            call, prompt = self._prepare(messages, stop, kwargs)
            return _whole(call.generate(prompt), call)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        with framework_errors():
            call, prompt = await asyncio.to_thread(self._prepare, messages, stop, kwargs)
            return _whole(await call.agenerate(prompt), call)

    def _stream(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        return streamed(partial(self._prepare, messages, stop, kwargs), _chunk, run_manager)

    def _astream(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        return astreamed(partial(self._prepare, messages, stop, kwargs), _chunk, run_manager)

    def _prepare(self, messages: Sequence[BaseMessage], stop: Stop, arguments: Mapping[str, Any]) -> Asked:
        """May load the tokenizer and read the registry: not for an event loop."""
        call = self._settle(stop, arguments)
        return call, call.chat_prompt(turns_of(messages), named_in(messages))


def _whole(result: "Result", call: Call) -> ChatResult:
    message = AIMessage(result.text, **_known(result, call))
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(item: "str | Result", call: Call) -> ChatGenerationChunk:
    if isinstance(item, str):
        return ChatGenerationChunk(message=AIMessageChunk(content=item))
    message = AIMessageChunk(content="", chunk_position="last", **_known(item, call))
    return ChatGenerationChunk(message=message)


def _known(result: "Result", call: Call) -> dict[str, Any]:
    return {"usage_metadata": usage_metadata(result), "response_metadata": response_metadata(result, call)}
