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
# Hides the function by which templates write today's date. transformers cuts the newline, so nothing else changes.
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
    are text. If the template refuses the roles (Gemma's and
    Mistral's have no system role and want roles to alternate), messages without tool calls are merged to alternating
    roles. Without a template (a base model) the prompt is plain text with questions and answers. Raises PromptError if
    the template refuses that too.
    """
    if not messages:
        raise PromptError("there is no message to answer; give at least one")
    for message in messages:
        if not re.fullmatch(r"[\w-]+", message.role):  # the template does not escape it
            raise PromptError(f"a message's role is a word, such as user or assistant, not {message.role!r}")
    messages = [replace(m, segments=tuple(map(_verbatim, m.segments))) for m in messages]
    if tokenizer.chat_template is None:
        return Prompt(merge_literals(_without_template(messages)))
    failed: Exception | None = None
    forms = (list,) if any(message.calls for message in messages) else (list, alternating_roles)
    for form in forms:
        try:
            return Prompt(merge_literals(_templated(tokenizer, form(messages), tools, has_fixed_date)))
        except Exception as error:  # templates may raise anything
            failed = error
    roles = ", ".join(message.role for message in messages)
    raise PromptError(
        f"the model's chat template cannot take messages of the roles {roles}: {failed}"
    ) from failed


def alternating_roles(messages: Sequence[Message]) -> list[Message]:
    """User and assistant messages in turn; other roles count as the user's, and neighbours are merged."""
    by_role = [("assistant" if m.role == "assistant" else "user", m.segments) for m in messages]
    result = []
    for role, group in groupby(by_role, key=lambda pair: pair[0]):
        segments: list[Segment] = []
        for _, part in group:
            segments += [*([Literal(_TURN_GAP, verbatim=True)] if segments else []), *part]
        result.append(Message(role, tuple(segments)))
    return result


def merge_literals(segments: Sequence[Segment]) -> list[Segment]:
    """The same segments, with adjacent literals of one kind merged and empty ones removed."""
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
    """Renders the template with placeholders, so that no content can act as part of the template."""
    marks = [f"\x00message {number}\x00" for number in range(len(messages))]
    escapes = _ControlTokenEscapes(tokenizer)
    turns = [_template_message(m, mark, escapes) for m, mark in zip(messages, marks, strict=True)]
    escaped_tools = [escapes.escape(tool) for tool in tools] or None
    dated = _FIXED_DATE + tokenizer.get_chat_template(tools=escaped_tools) if has_fixed_date else None
    rest = str(
        tokenizer.apply_chat_template(
            turns,
            tools=escaped_tools,
            chat_template=dated,  # None: its own
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # of templates that know it: the answer is to come at once
        )
    )
    segments: list[Segment] = []
    for message, turn, mark in zip(messages, turns, marks, strict=True):
        if not turn["content"]:
            continue
        content: Sequence[Segment] = message.segments
        before, found, after = rest.partition(mark)
        if not found:
            before, found, after = rest.partition(_json_escaped(mark))
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


def _template_message(message: Message, mark: str, escapes: "_ControlTokenEscapes") -> dict[str, Any]:
    """The message as templates expect it, with `mark` as its content. An assistant's tool call may have no content."""
    content = mark if message.segments or not message.calls else ""
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

    Words, unlike the messages' placeholders, because they must survive `tojson`.
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
        known = "|".join(map(str, range(len(self._texts)))) or "(?!)"
        parts = re.split(f"ragblendtext({known})end", text)
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
