"""Answers constrained to a schema or grammar, and log-probabilities."""

import json
import sys
from itertools import cycle

import llguidance
import pytest
import torch
from benches import assert_grammar_changes_nothing, make_text
from jsonschema import Draft202012Validator
from tiny_models import reference_logits

from ragblend import Engine, Literal, Prompt
from ragblend.engine.decoding.grammar import Grammar, json_grammar
from ragblend.kvstore.errors import UsageError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 1000},
        "kind": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 1},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "age", "kind", "tags", "more"],
}
TEXT, NUMBER, WHOLE, TRUTH = {"type": "string"}, {"type": "number"}, {"type": "integer"}, {"type": "boolean"}


def check(said, schema):
    """Raises ValidationError unless it is JSON of the schema, formats included."""
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
        json.loads(said)
    )


def thing(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


def several(items, **limits):
    return {"type": "array", "items": items, **limits}


def choice(*values):
    return {"enum": list(values)}


NODE = thing(value=TEXT, children=several({"$ref": "#/$defs/node"}))
SCHEMAS = {
    "bounds of all kinds": PERSON,
    "numbers": several(NUMBER, minItems=3),
    "person": thing(name=TEXT, age=WHOLE, email=TEXT),
    "optional": {"type": "object", "properties": {"name": TEXT, "nickname": TEXT, "age": WHOLE}},
    "choice": thing(colour=choice("red", "green", "blue"), sure=TRUTH),
    "list of texts": thing(items=several(TEXT)),
    "list of things": thing(people=several(thing(name=TEXT, age=WHOLE), minItems=1, maxItems=3)),
    "nested": thing(place=thing(city=TEXT, at=thing(lat=NUMBER, lon=NUMBER)), open=TRUTH),
    "nullable": thing(name=TEXT, partner={"anyOf": [TEXT, {"type": "null"}]}),
    "either": {"anyOf": [thing(answer=TEXT), thing(error=TEXT, code=WHOLE)]},
    "bounds": thing(
        score={"type": "integer", "minimum": 1, "maximum": 10}, share={"type": "number", "minimum": 0}
    ),
    "short text": thing(title={"type": "string", "maxLength": 20}, body={"type": "string", "minLength": 5}),
    "date": thing(day={"type": "string", "format": "date"}, at={"type": "string", "format": "date-time"}),
    "pattern": thing(number={"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"}, code=TEXT),
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "map": {"type": "object", "additionalProperties": WHOLE},
    "pair": {"type": "array", "prefixItems": [TEXT, WHOLE], "minItems": 2, "items": False},
    "constant": thing(kind={"const": "fact"}, text=TEXT),
    "tagged": {"oneOf": [thing(kind={"const": "cat"}, lives=WHOLE), thing(kind={"const": "dog"}, name=TEXT)]},
    "any object": {"type": "object"},
    "bare list": several(choice("a", "b", "c"), minItems=2, maxItems=5),
    "many keys": thing(**{f"key_{number}": TRUTH for number in range(6)}),
}
PROMPT = Prompt([Literal(make_text(5))])


HARD = ("bounds of all kinds", "numbers", "tree", "any object")
HOT, LONGER = {"temperature": 2.0, "seed": 3}, {"max_new_tokens": 130}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in SCHEMAS), *zip(HARD, (HOT, LONGER, HOT, LONGER), strict=True)],
    ids=str,
)
def test_answers_follow_the_json_schema(llama, name, options):
    """Its answer would go on for ever: near the last token it is led to an end."""
    grammar = json_grammar(SCHEMAS[name])
    result = llama.engine.generate(PROMPT, grammar=grammar, **{"max_new_tokens": 90} | options)
    check(result.text, SCHEMAS[name])
    assert len(result.token_ids) <= 130


def test_a_forced_end_counts_as_out_of_tokens(llama):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    closed = llama.engine.generate(PROMPT, grammar=json_grammar(schema), max_new_tokens=20)
    assert list(json.loads(closed.text)) == ["a"]
    assert not closed.stopped
    whole = llama.engine.generate(PROMPT, grammar=json_grammar({"enum": ["yes", "no"]}), max_new_tokens=20)
    assert json.loads(whole.text) in ("yes", "no")
    assert whole.stopped


def test_too_small_max_new_tokens_is_refused_before_decoding(llama):
    with pytest.raises(UsageError, match=r"was found takes \d+ tokens, and max_new_tokens is 5"):
        llama.engine.generate(PROMPT, grammar=json_grammar(PERSON), max_new_tokens=5)


