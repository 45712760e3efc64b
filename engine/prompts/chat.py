"""From messages to one prompt: the model's own chat template around segments, which stay segments."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ragblend.engine.prompts.segments import Literal, Message, Prompt, Segment
from ragblend.kvstore.errors import PromptError

_TURN_GAP = "\n\n"


def chat(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
    """The messages in the tokenizer's chat template, up to where the assistant is to speak.

    tools: shown where the template shows them (`tools.call_format` says whether it does). The template's control tokens
    are the only ones: what messages, tools and calls say is text, whoever wrote it.
    A template that refuses them (Gemma's and Mistral's know no system role, and want roles to alternate) gets them
    folded: system words at the head of the next user message, neighbours of one role as one; but no calls and tools'
    answers, of which nothing would be left but words. A tokenizer without a template is a base model's: question and
    answer, in words. Raises PromptError where nothing helps.
    """
    if not messages:
        raise PromptError("there is no message to answer; give at least one")
    for message in messages:
        if not re.fullmatch(r"[\w-]+", message.role):  # a template prints it as it is
            raise PromptError(f"a message's role is a word, such as user or assistant, not {message.role!r}")
    messages = [replace(m, segments=tuple(map(_as_text, m.segments))) for m in messages]
    if tokenizer.chat_template is None:
        return Prompt(merge_literals(_in_words(messages)))
    failed: Exception | None = None
    forms = (list,) if any(m.calls or m.role == "tool" for m in messages) else (list, alternating_roles)
    for form in forms:
        try:
            return Prompt(merge_literals(_templated(tokenizer, form(messages), tools)))
        except Exception as error:  # templates raise whatever they like
            failed = error
    roles = ", ".join(message.role for message in messages)
    raise PromptError(
        f"the model's chat template cannot take messages of the roles {roles}: {failed}"
    ) from failed


def alternating_roles(messages: Sequence[Message]) -> list[Message]:
    """User and assistant messages in turn, the first and the last of the user where there are such."""
    sided = [("assistant" if m.role == "assistant" else "user", m.segments) for m in messages]
    result = []
    for role, group in groupby(sided, key=lambda side: side[0]):
        segments: list[Segment] = []
        for _, part in group:
            segments += [*([Literal(_TURN_GAP, verbatim=True)] if segments else []), *part]
        result.append(Message(role, tuple(segments)))
    return result


def merge_literals(segments: Sequence[Segment]) -> list[Segment]:
    """The same text with literals of one kind, side by side, as one; empty ones are gone."""
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


def _as_text(segment: Segment) -> Segment:
    return replace(segment, verbatim=True) if isinstance(segment, Literal) else segment


def _templated(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Segment]:
    """The template runs over marks that stand for the contents, so that no content can act as template."""
    marks = [f"\x00message {number}\x00" for number in range(len(messages))]
    harmless = _Harmless(tokenizer)
    turns = [_turn(m, mark, harmless) for m, mark in zip(messages, marks, strict=True)]
    shown = [harmless.of(tool) for tool in tools] or None
    rest = str(tokenizer.apply_chat_template(turns, tools=shown, tokenize=False, add_generation_prompt=True))
    segments: list[Segment] = []
    for message, turn, mark in zip(messages, turns, marks, strict=True):
        if not turn["content"]:
            continue
        content: Sequence[Segment] = message.segments
        before, found, behind = rest.partition(mark)
        if not found:
            before, found, behind = rest.partition(_in_json(mark))
            content = [_quoted(segment) for segment in content]
        if not found:
            raise PromptError(f"the chat template drops messages of the role {message.role}")
        segments, rest = [*segments, *harmless.restored(before), *content], behind
    return [*segments, *harmless.restored(rest)]


def _in_json(text: str) -> str:
    """Inside of a string, as `tojson` writes it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(segment: Segment) -> Segment:
    """The same inside of a JSON string. What reads the same there stays, and what is known by its ids alone."""
    text = _in_json(segment.text or "")
    return segment if text == (segment.text or "") else Literal(text, None, verbatim=True)


def _turn(message: Message, mark: str, harmless: "_Harmless") -> dict[str, Any]:
    """A message as templates know it. An assistant that calls a tool may say nothing beside it."""
    said = mark if message.segments or not message.calls else ""
    turn: dict[str, Any] = {"role": message.role, "content": said}
    if message.calls:
        calls = [{"name": each.name, "arguments": each.arguments} for each in message.calls]
        ids = [each.id for each in message.calls]
        turn["tool_calls"] = [
            {"type": "function", "id": harmless.of(i), "function": harmless.of(call)}
            for i, call in zip(ids, calls, strict=True)
        ]
    named = {"tool_call_id": message.call_id, "name": message.name}
    return turn | {key: harmless.of(value) for key, value in named.items() if value is not None}


class _Harmless:
    """Values for a template in which words stand for texts that hold control tokens, and the way back.

    They have to survive `tojson` and be found again, so they are words, and not the marks that messages have.
    """

    def __init__(self, tokenizer: Any) -> None:
        controls = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._controls = re.compile("|".join(map(re.escape, controls)) or "(?!)")
        self._texts: list[str] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self.of(key): self.of(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(part) for part in value]
        if not isinstance(value, str) or not self._controls.search(value):
            return value
        self._texts.append(value)
        return f"ragblendtext{len(self._texts) - 1}end"

    def restored(self, text: str) -> list[Segment]:
        """What a template made of the values, as JSON has them: verbatim where they stood."""
        known = "|".join(map(str, range(len(self._texts)))) or "(?!)"
        parts = re.split(f"ragblendtext({known})end", text)
        texts = [_in_json(text) for text in self._texts]
        return [Literal(texts[int(p)], None, True) if n % 2 else Literal(p) for n, p in enumerate(parts)]


def _in_words(messages: Sequence[Message]) -> list[Segment]:
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
