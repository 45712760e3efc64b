"""What an answer may be, in either framework: calls of tools, JSON of a schema, or both; and what it was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.decoding.grammar import Grammar
    from ragblend.engine.interface import EngineInterface
    from ragblend.engine.prompts.tools import Tool

ANY = ("any", "required", True)
AUTO = ("auto", False)


@dataclass(frozen=True)
class Wanted:
    """tools: that may be called; is_forced: one must be; is_parallel: several may be. schema: of an answer in JSON."""

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
        """tools and choice: as OpenAI's interface has them; a name alone is a choice as well.

        Loads nothing. Raises UsageError for what is no tool or schema, cannot be kept to, or is chosen and not there.
        Forced calls are one at a time unless somebody says otherwise: small models go on for as long as they may.
        """
        from ragblend.engine.decoding.grammar import json_grammar
        from ragblend.engine.prompts.tools import check_tools, functions_by_name

        if isinstance(choice, Mapping):
            choice = _in_a_word(choice)
        chosen = list(tools or ())
        names = functions_by_name(chosen)
        is_forced = choice is not None and choice not in AUTO
        if choice == "none":
            chosen, is_forced = [], False
        elif is_forced and choice not in ANY:
            if not isinstance(choice, str) or choice not in names:
                raise UsageError(f"tool_choice names {choice!r}; there are {', '.join(names) or 'no tools'}")
            chosen = [{"type": "function", "function": names[choice]}]
        elif is_forced and not chosen:
            raise UsageError(f"tool_choice={choice!r} wants a call, and there are no tools")
        check_tools(chosen)
        if schema is not None:
            json_grammar(schema)
        return cls(tuple(chosen), is_forced, not is_forced if is_parallel is None else is_parallel, schema)

    def grammar(self, engine: "EngineInterface") -> "Grammar | None":
        """What the answer is held to; loads the tokenizer for tools. Raises UnsupportedModelError where it has none."""
        from ragblend.engine.decoding.grammar import json_grammar, json_rule
        from ragblend.engine.prompts.tools import tools_grammar

        if not self.tools:
            return None if self.schema is None else json_grammar(self.schema)
        form = engine.call_format
        answer = {} if self.schema is None else {"answer": json_rule(self.schema)}
        return tools_grammar(form, self.tools, self.is_forced, self.is_parallel, **answer)


def _in_a_word(choice: Mapping[str, Any]) -> Any:
    """The name of the tool, or what else a dictionary chooses. Raises UsageError for one that says neither."""
    function = choice.get("function", choice)
    if isinstance(function, Mapping) and function.get("name") is not None:
        return function["name"]
    if (kind := choice.get("type")) in (*ANY, *AUTO, "none"):
        return kind
    raise UsageError(
        f"tool_choice={choice!r:.200} names no tool, and no type of auto, none, any and required"
    )


def schema_in(wanted: Any) -> Any:
    """What OpenAI's interface calls `response_format`, as a schema, or what stands for one; None for free text."""
    if wanted is None or wanted == {"type": "text"}:
        return None
    if wanted == {"type": "json_object"}:
        return {"type": "object"}
    found = wanted.get("json_schema", wanted) if isinstance(wanted, Mapping) else wanted
    return found.get("schema", found) if isinstance(found, Mapping) else found
