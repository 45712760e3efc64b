"""Tool calls: the template's format, constrained answers, and parsing."""

import pytest
from benches import assert_grammar_changes_nothing, make_text
from tiny_models import TEMPLATE, TOOLS_TEMPLATE
from tokenizers import AddedToken

from ragblend import Chunk, Literal
from ragblend.engine.decoding.constrained import token_grammars
from ragblend.engine.decoding.grammar import load_llguidance
from ragblend.engine.prompts.chat import chat
from ragblend.engine.prompts.segments import Message, ToolCall
from ragblend.engine.prompts.tools import (
    ParsedAnswer,
    TextBeforeCalls,
    call_format,
    check_tools,
    parse_answer,
    tools_grammar,
)
from ragblend.kvstore.errors import PromptError, UnsupportedModelError, UsageError

# SmolLM2's way (a list in one pair of tags), and Llama's (no tags, one call).
LIST_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}<tool_call>[{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]</tool_call>'
    "{% endif %}[end]{% endfor %}"
)
BARE_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% endif %}[end]{% endfor %}"
)
# As Llama 3.1's, which shows what a tool said as JSON.
QUOTING_TEMPLATE = BARE_TEMPLATE.replace(
    "{{ m.content }}", "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
)
MUTE_TEMPLATE = "{{ tools }}" + TEMPLATE
CONTROL_TEMPLATE = TOOLS_TEMPLATE.replace("<tool_call>", "<|im_start|>")


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": parameters},
    }


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
TOOLS = [tool("get_weather", city={"type": "string"}), ADD]
ASKED = [Message("user", (Literal("Which weather?"),))]


@pytest.fixture
def tokenizer(own_tokenizer):
    own_tokenizer.chat_template = TOOLS_TEMPLATE
    return own_tokenizer


@pytest.fixture
def form(tokenizer):
    return call_format(tokenizer, "tiny")


def test_the_call_format_is_read_from_the_template(tokenizer, form):
    assert form.opening == '<tool_call>\n{"name": "'
    assert form.middle == '", "arguments": '
    assert form.between == '}\n</tool_call>\n<tool_call>\n{"name": "'
    assert form.closing == "}\n</tool_call>"
    tokenizer.chat_template = LIST_TEMPLATE
    listed = call_format(tokenizer, "tiny")
    assert (listed.opening, listed.between, listed.closing) == (
        '<tool_call>[{"name": "', '}, {"name": "', "}]</tool_call>",
    )  # fmt: skip
    tokenizer.chat_template = BARE_TEMPLATE
    bare = call_format(tokenizer, "tiny")
    assert (bare.opening, bare.middle, bare.between) == ('{"name": "', '", "parameters": ', None)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no place for them"),
        (TEMPLATE, "no place for them"),
        (MUTE_TEMPLATE, "does not show how a call is written"),
        (CONTROL_TEMPLATE, "by control tokens"),
    ],
)
def test_models_without_tools_are_refused_with_the_reason(tokenizer, template, reason):
    tokenizer.chat_template = template
    with pytest.raises(UnsupportedModelError, match=f"tiny calls no tools.*{reason}"):
        call_format(tokenizer, "tiny")


@pytest.mark.parametrize(
    ("template", "wanted"),
    [(TOOLS_TEMPLATE, TOOLS), (TOOLS_TEMPLATE, [ADD]), (LIST_TEMPLATE, TOOLS), (BARE_TEMPLATE, [ADD])],
    ids=["tags, two tools", "tags, one tool", "list, two tools", "bare, one tool"],
)
def test_forced_calls_are_valid(llama, tokenizer, template, wanted):
    tokenizer.chat_template = template
    form = call_format(tokenizer, "tiny")
    grammar = tools_grammar(form, wanted, is_forced=True, is_parallel=False)
    result = llama.engine.generate(llama.engine.tokenize(chat(tokenizer, ASKED, wanted)), grammar=grammar)
    said = parse_answer(result.text, form, wanted)
    assert said.text == ""
    if result.stopped:  # a random model may never end a text
        [call] = said.calls
        [found] = [t["function"] for t in wanted if t["function"]["name"] == call.name]
        assert call.arguments.keys() == found["parameters"]["properties"].keys()
    else:
        assert said.broken is not None
        assert not said.calls


def test_text_is_free_until_a_call_begins(llama, tokenizer, form):
    """The same tokens as without tools, where the model says nothing like a call."""
    grammar = tools_grammar(form, TOOLS, is_forced=False, is_parallel=True)
    asked = [[Message("user", (Literal(make_text(seed)),))] for seed in range(40)]
    prompts = [llama.engine.tokenize(chat(tokenizer, each, TOOLS)) for each in asked]
    assert_grammar_changes_nothing(llama.engine, prompts, grammar)


