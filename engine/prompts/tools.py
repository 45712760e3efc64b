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

MAX_CALLS = 8  # in one answer; small models repeat themselves
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_FENCE, _UNTAGGED_END = r"\s*(```\w*\n\s*)?", r"\s*\}\s*(```)?\s*"
# Names in a sample conversation, which are searched for in the template's output.
_FIRST, _SECOND, _KEY = "ragblend_first", "ragblend_second", "ragblend_argument"
Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": a JSON schema}}`"""


@dataclass(frozen=True)
class CallFormat:
    """A model's format of calls: `opening name middle arguments (between name middle arguments)* closing`.

    between: None if an answer can have only one call. tokens: ids of the added tokens in it (`<tool_call>`), by text.
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
        """Keys under which a call without tags may have its arguments: Qwen2.5's `arguments`, and the format's own."""
        return tuple(dict.fromkeys(["arguments", *re.findall(r'"(\w+)"\s*:\s*$', self.middle)]))


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer: the text before its calls, the calls, and a broken call, if there is one.

    broken: the broken call's text after its name, or all of it if broken_name is None.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    broken: str | None = None
    broken_name: str | None = None


def call_format(tokenizer: Any, model: str) -> CallFormat:
    """The format that the chat template uses. Raises UnsupportedModelError, with the reason, if it has no tools."""
    tool = {"type": "function", "function": {"name": _FIRST, "description": "", "parameters": {}}}
    if tokenizer.chat_template is None or _FIRST not in rendered_conversation(tokenizer, [tool]):
        raise UnsupportedModelError(
            f"{model} calls no tools: its chat template has no place for them; use a model that was trained to call "
            "tools (such as Qwen2.5-Instruct), or ask for JSON by a schema, which works with every model"
        )
    two = rendered_conversation(tokenizer, [tool], [_FIRST, _SECOND])
    one = rendered_conversation(tokenizer, [tool], [_FIRST])
    before, _, after = rendered_conversation(tokenizer, [tool], text=_SECOND).partition(_SECOND)
    answer = (two if _SECOND in two else one).removeprefix(before).removesuffix(after)
    parts = _read_format(answer)
    if parts is None:
        raise UnsupportedModelError(
            f"{model} calls no tools here: its chat template does not show how a call is written, as a name and JSON"
        )
    written = "".join(filter(None, parts))
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if str(token) in written}
    controls = [text for text, i in added.items() if tokenizer.added_tokens_decoder[i].special]
    if controls:
        raise UnsupportedModelError(
            f"{model} calls no tools here: it marks calls by control tokens, {' '.join(controls)}"
        )
    return CallFormat(*parts, added)


def rendered_conversation(
    tokenizer: Any, tools: list[Tool] | None = None, names: Sequence[str] = (), text: str = ""
) -> str:
    """The template's output for a conversation in which the assistant calls the tools of these names, or says `text`.

    It is empty if there is no template, or the template refuses the conversation.
    """
    calls = [
        {"type": "function", "id": f"call{n:05}", "function": {"name": name, "arguments": {_KEY: 1}}}
        for n, name in enumerate(names)
    ]
    answer = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
    turns = [{"role": "user", "content": "?"}, *([answer] if calls or text else [])]
    try:
        return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False))
    except Exception:  # templates may raise anything
        return ""


def _read_format(answer: str) -> tuple[str, str, str | None, str] | None:
    """(opening, middle, between, closing) of a `CallFormat`, or None. answer: the template's, with one call or two."""
    arguments = r"\{[^{}]*" + _KEY + r"[^{}]*\}"
    parts = re.split(f"{_FIRST}|{_SECOND}|{arguments}", answer)
    if len(parts) == 3:
        return parts[0], parts[1], None, parts[2]
    if len(parts) == 5 and parts[1] == parts[3]:
        return parts[0], parts[1], parts[2], parts[4]
    return None


