"""Tool calls in the model's own format: detects it from the chat template, constrains answers to it, parses them."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragblend.engine.decoding.grammar import MAX_SCHEMA_CHARS, Grammar, json_rule, validated
from ragblend.engine.prompts.segments import ToolCall
from ragblend.kvstore.errors import UnsupportedModelError, UsageError

MAX_CALLS = 8  # most calls in one answer, because small models repeat themselves
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_FENCE, _BARE_END = r"\s*(```\w*\n\s*)?", r"\s*\}\s*(```)?\s*"
_FIRST, _SECOND, _KEY = "ragblend_first", "ragblend_second", "ragblend_argument"
Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": a JSON schema}}`"""


@dataclass(frozen=True)
class CallFormat:
    """A model's format of calls: `opening name middle arguments (between name middle arguments)* closing`.

    between: None if an answer holds one call. tokens: ids of added tokens (`<tool_call>`) by their text.
    """

    opening: str
    middle: str
    between: str | None
    closing: str
    tokens: dict[str, int]

    @property
    def trigger(self) -> str:
        """The beginning of a call: a tag, or the opening brace of an answer that is only calls."""
        return re.match(r"\s*(<[^>]*>|\[\w+\]|.)", self.opening + "{", re.DOTALL)[0]  # type: ignore[index]

    @property
    def is_tagged(self) -> bool:
        return len(self.trigger.strip()) > 1

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the arguments in a call without tags: Qwen2.5's `arguments`, and the format's own."""
        return tuple(dict.fromkeys(["arguments", *re.findall(r'"(\w+)"\s*:\s*$', self.middle)]))


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer: the text before its calls, the calls, and the text of a broken call, if there is one."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    broken: str | None = None
    broken_name: str | None = None


def call_format(tokenizer: Any, model: str) -> CallFormat:
    """The format that the chat template uses. Raises UnsupportedModelError, with the reason, if it has no tools."""
    tool = {"type": "function", "function": {"name": _FIRST, "description": "", "parameters": {}}}
    if tokenizer.chat_template is None or _FIRST not in rendered_answer(tokenizer, [tool]):
        raise UnsupportedModelError(
            f"{model} calls no tools: its chat template has no place for them; take a model that was trained to call "
            "tools (Qwen2.5-Instruct, say), or ask for JSON by a schema, which every model can be held to"
        )
    two = rendered_answer(tokenizer, [tool], [_FIRST, _SECOND])
    one = rendered_answer(tokenizer, [tool], [_FIRST])
    before, _, after = rendered_answer(tokenizer, [tool], words=_SECOND).partition(_SECOND)
    answer = (two if _SECOND in two else one).removeprefix(before).removesuffix(after)
    found = _read_format(answer)
    if found is None:
        raise UnsupportedModelError(
            f"{model} calls no tools here: its chat template does not show how a call is written, as a name and JSON"
        )
    written = "".join(filter(None, found))
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if str(token) in written}
    controls = [text for text, i in added.items() if tokenizer.added_tokens_decoder[i].special]
    if controls:
        raise UnsupportedModelError(
            f"{model} calls no tools here: it marks calls by control tokens, {' '.join(controls)}"
        )
    return CallFormat(*found, added)


def rendered_answer(
    tokenizer: Any, tools: list[Tool] | None = None, names: Sequence[str] = (), words: str = ""
) -> str:
    """A conversation in which an assistant calls the tools of these names, or says `words`; empty if the template
    refuses, or there is none.
    """
    calls = [
        {"type": "function", "id": f"call{n:05}", "function": {"name": name, "arguments": {_KEY: 1}}}
        for n, name in enumerate(names)
    ]
    answer = {"role": "assistant", "content": words} | ({"tool_calls": calls} if calls else {})
    turns = [{"role": "user", "content": "?"}, *([answer] if calls or words else [])]
    try:
        return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False))
    except Exception:  # templates may raise anything
        return ""


def _read_format(answer: str) -> tuple[str, str, str | None, str] | None:
    """The format's parts, or None. answer: an assistant's, with two calls or one."""
    arguments = r"\{[^{}]*" + _KEY + r"[^{}]*\}"
    parts = re.split(f"{_FIRST}|{_SECOND}|{arguments}", answer)
    if len(parts) == 3:
        return parts[0], parts[1], None, parts[2]
    if len(parts) == 5 and parts[1] == parts[3]:
        return parts[0], parts[1], parts[2], parts[4]
    return None


def functions_by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """The functions by name, the last one of equal names. Raises UsageError for an invalid tool."""
    result: dict[str, Tool] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if function is None or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                'a tool needs a function with a name of letters, digits, _ . or -, as in {"type": "function", '
                f'"function": {{"name", "description", "parameters"}}}}: {tool!r:.200}'
            )
        result[name] = function
    return result


def check_tools(tools: Sequence[Tool]) -> None:
    """Check the tools: raises UsageError if an argument schema does not compile. Loads no model."""
    rules = {name: _arguments(name, function) for name, function in functions_by_name(tools).items()}
    length = sum(map(len, rules.values()))
    if length > MAX_SCHEMA_CHARS:
        raise UsageError(
            f"the schemas of these {len(rules)} tools have {length:,} characters as JSON; at most "
            f"{MAX_SCHEMA_CHARS:,} are compiled: offer fewer tools at once"
        )
    for name, rule in rules.items():
        validated(Grammar(f"start: {rule}\n"), f"the schema of the tool {name!r}")


def tools_grammar(
    form: CallFormat,
    tools: Sequence[Tool],
    is_forced: bool,
    is_parallel: bool,
    answer: str = "TEXT",
) -> Grammar:
    """A grammar of text or calls, or only calls (is_forced). answer: the rule of the text.

    From the trigger on it is a call of one of these tools, with arguments of its schema. So is an answer that begins as
    a call without its tags (`_parse_bare`).
    """
    functions = functions_by_name(tools)
    calls = [f"{json.dumps(name + form.middle)} {_arguments(name, each)}" for name, each in functions.items()]
    several = is_parallel and form.between is not None
    more = f"({_terminals(form.between or '', form)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    rest = _terminals(form.opening.removeprefix(form.trigger), form)
    begin, tag = _terminals(form.trigger, form), form.trigger.strip()
    rules = [f"rest: {rest} call {more} {_terminals(form.closing, form)}", f"call: {' | '.join(calls)}"]
    if is_forced:
        rules.append(f"start: {begin} rest")
    elif answer != "TEXT":
        rules.append(f"start: {begin} rest | {answer}")
    else:
        bare = [f"/{_bare_begin(form, name)}/ {_arguments(name, each)}" for name, each in functions.items()]
        rules += [f"bare: ({' | '.join(bare)}) /{_BARE_END}/"]
        rules += [f"BEGUN: /{_bare_begin(form, *functions)}(.|\\n)*/"]
        if tag in form.tokens:  # ordinary tokens could write it too, and it would be read as a call
            rules += [f"start: WORDS | bare | WORDS {begin} rest", "WORDS: TEXT & ~BEGUN & ~SPELLED"]
            rules.append(rf"SPELLED: /(.|\n)*{re.escape(tag)}(.|\n)*/")
        elif form.is_tagged:
            rules += ["start: WORDS | bare | begun rest", "WORDS: TEXT & ~BEGUN"]
            rules += [f"begun[lazy]: (TEXT {json.dumps(form.trigger)}) & ~BEGUN"]
        else:
            rules += [f"start: SPOKEN | bare | {begin} rest", r"SPOKEN: /[^{](.|\n)*/ & ~BEGUN"]
    return Grammar("\n".join([*rules, r"TEXT: /(.|\n)*/", ""]), is_closed=False)


def _arguments(name: str, function: Tool) -> str:
    parameters = function.get("parameters") or {"properties": {}}
    if isinstance(parameters, Mapping):
        if "object" not in str(parameters.get("type") or "object"):
            raise UsageError(
                f"the arguments of the tool {name!r} must be an object, not {parameters['type']!r}"
            )
        parameters = {**parameters, "type": "object"}
    # No grammar keeps items apart; many published tools ask for it, and check what they are given.
    return json_rule(parameters, f"the schema of the tool {name!r}", ignored={"uniqueItems"})


def _terminals(text: str, form: CallFormat) -> str:
    """A grammar expression for the text, with added tokens by id, because their text would match other tokens."""
    pattern = "|".join(map(re.escape, form.tokens)) or "(?!)"
    parts = re.split(f"({pattern})", text)
    return " ".join(f"<[{form.tokens[p]}]>" if p in form.tokens else json.dumps(p) for p in parts if p)


def parse_answer(
    text: str, form: CallFormat, tools: Sequence[Tool], has_schema: bool = False
) -> ParsedAnswer:
    """Parse an answer. One that is only a call without its tags, fenced or not, counts as a call.

    has_schema: it is either calls or JSON of a schema, which may have a tag in a text.
    """
    if has_schema:
        names = functions_by_name(tools)
        begins = [form.trigger] if form.is_tagged else [form.opening + each + form.middle for each in names]
        if not text.startswith(tuple(begins)):
            return ParsedAnswer(text)
    at = _begin_of_calls(text, form)
    if at is None or not form.is_tagged:
        bare = _parse_bare(text, form, functions_by_name(tools))
        if at is None or bare.calls or bare.broken_name:
            return bare
    words, rest, calls = text[:at].rstrip(), text[at:].removeprefix(form.opening), list[ToolCall]()
    while True:
        name, found, after = rest.partition(form.middle)
        try:
            arguments, end = json.JSONDecoder().raw_decode(after)
        except (ValueError, RecursionError):
            return ParsedAnswer(words, tuple(calls), *((after, name) if found else (rest, None)))
        calls.append(_call(name, arguments))
        left = after[end:]
        if form.between is None or not left.startswith(form.between):
            return ParsedAnswer(words, tuple(calls))
        rest = left.removeprefix(form.between)


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(name, arguments, f"call_{uuid.uuid4().hex[:24]}")


def _bare_begin(form: CallFormat, *names: str) -> str:
    """A pattern of what a call without tags begins with, up to its arguments."""
    name, key = "|".join(map(re.escape, names)), "|".join(form.keys)
    return rf'{_FENCE}\{{\s*"name"\s*:\s*"({name})"\s*,\s*"({key})"\s*:\s*'


def _parse_bare(text: str, form: CallFormat, functions: Mapping[str, Tool]) -> ParsedAnswer:
    """An answer without tags: a call, which small models write so (Qwen2.5-Coder 0.5B nearly always), one that was cut
    off, or text.
    """
    if (begin := re.match(_bare_begin(form, *functions), text, re.ASCII)) is None:
        return ParsedAnswer(text)
    try:
        arguments, end = json.JSONDecoder().raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        return ParsedAnswer("", (), text[begin.end() :], begin[2])
    is_call = isinstance(arguments, dict) and re.fullmatch(_BARE_END, text[end:]) is not None
    return ParsedAnswer("", (_call(begin[2], arguments),)) if is_call else ParsedAnswer(text)


def _may_become_bare_call(text: str, form: CallFormat, names: Sequence[str]) -> bool:
    """Whether an answer that begins so can be a call of `_parse_bare`."""
    said = text.lstrip()
    if said.startswith("`"):
        fence, newline, said = said.partition("\n")
        if not re.fullmatch(r"`{1,3}|```\w*", fence) or (newline and len(fence) < 3):
            return False
    begins = [f'{{"name":"{name}","{key}":{{' for name in names for key in form.keys]
    packed = re.sub(r"\s", "", said)
    if not any(packed.startswith(begin) for begin in begins):
        return any(begin.startswith(packed) for begin in begins)
    try:
        _, end = json.JSONDecoder().raw_decode(said.lstrip())
    except (ValueError, RecursionError):
        return True
    return not said.lstrip()[end:].strip("`\n ")


def _begin_of_calls(text: str, form: CallFormat) -> int | None:
    at = text.find(form.trigger) if form.is_tagged else 0 if text.startswith(form.trigger) else -1
    return None if at < 0 else at


class TextBeforeCalls:
    """Streams the text before an answer's calls; only text that can still become a call is held back."""

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        self._form, self._text, self._given = form, "", 0
        self._names, self._may_be_bare = tuple(functions_by_name(tools)), True

    def feed(self, piece: str) -> str:
        """The new text that is final with this piece."""
        self._text += piece
        self._may_be_bare = self._may_be_bare and _may_become_bare_call(self._text, self._form, self._names)
        if self._may_be_bare or not self._text.strip():
            return ""
        at, trigger = _begin_of_calls(self._text, self._form), self._form.trigger
        words = self._text[:at].rstrip()
        held = 0 if at is not None else max(n for n in range(len(trigger)) if words.endswith(trigger[:n]))
        return self._give(words[: len(words) - held].rstrip())

    def finish(self, words: str) -> str:
        """The remaining text. words: the parsed answer's whole text."""
        return self._give(words)

    def _give(self, words: str) -> str:
        piece, self._given = words[self._given :], max(self._given, len(words))
        return piece