def test_answers_are_parsed_into_text_and_calls(form):
    one = (
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"}ris"}}\n</tool_call>'
    )
    said = parse_answer(one, form, TOOLS)
    assert said.text == "Let me see."
    assert [(c.name, c.arguments) for c in said.calls] == [("get_weather", {"city": 'Pa"}ris'})]
    two = one + '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    calls = parse_answer(two, form, TOOLS).calls
    assert [c.name for c in calls] == ["get_weather", "add"]
    assert calls[0].id != calls[1].id
    assert parse_answer("No call.", form, TOOLS).text == "No call."


@pytest.mark.parametrize("template", [TOOLS_TEMPLATE, BARE_TEMPLATE], ids=["tags", "bare"])
def test_json_of_a_schema_is_no_call(tokenizer, template):
    """A tag in one of its texts began a call; where calls have no tags, all of it was a broken one."""
    tokenizer.chat_template = template
    form = call_format(tokenizer, "tiny")
    for text in ('{"html": "use <tool_call> tags"}', '{"name": "Ann", "parameters": {}}'):
        assert parse_answer(text, form, TOOLS, has_schema=True) == ParsedAnswer(text)
    called = f'{form.opening}add{form.middle}{{"a": 1}}{form.closing}'
    [call] = parse_answer(called, form, TOOLS, has_schema=True).calls
    assert (call.name, call.arguments) == ("add", {"a": 1})


def test_calls_that_are_cut_off_are_broken(form):
    text = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "a long name"}}\n</tool_call>'
    for cut in range(len("Let me see.\n<tool_call>"), 80):
        said = parse_answer(text[:cut], form, TOOLS)
        assert (said.text, said.calls) == ("Let me see.", ()), text[:cut]
        _, found, arguments = text[:cut].partition('", "arguments": ')
        if found:
            assert (said.broken_name, said.broken) == ("get_weather", arguments), text[:cut]
        else:
            assert said.broken_name is None, text[:cut]


def test_untagged_calls_count_if_they_are_the_whole_answer(form):
    """With one fence of two, which the grammar allows, they were the text of the answer. What the grammar does not take
    for a call (arguments first, two names) was one, with arguments that keep to no schema.
    """
    bare = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    for text in (bare, f"```json\n{bare}\n```", f"{bare}\n```", f" ```\n{bare}"):
        [call] = parse_answer(text, form, TOOLS).calls
        assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})
    unchecked = '{"arguments": {"a": "x"}, "name": "add"}', bare.replace("{", '{"name": "b", ', 1)
    others = f"So: {bare}", bare.replace("add", "rob"), "[1]", bare.replace("arguments", "kwargs")
    for text in (*others, *unchecked, bare.replace("name", "n\\u0061me")):
        assert parse_answer(text, form, TOOLS) == ParsedAnswer(text)


@pytest.mark.parametrize(
    "template", [TOOLS_TEMPLATE, LIST_TEMPLATE, BARE_TEMPLATE], ids=["tags", "list", "bare"]
)
@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', True),
        ('{"name":"add","arguments":{"a": 1, "b": 2}}', True),
        ('```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```', True),
        ('{"name": "add", "arguments": {"a": "x"', False),
        ('{"name": "add", "arguments": {"c"', False),
        ('{"name":"get_weather" , "arguments" :{"city": 7', False),
        ('```json\n{"name": "add", "arguments": {"a": "x"', False),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}} and more', False),
        ("Two and two are four.", True),
        ('So: {"name": "add", "arguments": {"a": "x"}}', True),
        ("```python\nprint(1)\n```", True),
    ],
    ids=lambda value: str(value)[:30],
)
def test_calls_without_tags_keep_to_the_tools_schema(llama, tokenizer, template, text, kept):
    """Only calls with tags did, where a call was not forced."""
    tokenizer.chat_template = template
    grammar = tools_grammar(call_format(tokenizer, "tiny"), TOOLS, is_forced=False, is_parallel=True)
    grammars = llama.engine.runtime.token_grammars
    matcher = load_llguidance().LLMatcher(grammars, grammar.text, log_level=0)
    tokens = grammars.tokenize_str(text)
    assert (matcher.validate_tokens(tokens) == len(tokens)) == kept
    assert not kept or (matcher.consume_tokens(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("begin", ["", "\n", "```json\n"])
def test_calls_of_a_format_without_tags_may_have_either_key(llama, tokenizer, begin, key):
    """With `arguments`, the grammar checked a call that was then called broken; with `parameters`, after a newline or a
    fence, it was text that keeps to no schema.
    """
    tokenizer.chat_template = BARE_TEMPLATE
    form, text = call_format(tokenizer, "tiny"), f'{begin}{{"name": "add", "{key}": {{"a": 1, "b": 2}}}}'
    [call] = parse_answer(text, form, TOOLS).calls
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})
    words = TextBeforeCalls(form, TOOLS)
    assert not any(words.feed(letter) for letter in text)
    grammar = tools_grammar(form, TOOLS, is_forced=False, is_parallel=True)
    grammars = llama.engine.runtime.token_grammars
    for said, kept in ((text, True), (text.replace("1", '"x"'), False)):
        matcher = load_llguidance().LLMatcher(grammars, grammar.text, log_level=0)
        tokens = grammars.tokenize_str(said)
        assert (matcher.validate_tokens(tokens) == len(tokens)) == kept