def test_a_permissive_grammar_does_not_change_the_answer(llama):
    grammar = Grammar("start: /(.|\\n)*/", is_closed=False)
    prompts = [Prompt([Literal(make_text(seed))]) for seed in range(20)]
    assert_grammar_changes_nothing(llama.engine, prompts, grammar)


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def in_itself():
    schema = {"type": "object", "properties": {}}
    schema["properties"]["a"] = schema
    return schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ([1, 2], "no JSON schema"),
        ({"type": "object", "properties": {"a": 5}}, "no JSON schema"),
        ({"$ref": "#/$defs/nobody"}, "does not exist"),
        ({"$ref": "https://example.org/schema"}, "cannot be enforced"),
        ({"const": {1, 2}}, "no JSON schema"),
        ({"enum": ["x" * 100_000]}, "at most 100,000"),
        (nested(100), "recursion limit"),
        (nested(sys.getrecursionlimit()), "without end"),
        (in_itself(), "without end"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "[Uu]nsatisfiable"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, r'\["uniqueItems"\]'),
        ({"not": {"type": "string"}}, r'Unimplemented keys: \["not"\]'),
        ({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, r'Unimplemented keys: \["if", "then"\]'),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf constraints are not supported"),
        ({"type": "string", "pattern": "^(?!x)a$"}, "regex parse error: look-around, including look-ahead"),
        ({"type": "string", "pattern": "[a"}, "regex parse error: unclosed character class"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_invalid_schemas_are_refused_when_passed(schema, said):
    with pytest.raises(UsageError, match=said):
        json_grammar(schema)


def test_items_that_need_not_differ_are_no_error():
    json_grammar({"type": "array", "items": {"type": "integer"}, "uniqueItems": False})


@pytest.mark.parametrize(
    ("format", "said", "is_allowed"),
    [
        ("time", "12:34:56Z", True),
        ("time", "12:34:56.123456+02:00", True),
        ("time", "12:34:56.1234567Z", False),
        ("time", "23:58:60Z", False),
        ("date", "2024-02-29", True),
        ("date", "2000-02-29", True),
        ("date", "1900-02-29", False),
        ("date", "2023-02-29", False),
        ("date", "2023-10-31", True),
        ("date", "2023-04-31", False),
        ("date-time", "2024-02-29T00:00:00-08:00", True),
        ("date-time", "2023-02-29T00:00:00Z", False),
        ("date-time", "2023-12-31T23:58:60.5Z", False),
    ],
)
def test_dates_exist_and_times_have_no_leap_second_and_at_most_six_digits_after_the_second(
    llama, format, said, is_allowed
):
    assert allows(llama, text(format=format), json.dumps(said)) is is_allowed


def allows(llama, schema, said):
    """Whether an answer of this schema can be `said`, in full."""
    matcher = llguidance.LLMatcher(llama.engine.runtime.token_grammars, json_grammar(schema).text)
    ids = llama.engine.tokenizer.encode(said, add_special_tokens=False)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("bounds", "allowed", "forbidden"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0.001", "0.5"), ("0", "0.0")),
        ({"exclusiveMinimum": 1.0, "exclusiveMaximum": 1.5}, ("1.001", "1.4"), ("1", "1.0", "1.5")),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ("-0.5", "-0.1"), ("0", "-0", "-0.0")),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ("0.1",), ("0",)),
        ({"exclusiveMinimum": 10**9, "maximum": 10**9 + 0.5}, ("1000000000.25",), ("1000000000",)),
        ({"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 2}, ("0", "1"), ("-1", "2", "0.5")),
    ],
    ids=str,
)
def test_an_excluded_bound_is_not_said(llama, bounds, allowed, forbidden):
    """llguidance allows a whole number that is excluded, if the other bound is less than one away."""
    schema = {"type": "number"} | bounds
    assert [allows(llama, schema, said) for said in (*allowed, *forbidden)] == [True] * len(allowed) + [
        False
    ] * len(forbidden)


A, B = ({"properties": {key: WHOLE}, "required": [key]} for key in "ab")
ONLY_B = thing(foo={"allOf": [{"$ref": "#/$defs/B"}], "description": "as pydantic once wrote it"}) | {
    "$defs": {"B": B}
}
TAGGED = [B | {"properties": {"kind": {"const": kind}}} for kind in ("x", "y")]


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (thing(kind=TEXT) | {"anyOf": [A, B]}, {"kind": "x", "b": 1}, {"kind": "x"}),
        ({"properties": {"kind": TEXT, "b": WHOLE}, "anyOf": TAGGED}, {"kind": "y", "b": 1}, {"kind": "z", "b": 1}),
        (A | {"allOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": B}}, {"a": 1, "b": 2}, {"a": 1}),
        (A | {"anyOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": B}}, {"a": 1, "b": 2}, {"a": 1}),
        ({"properties": {"a": WHOLE, "b": WHOLE}, "anyOf": [{"required": ["a"]}]}, {"a": 1}, {"a": 1, "c": 2}),
        ({"anyOf": [A, B]}, {"b": 1}, {"b": 1, "c": 2}),
        (ONLY_B, {"foo": {"b": 1}}, {"foo": {"b": 1, "c": 2}}),
    ],
    ids=["more keys", "a tag", "all of a definition", "any of a definition", "required", "no keys beside", "one part"],
)  # fmt: skip
def test_an_object_in_parts_may_have_the_keys_of_each(llama, schema, allowed, forbidden):
    """Each part was closed for the keys of the others, so that no object was possible."""
    assert allows(llama, schema, json.dumps(allowed)) and not allows(llama, schema, json.dumps(forbidden))


