"""Converts between LangChain's tools, schemas and tool calls, and the engine's."""

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from ragblend.integrations.tools import schema_in
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.prompts.tools import ParsedAnswer

CUT_OFF = "the answer reached the token limit inside this call; allow more with max_tokens"


def openai_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The tools as OpenAI's dictionaries. Raises UsageError for other objects."""
    return [_converted(convert_to_openai_tool, tool, "a tool") for tool in tools]


def response_format(schema: Any, method: str) -> dict[str, Any]:
    """OpenAI's `response_format` for a method of `with_structured_output`. Raises UsageError."""
    if method == "json_mode":
        return {"type": "json_object"}
    if method != "json_schema":
        raise UsageError(f"method must be json_schema, json_mode or function_calling, not {method!r}")
    if schema is None:
        raise UsageError("with_structured_output needs a schema; any JSON comes with method='json_mode'")
    found = _converted(_schema, schema, "a schema")
    return {"type": "json_schema", "json_schema": {"name": found.get("title", "answer"), "schema": found}}


def response_format_schema(response_format: Any) -> Mapping[str, Any] | None:
    """The schema in a `response_format`; None for free text. Raises UsageError for an invalid one."""
    found = schema_in(response_format)
    return None if found is None else _converted(_schema, found, "response_format")


def with_parser(model: Runnable[Any, Any], schema: Any, include_raw: bool) -> Runnable[Any, Any]:
    """The model and a parser of its answers; include_raw: give a dictionary with the message, as LangChain does."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: Any = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    if not include_raw:
        plain: Runnable[Any, Any] = model | parser
        return plain
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    both: Runnable[Any, Any] = RunnableMap(raw=model) | parsed.with_fallbacks(
        [failed], exception_key="parsing_error"
    )
    return both


def tool_call_fields(parsed: "ParsedAnswer") -> dict[str, Any]:
    """The message fields for an answer's calls, also in OpenAI's form for parsers; a cut-off call is invalid."""
    calls = [ToolCall(name=c.name, args=c.arguments, id=c.id, type="tool_call") for c in parsed.calls]
    fields: dict[str, Any] = {"tool_calls": calls}
    if parsed.broken is not None:
        fields["invalid_tool_calls"] = [
            InvalidToolCall(
                type="invalid_tool_call", name=parsed.broken_name, args=parsed.broken, id=None, error=CUT_OFF
            )
        ]
        raw = {"type": "function", "function": {"name": parsed.broken_name or "", "arguments": parsed.broken}}
        fields["additional_kwargs"] = {} if calls else {"tool_calls": [raw]}
    return fields


def tool_call_chunk_fields(parsed: "ParsedAnswer") -> dict[str, Any]:
    """The fields of a stream's last chunk, which has all calls."""
    chunks = [
        tool_call_chunk(name=c.name, args=json.dumps(c.arguments), id=c.id, index=n)
        for n, c in enumerate(parsed.calls)
    ]
    fields = {"tool_call_chunks": chunks}
    if parsed.broken is not None:
        # Deliberately no JSON: LangChain would complete cut JSON and call the tool with half of an argument.
        broken = tool_call_chunk(
            name=parsed.broken_name, args=f"({CUT_OFF}) {parsed.broken}", id=None, index=len(chunks)
        )
        chunks.append(broken)
        fields |= {"additional_kwargs": tool_call_fields(parsed)["additional_kwargs"]}
    return fields


def _schema(found: Any) -> dict[str, Any]:
    """The schema of a class, or of a tool's arguments; any other dictionary is a schema already."""
    if isinstance(found, Mapping) and not {"parameters", "function"} & found.keys():
        return dict(found)
    return convert_to_json_schema(found)


def _converted(convert: Callable[[Any], dict[str, Any]], value: Any, what: str) -> dict[str, Any]:
    try:
        return convert(value)
    except Exception as error:  # pydantic's errors, and whatever the inspection of a function raises
        raise UsageError(f"{what} is not valid: {value!r:.200}: {error}") from error
