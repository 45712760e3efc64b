"""ChatRAGBlend: LangChain's chat model on RAGBlend's engine. Start here."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from ragblend.integrations.backend import ChatTurn, usage
from ragblend.integrations.calls import Call, PreparedCall
from ragblend.integrations.langchain.errors import langchain_errors
from ragblend.integrations.langchain.messages import artifact_passages, turns_of
from ragblend.integrations.langchain.parameters import LangChainParameters, Stop, response_metadata
from ragblend.integrations.langchain.tools import (
    openai_tools,
    response_format,
    response_format_schema,
    tool_call_chunk_fields,
    tool_call_fields,
    with_parser,
)
from ragblend.integrations.tools import AnswerFormat
from ragblend.kvstore.errors import PromptError, UsageError

if TYPE_CHECKING:
    from ragblend.engine.results import Result


class ChatRAGBlend(LangChainParameters, BaseChatModel):  # type: ignore[misc]  # `_stream` names arguments differently
    """A chat model that reuses the KV of your documents.

    It replaces any other chat model. Documents are found in a prompt by the ids of its content blocks, by
    `ToolMessage.artifact`, by `passages=` in the call, and, without ids, by their text.

    ```python
    llm = ChatRAGBlend(max_tokens=64)
    llm.invoke([HumanMessage([{"type": "text", "text": doc.page_content, "id": doc.id}, "\\n\\nWho built it?"])])
    ```
    """

    @property
    def _llm_type(self) -> str:
        return "ragblend-chat"

    def _resolve_model_profile(self) -> ModelProfile:
        """The profile, without loading anything; window and tool support, which depend on the model, are left out."""
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
        """The model with tools; it answers in text, or with calls whose arguments follow the tools' schemas.

        tools: functions, classes, LangChain's tools or OpenAI's dictionaries. tool_choice: `auto`, `none`, `any`, or a
        tool's name. Raises InvalidRequest for an invalid tool or schema, and UnsupportedModelError for a model without
        tool support (reads the tokenizer).
        """
        with langchain_errors():
            formatted = openai_tools(tools)
            schema = response_format_schema(response_format)
            AnswerFormat.of(formatted, tool_choice, parallel_tool_calls, schema)
            if formatted:
                _ = self.backend.engine.call_format  # raises UnsupportedModelError
        options = {
            "tools": formatted,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
        }
        return self.bind(**{name: value for name, value in options.items() if value is not None}, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, Any]:
        """The model with answers in JSON of a schema, parsed: a pydantic class's objects, or dictionaries.

        method: `json_schema` constrains any model to the schema; `json_mode` to JSON alone; `function_calling` makes a
        tool of the schema, for models with tools. Only the last shows the schema to the model: for the others, describe
        in the prompt what you want. An answer of the first two always parses: near the token limit it is closed, with a
        warning. Raises InvalidRequest for an invalid schema.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        with langchain_errors():
            if kwargs:
                raise UsageError(f"with_structured_output knows no {', '.join(kwargs)}")
            wanted = response_format(schema, method)
            AnswerFormat.of(schema=response_format_schema(wanted))
        bound = self.bind(
            response_format=wanted,
            ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
        )
        return with_parser(bound, schema, include_raw)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt of these messages, the chat template's included; 0 for no message.

        If the template rejects the messages (`trim_messages` and memories pass parts of conversations, and reversed
        ones), the sum over the messages, each as a prompt by itself, which is an upper estimate.
        """
        if not messages:
            return 0
        with langchain_errors():
            openai_dicts, turns = openai_tools(tools or ()), turns_of(messages)
            try:
                return len(self.backend.chat_prompt(turns, tools=openai_dicts).token_ids)
            except PromptError:
                alone = [ChatTurn("user", turn.pieces or ("",)) for turn in turns]
                return sum(len(self.backend.chat_prompt([turn]).token_ids) for turn in alone)

    def _generate(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        prepared = self._prepare(messages, stop, kwargs)
        return _chat_result(prepared.generate(), prepared.call)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        prepared = self._prepare(messages, stop, kwargs)
        return _chat_result(await prepared.agenerate(), prepared.call)

    def _prepare(
        self, model_input: Sequence[BaseMessage], stop: Stop, arguments: Mapping[str, Any]
    ) -> PreparedCall:
        call = self._call_with(stop, arguments)
        return PreparedCall(
            call,
            lambda: call.chat_prompt(turns_of(model_input), artifact_passages(model_input)),
            langchain_errors,
        )

    @staticmethod
    def _chunk(item: "str | Result", call: Call) -> ChatGenerationChunk:
        if isinstance(item, str):
            return ChatGenerationChunk(message=AIMessageChunk(content=item))
        calls = tool_call_chunk_fields(call.parse(item))
        message = AIMessageChunk(content="", chunk_position="last", **calls, **_metadata(item, call))
        return ChatGenerationChunk(message=message)


def _chat_result(result: "Result", call: Call) -> ChatResult:
    parsed = call.parse(result)
    message = AIMessage(parsed.text, **tool_call_fields(parsed), **_metadata(result, call))
    return ChatResult(generations=[ChatGeneration(message=message)])


def _metadata(result: "Result", call: Call) -> dict[str, Any]:
    """Token counts (`cache_read`: reused from the store), and the report."""
    counts = usage(result.report)
    usage_metadata = UsageMetadata(
        input_tokens=counts["prompt_tokens"],
        output_tokens=counts["completion_tokens"],
        total_tokens=counts["total_tokens"],
        input_token_details=InputTokenDetails(cache_read=result.report.tokens.reused),
    )
    return {"usage_metadata": usage_metadata, "response_metadata": response_metadata(result, call)}