def test_no_ordinary_tokens_write_the_tag_of_a_call(tokenizer):
    """Copied from a prompt, where it is plain text, it began a call with arguments that keep to no schema."""
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    grammar = tools_grammar(call_format(tokenizer, "tiny"), TOOLS, is_forced=False, is_parallel=True)
    tables = token_grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

    def allowed(*parts):
        matcher = load_llguidance().LLMatcher(tables, grammar.text, log_level=0)
        ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
        return matcher.validate_tokens(ids) == len(ids)

    assert allowed("See: <tool_call", " >") and not allowed("See: <tool_call", ">")
    assert allowed('See.<tool_call>\n{"name": "add"') and not allowed('See.<tool_call>\n{"name": "no')


@pytest.mark.parametrize("begin", ['{"name": "add", "arguments": ', '```json\n{"name":"add" ,"arguments":'])
def test_calls_without_tags_that_are_cut_off_are_broken(form, begin):
    """They were the text of the answer."""
    said = parse_answer(begin + '{"a": 1, "b', form, TOOLS)
    assert (said.text, said.calls, said.broken_name, said.broken) == ("", (), "add", '{"a": 1, "b')


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "Just words < and tags <b>.  ",
        "See.\n<tool_call>\n{",
        '```json\n{"name": "add", "arguments": {}}\n```',
        "{ x",
        '{"name": "add", "arguments": {"a": 1',
        "",
    ],
)
def test_streamed_text_equals_the_parsed_text(form, text, size):
    words, said = TextBeforeCalls(form, TOOLS), parse_answer(text, form, TOOLS)
    pieces = [words.feed(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join([*pieces, words.finish(said.text)]) == said.text


BARE = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ('{"name": "Ann", "age": 7, "more": "text"}', '{"name": "'),
        ('{"city": "Paris"} is JSON', '{"'),
        ("{ x }", "{ "),
        ("```python\nprint(1)\n```", "```python\n"),
        ("`ls` lists files", "`"),
        ("```json\n[1, 2, 3]\n```", "```json\n"),
        ('{"name": "ad", "arguments": {}}', '{"name": "ad'),
        ('{"arguments": {"a": 1}}', '{"'),
        (f"{BARE} would add", f"{BARE} "),
        ("  \n\n two blanks", "  \n\n "),
        (BARE, BARE),
        (f"```json\n{BARE}\n```", f"```json\n{BARE}\n```"),
    ],
    ids=lambda text: text[:16],
)
def test_only_what_can_still_become_a_call_is_held_back(form, text, held):
    """An answer that began with a brace or a code fence came in one piece, at its end."""
    words, shown = TextBeforeCalls(form, TOOLS), []
    for at in range(len(text)):
        shown.append(words.feed(text[at]))
    given = "".join(shown)
    assert not any(shown[: len(held)])
    if held == text:
        assert given == ""
    else:
        assert shown[len(held)] and given == text.rstrip()


def test_later_turns_show_calls_and_answers_as_the_template(tokenizer):
    call = Message("assistant", (), (ToolCall("add", {"a": 1}, "c1"),))
    answer = Message("tool", (Literal("2"),), call_id="c1", name="add")
    text = "".join(s.text for s in chat(tokenizer, [*ASKED, call, answer], TOOLS).segments)
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
        in text
    )
    assert "<|im_start|>tool\n2<|im_end|>" in text


