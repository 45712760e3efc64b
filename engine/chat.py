"""From messages to one prompt: the model's own chat template around segments, which stay segments."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ragblend.engine.prompt import Literal, Message, Prompt, Segment
from ragblend.kvstore.errors import PromptError

_TURN_GAP = "\n\n"


def chat(tokenizer: Any, messages: Sequence[Message]) -> Prompt:
    """The messages in the tokenizer's chat template, up to where the assistant is to speak.

    The template's control tokens are the only ones: what messages say is text, whoever wrote it.
    A template that refuses them (Gemma's and Mistral's know no system role, and want roles to alternate) gets them
    folded: system words at the head of the next user message, neighbours of one role as one. A tokenizer without a
    template is a base model's: question and answer, in words. Raises PromptError where nothing helps.
    """
    if not messages:
        raise PromptError("there is no message to answer; give at least one")
    for message in messages:
        if not re.fullmatch(r"[\w-]+", message.role):  # a template prints it as it is
            raise PromptError(f"a message's role is a word, such as user or assistant, not {message.role!r}")
    messages = [Message(m.role, tuple(map(_as_text, m.segments))) for m in messages]
    if tokenizer.chat_template is None:
        return Prompt(joined(_in_words(messages)))
    try:
        return Prompt(joined(_templated(tokenizer, messages)))
    except Exception:  # templates raise whatever they like
        pass
    try:
        return Prompt(joined(_templated(tokenizer, folded(messages))))
    except Exception as error:
        roles = ", ".join(message.role for message in messages)
        raise PromptError(
            f"the model's chat template cannot take messages of the roles {roles}: {error}"
        ) from error


def folded(messages: Sequence[Message]) -> list[Message]:
    """User and assistant messages in turn, the first and the last of the user where there are such."""
    sided = [("assistant" if m.role == "assistant" else "user", m.segments) for m in messages]
    result = []
    for role, group in groupby(sided, key=lambda side: side[0]):
        segments: list[Segment] = []
        for _, part in group:
            segments += [*([Literal(_TURN_GAP, verbatim=True)] if segments else []), *part]
        result.append(Message(role, tuple(segments)))
    return result


def joined(segments: Sequence[Segment]) -> list[Segment]:
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


def _templated(tokenizer: Any, messages: Sequence[Message]) -> list[Segment]:
    """The template runs over marks that stand for the contents, so that no content can act as template."""
    marks = [f"\x00message {number}\x00" for number in range(len(messages))]
    turns = [{"role": m.role, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    rest = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    segments: list[Segment] = []
    for message, mark in zip(messages, marks, strict=True):
        before, found, rest = rest.partition(mark)
        if not found:
            raise PromptError(f"the chat template drops messages of the role {message.role}")
        segments += [Literal(before), *message.segments]
    return [*segments, Literal(rest)]


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
