"""The format of an answer, in either framework: tool calls, JSON of a schema, or both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.decoding.grammar import Grammar
    from ragblend.engine.interface import EngineInterface
    from ragblend.engine.prompts.tools import Tool

FORCING_CHOICES = ("any", "required", True)
FREE_CHOICES = ("auto", False)


@dataclass(frozen=True)
class AnswerFormat:
    """Which tools may be called and which schema the answer has.

    is_forced: a tool must be called; is_parallel: several may be. schema: of a JSON answer.
    """

    tools: "tuple[Tool, ...]" = ()
    is_forced: bool = False
    is_parallel: bool = True
    schema: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        tools: "Sequence[Tool] | None" = None,
        choice: Any = None,
        is_parallel: bool | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Self:
        """tools and choice: as in OpenAI's interface; choice may also be a tool's name.

        Loads nothing. Raises UsageError for an invalid tool or schema, and for the choice of an unknown tool. Forced
        calls are one at a time by default, because small models would continue to the limit.
        """
        from ragblend.engine.decoding.grammar import json_grammar
        from ragblend.engine.prompts.tools import check_tools, functions_by_name

        chosen = list(tools or ())
        names = functions_by_name(chosen)
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            names, choice = _allowed_tools(names, choice)
            chosen = [{"type": "function", "function": function} for function in names.values()]
        if isinstance(choice, Mapping):
            choice = _choice_as_word(choice)
        is_forced = choice is not None and choice not in FREE_CHOICES
        if choice == "none":
            chosen, is_forced = [], False
        elif is_forced and choice not in FORCING_CHOICES:
            if not isinstance(choice, str) or choice not in names:
                raise UsageError(
                    f"tool_choice names {choice!r}, which is no tool; the tools are: {', '.join(names) or 'none'}"
                )
            chosen = [{"type": "function", "function": names[choice]}]
        elif is_forced and not chosen:
            raise UsageError(f"tool_choice={choice!r} requires a tool call, but there are no tools")
        check_tools(chosen)
        if schema is not None:
            json_grammar(schema)
        return cls(tuple(chosen), is_forced, not is_forced if is_parallel is None else is_parallel, schema)

    def grammar(self, engine: "EngineInterface") -> "Grammar | None":
        """The grammar of the answer, if it is constrained.

        Loads the tokenizer if there are tools; raises UnsupportedModelError for a model without tool support.
        """
        from ragblend.engine.decoding.grammar import json_grammar, json_rule
        from ragblend.engine.prompts.tools import tools_grammar

        if not self.tools:
            return None if self.schema is None else json_grammar(self.schema)
        answer = {} if self.schema is None else {"answer": json_rule(self.schema)}
        return tools_grammar(engine.call_format, self.tools, self.is_forced, self.is_parallel, **answer)


def _allowed_tools(names: "Mapping[str, Tool]", choice: Mapping[str, Any]) -> "tuple[dict[str, Tool], Any]":
    """The allowed ones of these tools, and the mode. Raises UsageError for an unknown tool."""
    found = choice.get("allowed_tools", choice)  # nested in a chat request, but not in `/v1/responses`
    listed = found.get("tools") if isinstance(found, Mapping) else None
    if not isinstance(listed, list) or not listed:
        raise UsageError(f"tool_choice={choice!r:.200} lists no allowed tools")
    wanted = [_choice_as_word(each) if isinstance(each, Mapping) else each for each in listed]
    for name in wanted:
        if not isinstance(name, str) or name not in names:
            raise UsageError(
                f"tool_choice allows {name!r:.100}, which is no tool; the tools are: {', '.join(names) or 'none'}"
            )
    return {name: names[name] for name in wanted}, found.get("mode", "auto")


def _choice_as_word(choice: Mapping[str, Any]) -> Any:
    """The tool's name or the mode in a `tool_choice` dictionary. Raises UsageError if it has neither."""
    function = choice.get("function", choice)
    if isinstance(function, Mapping) and function.get("name") is not None:
        return function["name"]
    if (kind := choice.get("type")) in (*FORCING_CHOICES, *FREE_CHOICES, "none"):
        return kind
    raise UsageError(
        f"tool_choice={choice!r:.200} names neither a tool nor a type (auto, none, any or required)"
    )


def schema_in(response_format: Any) -> Any:
    """The JSON schema in OpenAI's `response_format`; None for free text."""
    if response_format is None or response_format == {"type": "text"}:
        return None
    if response_format == {"type": "json_object"}:
        return {"type": "object"}
    if not isinstance(response_format, Mapping):
        return response_format
    found = response_format.get("json_schema", response_format)
    return found.get("schema", found) if isinstance(found, Mapping) else found