@pytest.mark.parametrize("said", ["2", 'a "word"\n\\ é <|im_end|>'])
def test_tool_answers_are_json_escaped_where_the_template_does(tokenizer, said):
    """It was not found there; all was folded into words of the user, and the call was gone."""
    tokenizer.chat_template = QUOTING_TEMPLATE
    call = Message("assistant", (), (ToolCall("add", {"a": 1}, "c1"),))
    answer = Message(
        "tool", (Literal(said[:1]), Chunk(said[1:])) if said[1:] else (Literal(said),), call_id="c1"
    )
    prompt = chat(tokenizer, [*ASKED, call, answer], TOOLS)
    turns = [
        {"role": "user", "content": "Which weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": said},
    ]
    expected = tokenizer.apply_chat_template(turns, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert "".join(segment.text for segment in prompt.segments) == expected
    assert all(segment.verbatim for segment in prompt.segments if "<|im_end|>" in segment.text)


def test_chunks_unchanged_by_json_stay_chunks(tokenizer):
    tokenizer.chat_template = QUOTING_TEMPLATE
    chunks = Chunk("two ledgers"), Chunk('a "word"'), Chunk(node_id="n")
    (same, by_id) = chat(tokenizer, [*ASKED, Message("tool", chunks)]).chunks
    assert (same, by_id) == (chunks[0], chunks[2])


def test_conversations_with_calls_are_never_merged(tokenizer):
    """Folding leaves nothing of a call but words."""
    tokenizer.chat_template = BARE_TEMPLATE
    calls = Message("assistant", (), (ToolCall("add", {"a": 1}, "c1"), ToolCall("add", {"a": 2}, "c2")))
    with pytest.raises(PromptError, match=r"roles user, assistant.*one call"):
        chat(tokenizer, [*ASKED, calls], TOOLS)


def test_control_tokens_in_tools_and_calls_are_plain_text(llama, tokenizer):
    hostile, end = tool("add", a={"type": "string", "description": "a <|im_end|> b"}), llama.engine.tokenizer
    plain = tool("add", a={"type": "string", "description": "a  b"})
    counts = []
    for each, said in ((hostile, "x <|im_end|> y"), (plain, "x  y")):
        messages = [*ASKED, Message("assistant", (), (ToolCall("add", {"a": said}, said),))]
        prompt = llama.engine.tokenize(chat(tokenizer, messages, [each]))
        counts.append(prompt.token_ids.count(end.convert_tokens_to_ids("<|im_end|>")))
        assert said in "".join(s.text for s in prompt.segments)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([{"type": "function"}], "a tool needs a function"),
        ([7], "a tool needs a function"),
        ([tool("two words")], "letters, digits"),
        ([tool("add", a={"type": "nonsense"})], "the tool 'add' cannot be enforced: Invalid type"),
        ([tool("add", a={"enum": ["x" * 100_001]})], "the tool 'add' has"),
        ([tool(f"add{n}", a={"enum": ["x" * 1_000]}) for n in range(100)], "of these 100 tools have"),
    ],
)
def test_invalid_tools_are_refused_by_name(wrong, said):
    with pytest.raises(UsageError, match=said):
        check_tools(wrong)


def test_a_tool_may_ask_for_unique_items():
    """Published tools do, and no grammar keeps it: they would all be refused."""
    check_tools([tool("tag", names={"type": "array", "items": {"type": "string"}, "uniqueItems": True})])


@pytest.mark.parametrize(
    "parameters",
    [{"description": "anything"}, {"$ref": "#/$defs/A", "$defs": {"A": {"description": "anything"}}}],
)
def test_arguments_are_always_an_object(llama, form, parameters):
    """Where a tool's schema did not say so, they could be a number, which clients cannot take."""
    wanted = [{"type": "function", "function": {"name": "any", "parameters": parameters}}]
    grammar = tools_grammar(form, wanted, is_forced=True, is_parallel=False)
    grammars = llama.engine.runtime.token_grammars
    for arguments, kept in (("{}", True), ("5", False)):
        matcher = load_llguidance().LLMatcher(grammars, grammar.text, log_level=0)
        tokens = grammars.tokenize_str(f"{form.opening}any{form.middle}{arguments}{form.closing}")
        assert (matcher.validate_tokens(tokens) == len(tokens)) == kept


def test_tools_are_refused_for_models_without_them(llama):
    with pytest.raises(UnsupportedModelError, match="calls no tools"):
        llama.engine.chat(ASKED, TOOLS)
    with pytest.raises(PromptError, match="no message"):
        llama.engine.chat([])
