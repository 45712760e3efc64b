"""Grammars for constrained answers: JSON of a schema, or any grammar of llguidance (the extra `structured`)."""

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ragblend.kvstore.errors import UsageError, install_hint

MAX_SCHEMA_CHARS = 100_000  # compiled in a tenth of a second; the next power of ten takes seconds
# With flexible whitespace small models write blanks and line breaks for ever.
_JSON_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Formats that are enforced. Others (`password`, `int64`) are ignored, as the specification allows.
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid", "unknown")
)
_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
# llguidance's own formats allow 29 February in any year, and leap seconds in any minute (here in none). At most six
# digits of a second: the formats set no limit, small models find no end, and Python reads no more.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-(0[13-9]-..|1[0-2]-..|02-[01].|02-2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = r"[^.]{5}:[0-5][0-9](\.[0-9]{1,6})?[^0-9.][^.]*"
_PATTERNS = {"byte": _BASE64, "date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}.{_TIME}$"}
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COMBINING = ("allOf", "anyOf", "oneOf")


@dataclass(frozen=True)
class Grammar:
    """A grammar in llguidance's variant of Lark.

    is_closed: near max_new_tokens the answer is forced to an end that the grammar allows, so that it always parses.
    """

    text: str
    is_closed: bool = True


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """JSON of this schema, with keys in the schema's order and no others. Raises UsageError."""
    return validated(Grammar(f"start: {json_rule(schema)}\n"), "the JSON schema")


def json_rule(
    schema: Mapping[str, Any], name: str = "the JSON schema", ignored: Container[str] = frozenset()
) -> str:
    """The grammar expression for JSON of this schema, as if it had no `ignored` keywords.

    name: of the schema, for messages. Raises UsageError.
    """
    try:
        strict = _strict(schema, ignored, _part_references(schema))
        if not isinstance(strict, dict):
            raise TypeError("true and false are schemas only inside others")
        text = json.dumps(strict | {"x-guidance": _JSON_FORMAT})
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = "it is nested without end" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{name} is no JSON schema: {reason}") from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise UsageError(
            f"{name} has {len(text):,} characters as JSON; at most {MAX_SCHEMA_CHARS:,} are compiled: "
            "leave out what the answer does not need"
        )
    return f"%json {text}"


def validated(grammar: Grammar, name: str) -> Grammar:
    """Return the grammar, or raise UsageError if it does not compile."""
    load_llguidance()
    if error := _compile_error(grammar.text):
        reason = error.partition("\n")[0].rpartition("failed to compile JSON schema: ")[2]
        if pattern_error := re.search(r"^error: (.*)$", error, re.MULTILINE):
            reason += f" {pattern_error[1]}"
        raise UsageError(f"{name} cannot be enforced: {reason}")
    return grammar


@lru_cache(maxsize=256)  # because the same tools come with every call
def _compile_error(text: str) -> str:
    return load_llguidance().LLMatcher.validate_grammar(text) or ""


def _part_keys(schema: Mapping[str, Any], is_part: bool = False) -> tuple[str, ...]:
    """The keys whose members are parts of one object. A single member of `allOf` is a part only beside `properties`."""
    if is_part or "properties" in schema:
        return _COMBINING
    several = schema.get("allOf")
    return ("allOf",) if isinstance(several, list) and len(several) > 1 else ()


def _part_references(schema: Any) -> set[str]:
    """References to definitions that are parts of an object whose other parts may name more properties."""
    if isinstance(schema, list):
        return {found for part in schema for found in _part_references(part)}
    if not isinstance(schema, Mapping):
        return set()
    parts = [part for key in _part_keys(schema) if isinstance(schema.get(key), list) for part in schema[key]]
    named = {
        part["$ref"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("$ref"), str)
    }
    return named.union(*map(_part_references, schema.values()))


def _strict(schema: Any, ignored: Container[str], references: Container[str], is_part: bool = False) -> Any:
    """The schema without ignored keywords; its objects allow only the properties that they name.

    references: `_part_references` of the whole schema. is_part: the schema is part of an object whose other parts may
    name more properties.
    """
    if not isinstance(schema, Mapping):
        if isinstance(schema, bool):
            return schema
        raise TypeError(f"a schema is an object, not {schema!r:.80}")
    result = {key: value for key, value in schema.items() if key not in ignored}
    if result.get("uniqueItems") is False:  # the default, which the compiler does not know
        del result["uniqueItems"]
    if (pattern := _PATTERNS.get(result.get("format", "unknown"))) is not None:
        result.setdefault("pattern", pattern)
    if result.get("format", "unknown") not in FORMATS:
        del result["format"]
    for bound, inwards in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        if result.get("type") != "integer" and _is_whole(result.get(bound)):
            # llguidance allows an excluded whole number if the other bound is less than one away (0 to 0.5).
            result[bound] += inwards * max(1e-9, 1e-12 * abs(result[bound]))
    parts = _part_keys(result, is_part)

    def strict(part: Any, key: str, name: str) -> Any:
        return _strict(part, ignored, references, key in parts or f"#/{key}/{name}" in references)

    _change_subschemas(result, strict)
    if not is_part and "properties" in result and _names_all_properties(result):
        result = {"type": "object", "additionalProperties": False} | result
    return result


def _names_all_properties(schema: Mapping[str, Any]) -> bool:
    """Whether no part of the object can name a property that the object itself does not name."""
    parts = [part for key in _COMBINING for part in schema.get(key, ())]
    return "patternProperties" not in schema and not any(
        part.keys() & {"$ref", *_COMBINING} or set(part.get("properties", ())) - set(schema["properties"])
        for part in parts
        if isinstance(part, Mapping)
    )


def _is_whole(bound: Any) -> bool:
    return isinstance(bound, int | float) and not isinstance(bound, bool) and float(bound).is_integer()


def _change_subschemas(schema: dict[str, Any], change: Callable[[Any, str, str], Any]) -> None:
    """Replace the schemas inside a schema, but not values that look like schemas (`enum`, `default`).

    change(subschema, key, name): returns the new one; key: the keyword that contains it; name: its name there, or "".
    """
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, Mapping):
            schema[key] = {name: change(part, key, name) for name, part in value.items()}
        elif key in (*_COMBINING, "prefixItems") and isinstance(value, list):
            schema[key] = [change(part, key, "") for part in value]
        elif key in ("items", "additionalProperties", "additionalItems") and isinstance(value, Mapping):
            schema[key] = change(value, key, "")


def load_llguidance() -> Any:
    """Import llguidance. Raises UsageError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            f"answers by a schema need llguidance, which is not installed: {install_hint('structured')}"
        ) from error
    return llguidance
