"""ChatRAGBlend: LangChain's chat model on RAGBlend's engine. Start here."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from ragblend.integrations.backend import Turn
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
from ragblend.integrations.langchain.tools import (
    called,
    called_chunks,
    openai_tools,
    response_format,
    structured,
    wanted_schema,
)
from ragblend.integrations.tools import Wanted
from ragblend.kvstore.errors import PromptError, UsageError

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
        """What is known without loading anything: window and tools are the model's own."""
        return ModelProfile(text_inputs=True, text_outputs=True, image_inputs=False, structured_output=True)

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[Any, AIMessage]:
        """The model with tools; what it answers are words, or calls whose arguments keep to the tools' schemas.

        tools: functions, classes, LangChain's tools or OpenAI's dictionaries. tool_choice: `auto`, `none`, `any`, or a
        tool's name. Raises InvalidRequest for what is no tool and schemas that cannot be kept to, and
        UnsupportedModelError for a model without tools; that reads the tokenizer.
        """
        with framework_errors():
            formatted = openai_tools(tools)
            Wanted.of(formatted, tool_choice, parallel_tool_calls, wanted_schema(response_format))
            if formatted:
                assert self.backend.engine.call_format
        told = {
            "tools": formatted,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
        }
        return self.bind(**{name: value for name, value in told.items() if value is not None}, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, Any]:
        """The model, whose answers are JSON of a schema, and come parsed: a pydantic class's objects, or dictionaries.

        method: `json_schema` holds every model to the schema; `json_mode` to JSON alone; `function_calling` makes a
        tool of the schema, for models with tools. The model is shown the schema by the last only: say in words what you
        want. An answer of the first two always parses: near its most tokens it is closed, with a warning. Raises
        InvalidRequest for what is no schema.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        with framework_errors():
            if kwargs:
                raise UsageError(f"with_structured_output knows no {', '.join(kwargs)}")
            wanted = response_format(schema, method)
            Wanted.of(schema=wanted_schema(wanted))
        bound = self.bind(
            response_format=wanted,
            ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
        )
        return structured(bound, schema, include_raw)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that these messages make, the chat template's included; 0 for no message.

        Where the template refuses the messages (an end of a conversation, or one backwards, of which `trim_messages`
        and memories ask), the sum of what each takes as a prompt by itself: rather too much than too little.
        """
        if not messages:
            return 0
        with framework_errors():
            shown, turns = openai_tools(tools or ()), turns_of(messages)
            try:
                return len(self.backend.chat_prompt(turns, tools=shown).token_ids)
            except PromptError:
                alone = [Turn("user", turn.pieces or ("",)) for turn in turns]
                return sum(len(self.backend.chat_prompt([turn]).token_ids) for turn in alone)

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
    said = call.said(result)
    message = AIMessage(said.text, **called(said), **_known(result, call))
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(item: "str | Result", call: Call) -> ChatGenerationChunk:
    if isinstance(item, str):
        return ChatGenerationChunk(message=AIMessageChunk(content=item))
    calls = called_chunks(call.said(item))
    message = AIMessageChunk(content="", chunk_position="last", **calls, **_known(item, call))
    return ChatGenerationChunk(message=message)


def _known(result: "Result", call: Call) -> dict[str, Any]:
    return {"usage_metadata": usage_metadata(result), "response_metadata": response_metadata(result, call)}