def with_keys(count, kind):
    return {"type": "object", "properties": {f"key_{n}": {"type": kind} for n in range(count)}}


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


def text(**limits):
    return {"type": "string", **limits}


FAR = {
    "email": thing(to=text(format="email"), cc=text(format="email")),
    "duration": thing(took=text(format="duration")),
    "byte": thing(data=text(format="byte")),
    "times": thing(begin=text(format="date-time"), end=text(format="date-time")),
    "addresses": thing(
        a=text(format="ipv4"), b=text(format="ipv6"), c=text(format="hostname"), d=text(format="uri")
    ),
    "uuid": thing(id=text(format="uuid")),
    "fixed tail": thing(code=text(pattern="^[A-Z]{2}-[0-9]+-x$")),
    "file name": thing(name=text(pattern=r"\.pdf$"), more=text(pattern=r"^[a-z]+\.tar\.(gz|xz)$")),
    "choice of runs": thing(a=text(pattern="^(foo|bar)[a-c]{3,5}qux$"), b=text(pattern=r"^[^@]+@[^@]+\.de$")),
    "digits": thing(a=text(pattern="^[0-9a-f]{40}$")),
    "long text": thing(a=text(minLength=100)),
    "numbers": thing(
        a={"type": "integer", "minimum": 1234}, b={"type": "number", "multipleOf": 0.5, "minimum": 2}
    ),
    "unknown formats": thing(a=text(format="password"), b={"type": "integer", "format": "int64"}),
}


@pytest.mark.parametrize(
    ("name", "options"), list(zip(FAR, cycle(({}, {"temperature": 3.0, "seed": 5})), strict=False)), ids=str
)
def test_values_that_cannot_end_at_once_are_led_to_an_end(llama, name, options):
    """Each was refused (no answer found that ends within 512 tokens), or ended without what the schema wants."""
    grammar = json_grammar(FAR[name])
    result = llama.engine.generate(PROMPT, grammar=grammar, max_new_tokens=150, **options)
    check(result.text, FAR[name])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 10**9},
        {"type": "string", "minLength": 600},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
    ],
    ids=["text", "long text", "list"],
)
def test_schemas_without_a_short_answer_end_at_the_limit(llama, schema):
    """As everywhere else: what was refused were also schemas whose end was not found."""
    result = llama.engine.generate(PROMPT, grammar=json_grammar(schema), max_new_tokens=30)
    assert len(result.token_ids) == 30 and not result.stopped


def test_a_long_text_is_whole_where_it_fits(llama):
    grammar = json_grammar(thing(a=text(minLength=600)))
    said = json.loads(llama.engine.generate(PROMPT, grammar=grammar, max_new_tokens=900).text)
    assert len(said["a"]) >= 600


EXPLODING = thing(a=text(pattern="^(((((a{10}){10}){10}){10}){10}){10}$"))


@pytest.mark.parametrize(
    "schema", [with_keys(600, "null"), ENDLESS, EXPLODING], ids=["wide", "endless", "exploding pattern"]
)
def test_schemas_that_are_too_much_for_the_compiler_are_refused(llama, schema):
    grammar = Grammar(json_grammar(schema).text, is_closed=False)
    with pytest.raises(UsageError, match="too complex for the grammar compiler"):
        llama.engine.generate(PROMPT, grammar=grammar, max_new_tokens=30)


def test_without_llguidance_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"pip install \S+\[structured\]"):
        json_grammar(PERSON)


def test_answers_have_only_keys_that_the_schema_names(llama):
    inner = {"type": "object", "properties": {"a": {"type": "null"}}}
    grammar = json_grammar({"properties": {"b": inner}, "required": ["b"]})
    for seed in range(4):
        said = json.loads(llama.engine.generate(PROMPT, grammar=grammar, temperature=3.0, seed=seed).text)
        assert said in ({"b": {}}, {"b": {"a": None}})


def test_logprobs_are_the_models_own(llama: "Engine"):
    result = llama.engine.generate(
        PROMPT, method="full", max_new_tokens=5, logprobs=2, temperature=1.5, seed=1, repetition_penalty=1.3
    )
    ids = [*result.prompt.token_ids, *result.token_ids]
    rows = reference_logits(llama.reference, ids)[len(result.prompt.token_ids) - 1 : -1].log_softmax(-1)
    for row, said, token in zip(rows, result.logprobs, result.token_ids, strict=True):
        assert said.token_id == token
        assert said.logprob == pytest.approx(float(row[token]), abs=1e-3)
        best = torch.topk(row, 2)
        assert [i for i, _ in said.most_likely] == best.indices.tolist()
        assert [p for _, p in said.most_likely] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_logprobs_only_on_request_and_without_the_end_token(llama):
    assert llama.engine.generate(PROMPT, max_new_tokens=2).logprobs is None
    yes = llama.engine.generate(PROMPT, grammar=Grammar('start: "yes"'), logprobs=0)
    assert [each.most_likely for each in yes.logprobs] == [()] * (len(yes.token_ids) - 1)
    with pytest.raises(UsageError, match="logprobs must be from 0 to 20"):
        llama.engine.generate(PROMPT, logprobs=21)
