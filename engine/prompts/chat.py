"""Applies the model's chat template to messages, and keeps their segments as segments of the prompt."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ragblend.engine.prompts.segments import Literal, Message, Prompt, Segment
from ragblend.kvstore.errors import PromptError

_TURN_GAP = "\n\n"
# A macro in place of the function by which templates write today's date. transformers removes the newline after it.
_FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format.replace('%d', '01').replace('%m', '01').replace('%b', 'Jan')"
    ".replace('%B', 'January').replace('%Y', '2026') }}{% endmacro %}\n"
)


def chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    has_fixed_date: bool = False,
) -> Prompt:
    """The messages in the tokenizer's chat template, up to the beginning of the assistant's answer.

    tools: passed to the template (`tools.call_format` checks that it uses them). has_fixed_date: the template writes
    1 January 2026 for today. Only the template's own control tokens count: control tokens in messages, tools and calls
    are text. If the template refuses the roles (Gemma's and Mistral's have no system role and require alternating
    roles), messages without tool calls are merged to alternating roles. Without a template (a base model) the prompt is
    plain text with questions and answers. Raises PromptError if the template refuses the messages in any form.
    """
    if not messages:
        raise PromptError("there is no message to answer; give at least one")
    for message in messages:
        if not re.fullmatch(r"[\w-]+", message.role):  # the template does not escape it
            raise PromptError(f"a message's role is a word, such as user or assistant, not {message.role!r}")
    messages = [replace(m, segments=tuple(map(_verbatim, m.segments))) for m in messages]
    if tokenizer.chat_template is None:
        return Prompt(merge_literals(_without_template(messages)))
    refusal: Exception | None = None
    role_orders = (list,) if any(message.calls for message in messages) else (list, alternating_roles)
    for with_roles in role_orders:
        try:
            return Prompt(merge_literals(_templated(tokenizer, with_roles(messages), tools, has_fixed_date)))
        except Exception as error:  # templates may raise anything
            refusal = error
    roles = ", ".join(message.role for message in messages)
    raise PromptError(
        f"the model's chat template cannot take messages of the roles {roles}: {refusal}"
    ) from refusal


def alternating_roles(messages: Sequence[Message]) -> list[Message]:
    """Alternating user and assistant messages: other roles become the user's, and neighbours are merged."""
    by_role = [("assistant" if m.role == "assistant" else "user", m.segments) for m in messages]
    result = []
    for role, group in groupby(by_role, key=lambda pair: pair[0]):
        segments: list[Segment] = []
        for _, part in group:
            segments += [*([Literal(_TURN_GAP, verbatim=True)] if segments else []), *part]
        result.append(Message(role, tuple(segments)))
    return result


def merge_literals(segments: Sequence[Segment]) -> list[Segment]:
    """The segments with adjacent untokenized literals of one kind merged, and empty ones removed."""
    result: list[Segment] = []
    for segment in segments:
        last = result[-1] if result else None
        if not isinstance(segment, Literal) or segment.token_ids is not None:
            result.append(segment)
        elif not segment.text:
            continue
        elif isinstance(last, Literal) and (last.token_ids, last.verbatim) == (None, segment.verbatim):
            result[-1] = Literal(last.text + segment.text, None, segment.verbatim)
        else:
            result.append(segment)
    return result


def _verbatim(segment: Segment) -> Segment:
    return replace(segment, verbatim=True) if isinstance(segment, Literal) else segment


def _templated(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], has_fixed_date: bool
) -> list[Segment]:
    """Render the template with placeholders for the messages, so that no content can act as part of the template."""
    placeholders = [f"\x00message {number}\x00" for number in range(len(messages))]
    escapes = _ControlTokenEscapes(tokenizer)
    turns = [_template_message(m, text, escapes) for m, text in zip(messages, placeholders, strict=True)]
    escaped_tools = [escapes.escape(tool) for tool in tools] or None
    dated_template = (
        _FIXED_DATE + tokenizer.get_chat_template(tools=escaped_tools) if has_fixed_date else None
    )
    rest = str(
        tokenizer.apply_chat_template(
            turns,
            tools=escaped_tools,
            chat_template=dated_template,  # None: the tokenizer's own
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # for templates that know this option: no reasoning before the answer
        )
    )
    segments: list[Segment] = []
    for message, turn, placeholder in zip(messages, turns, placeholders, strict=True):
        if not turn["content"]:
            continue
        content: Sequence[Segment] = message.segments
        before, found, after = rest.partition(placeholder)
        if not found:  # the template may write messages as JSON
            before, found, after = rest.partition(_json_escaped(placeholder))
            content = [_json_segment(segment) for segment in content]
        if not found:
            raise PromptError(f"the chat template drops messages of the role {message.role}")
        segments, rest = [*segments, *escapes.restore(before), *content], after
    return [*segments, *escapes.restore(rest)]


def _json_escaped(text: str) -> str:
    """The text as `tojson` writes it inside a string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_segment(segment: Segment) -> Segment:
    """The segment inside a JSON string; unchanged if escaping changes nothing, or only its ids are known."""
    text = _json_escaped(segment.text or "")
    return segment if text == (segment.text or "") else Literal(text, None, verbatim=True)


def _template_message(message: Message, placeholder: str, escapes: "_ControlTokenEscapes") -> dict[str, Any]:
    """The message as templates expect it, with the placeholder as its content; a tool call may have no content."""
    content = placeholder if message.segments or not message.calls else ""
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.calls:
        calls = [{"name": each.name, "arguments": each.arguments} for each in message.calls]
        ids = [each.id for each in message.calls]
        turn["tool_calls"] = [
            {"type": "function", "id": escapes.escape(i), "function": escapes.escape(call)}
            for i, call in zip(ids, calls, strict=True)
        ]
    named = {"tool_call_id": message.call_id, "name": message.name}
    return turn | {key: escapes.escape(value) for key, value in named.items() if value is not None}


class _ControlTokenEscapes:
    """Replaces texts that contain control tokens by placeholder words, and restores them after the template has run.

    These placeholders are plain words, unlike those of messages, because they must survive `tojson`.
    """

    def __init__(self, tokenizer: Any) -> None:
        controls = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._controls = re.compile("|".join(map(re.escape, controls)) or "(?!)")
        self._texts: list[str] = []

    def escape(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(part) for part in value]
        if not isinstance(value, str) or not self._controls.search(value):
            return value
        self._texts.append(value)
        return f"ragblendtext{len(self._texts) - 1}end"

    def restore(self, text: str) -> list[Segment]:
        """The template's output, with the original texts, JSON-escaped, as verbatim literals."""
        numbers = "|".join(map(str, range(len(self._texts)))) or "(?!)"
        parts = re.split(f"ragblendtext({numbers})end", text)  # every second part is the number of a text
        texts = [_json_escaped(text) for text in self._texts]
        return [Literal(texts[int(p)], None, True) if n % 2 else Literal(p) for n, p in enumerate(parts)]


def _without_template(messages: Sequence[Message]) -> list[Segment]:
    segments: list[Segment] = []
    for number, message in enumerate(messages, 1):
        if message.role == "system":
            before, after = "", _TURN_GAP
        elif message.role == "assistant":
            before, after = "Answer: ", _TURN_GAP
        else:
            before, after = ("", "") if number == len(messages) else ("Question: ", "\n")
        segments += [Literal(before), *message.segments, Literal(after)]
    return [*segments, Literal("\nAnswer:")]