def functions_by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """The functions by name; of equal names the last one counts. Raises UsageError for an invalid tool."""
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
    """A grammar for an answer of text or calls, or only of calls (is_forced). answer: the grammar's rule for the text.

    After the trigger the answer must be calls of these tools, with arguments that fit their schemas. The same holds for
    an answer that begins like a call without its tags (`_parse_untagged`).
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
        bare = [
            f"/{_untagged_begin(form, name)}/ {_arguments(name, each)}" for name, each in functions.items()
        ]
        rules += [f"bare: ({' | '.join(bare)}) /{_UNTAGGED_END}/"]
        rules += [f"BEGUN: /{_untagged_begin(form, *functions)}(.|\\n)*/"]
        if tag in form.tokens:  # text must not spell it with ordinary tokens: it would be parsed as a call
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
        kind = parameters.get("type")
        if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
            raise UsageError(f"the arguments of the tool {name!r} must be an object, not {kind!r}")
        parameters = {**parameters, "type": "object"}
    # A grammar cannot require unique items. Many published tools ask for them, and check their arguments themselves.
    return json_rule(parameters, f"the schema of the tool {name!r}", ignored={"uniqueItems"})


def _terminals(text: str, form: CallFormat) -> str:
    """A grammar expression for the text, with added tokens by id, because their text would match other tokens."""
    pattern = "|".join(map(re.escape, form.tokens)) or "(?!)"
    parts = re.split(f"({pattern})", text)
    return " ".join(f"<[{form.tokens[p]}]>" if p in form.tokens else json.dumps(p) for p in parts if p)


def parse_answer(
    text: str, form: CallFormat, tools: Sequence[Tool], has_schema: bool = False
) -> ParsedAnswer:
    """Parse an answer. An answer that is only a call without its tags, fenced or not, counts as a call.

    has_schema: the answer is either calls or JSON of a schema, whose strings may contain a tag.
    """
    if has_schema:
        names = functions_by_name(tools)
        begins = [form.trigger] if form.is_tagged else [form.opening + each + form.middle for each in names]
        if not text.startswith(tuple(begins)):
            return ParsedAnswer(text)
    start = _calls_start(text, form)
    if start is None or not form.is_tagged:
        untagged = _parse_untagged(text, form, functions_by_name(tools))
        if start is None or untagged.calls or untagged.broken_name:
            return untagged
    words, rest, calls = text[:start].rstrip(), text[start:].removeprefix(form.opening), list[ToolCall]()
    while True:
        name, found, after = rest.partition(form.middle)
        try:
            arguments, end = json.JSONDecoder().raw_decode(after)
        except (ValueError, RecursionError):
            return ParsedAnswer(words, tuple(calls), *((after, name) if found else (rest, None)))
        calls.append(_call(name, arguments))
        rest = after[end:]
        if form.between is None or not rest.startswith(form.between):
            return ParsedAnswer(words, tuple(calls))
        rest = rest.removeprefix(form.between)


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(name, arguments, f"call_{uuid.uuid4().hex[:24]}")


def _untagged_begin(form: CallFormat, *names: str) -> str:
    """A pattern for the beginning of a call without tags, up to its arguments."""
    name, key = "|".join(map(re.escape, names)), "|".join(form.keys)
    return rf'{_FENCE}\{{\s*"name"\s*:\s*"({name})"\s*,\s*"({key})"\s*:\s*'


def _parse_untagged(text: str, form: CallFormat, functions: Mapping[str, Tool]) -> ParsedAnswer:
    """Parse an answer without tags: as a call, as a call that was cut off, or as text.

    Small models often leave out the tags (Qwen2.5-Coder 0.5B nearly always).
    """
    if (begin := re.match(_untagged_begin(form, *functions), text, re.ASCII)) is None:
        return ParsedAnswer(text)
    try:
        arguments, end = json.JSONDecoder().raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        return ParsedAnswer("", (), text[begin.end() :], begin[2])
    is_call = isinstance(arguments, dict) and re.fullmatch(_UNTAGGED_END, text[end:]) is not None
    return ParsedAnswer("", (_call(begin[2], arguments),)) if is_call else ParsedAnswer(text)


def _may_become_untagged_call(text: str, form: CallFormat, names: Sequence[str]) -> bool:
    """Whether an answer that begins with this text may become a call without tags (`_parse_untagged`)."""
    body = text.lstrip()
    if body.startswith("`"):
        fence, newline, body = body.partition("\n")
        if not re.fullmatch(r"`{1,3}|```\w*", fence) or (newline and len(fence) < 3):
            return False
    begins = [f'{{"name":"{name}","{key}":{{' for name in names for key in form.keys]
    packed = re.sub(r"\s", "", body)
    if not any(packed.startswith(begin) for begin in begins):
        return any(begin.startswith(packed) for begin in begins)
    try:
        _, end = json.JSONDecoder().raw_decode(body.lstrip())
    except (ValueError, RecursionError):
        return True
    return not body.lstrip()[end:].strip("`\n ")


def _calls_start(text: str, form: CallFormat) -> int | None:
    """The index at which the answer's calls begin; None if it has none."""
    if form.is_tagged:
        start = text.find(form.trigger)
    else:
        start = 0 if text.startswith(form.trigger) else -1
    return None if start < 0 else start


class TextBeforeCalls:
    """Streams the text before an answer's calls, and holds back text that may still become a call."""

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        self._form, self._text, self._returned = form, "", 0
        self._names, self._may_be_untagged = tuple(functions_by_name(tools)), True

    def feed(self, piece: str) -> str:
        """Add a piece of the answer; returns the new text that cannot become a call any more."""
        self._text += piece
        self._may_be_untagged = self._may_be_untagged and _may_become_untagged_call(
            self._text, self._form, self._names
        )
        if self._may_be_untagged or not self._text.strip():
            return ""
        start, trigger = _calls_start(self._text, self._form), self._form.trigger
        words, held_back = self._text[:start].rstrip(), 0
        if start is None:  # the text may end with the beginning of a trigger
            held_back = max(n for n in range(len(trigger)) if words.endswith(trigger[:n]))
        return self._return_new(words[: len(words) - held_back].rstrip())

    def finish(self, words: str) -> str:
        """The remaining text. words: all text of the parsed answer."""
        return self._return_new(words)

    def _return_new(self, words: str) -> str:
        piece, self._returned = words[self._returned :], max(self._returned, len(words))
        return piece
