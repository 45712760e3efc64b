"""What an answer may be: JSON of a schema, or any grammar of llguidance (the extra `structured`)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ragblend.kvstore.errors import UsageError

MAX_SCHEMA_CHARS = 100_000  # compiled in a tenth of a second; the next power of ten takes seconds
# Small models go on with blanks and line breaks for ever where they may.
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_WHERE_SCHEMAS_ARE = ("properties", "patternProperties", "$defs", "definitions")


@dataclass(frozen=True)
class Grammar:
    """What an answer may be: text in llguidance's variant of Lark.

    is_closed: an answer that reaches the most tokens is led to an end that the grammar allows, whatever the model
    would rather say, so that it can be read in any case.
    """

    text: str
    is_closed: bool = True


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """JSON of this schema, its keys in the schema's order, and none that it does not name. Raises UsageError."""
    return validated(Grammar(f"start: {json_rule(schema)}\n"), "the JSON schema")


def json_rule(schema: Mapping[str, Any], name: str = "the JSON schema") -> str:
    """The same as an expression of a grammar. name: of the schema, for messages. Raises UsageError."""
    try:
        tightened = _tightened(schema)
        if not isinstance(tightened, dict):
            raise TypeError("true and false are schemas only inside others")
        text = json.dumps(tightened | {"x-guidance": _FORM})
    except (TypeError, ValueError, RecursionError) as error:
        said = "it is nested without end" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{name} is no JSON schema: {said}") from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise UsageError(
            f"{name} has {len(text):,} characters as JSON; at most {MAX_SCHEMA_CHARS:,} are compiled: "
            "leave out what the answer does not need"
        )
    return f"%json {text}"


def validated(grammar: Grammar, name: str) -> Grammar:
    """The same grammar. Raises UsageError where no answer can be made by it."""
    load_llguidance()
    if said := _compile_error(grammar.text):
        reason = said.partition("\n")[0].rpartition("failed to compile JSON schema: ")[2]
        raise UsageError(f"{name} cannot be kept to: {reason}")
    return grammar


@lru_cache(maxsize=256)  # tools are said again with every call
def _compile_error(text: str) -> str:
    return load_llguidance().LLMatcher.validate_grammar(text) or ""


def _tightened(schema: Any, is_part: bool = False) -> Any:
    """The schema, that of an object where it names properties, without keys that it does not name, and without
    `uniqueItems`, which no token can be judged by.

    is_part: of an `allOf`, whose other parts name keys as well.
    """
    if not isinstance(schema, Mapping):
        if isinstance(schema, bool):
            return schema
        raise TypeError(f"a schema is an object, not {schema!r:.80}")
    result = {key: value for key, value in schema.items() if key != "uniqueItems"}
    _each_schema(result, lambda part, key: _tightened(part, key == "allOf"))
    if not is_part and "properties" in result and "allOf" not in result and "patternProperties" not in result:
        result = {"type": "object", "additionalProperties": False} | result
    return result


def _each_schema(schema: dict[str, Any], change: Callable[[Any, str], Any]) -> None:
    """Changes the schemas inside a schema; values that look like schemas (`enum`, `default`) are left alone."""
    for key, value in schema.items():
        if key in _WHERE_SCHEMAS_ARE and isinstance(value, Mapping):
            schema[key] = {name: change(part, key) for name, part in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            schema[key] = [change(part, key) for part in value]
        elif key in ("items", "additionalProperties", "additionalItems") and isinstance(value, Mapping):
            schema[key] = change(value, key)


def load_llguidance() -> Any:
    """llguidance. Raises UsageError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            "answers by a schema need llguidance, which is not installed: pip install 'ragblend[structured]'"
        ) from error
    return llguidance
