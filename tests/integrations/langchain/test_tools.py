"""Tools and structured output in LangChain: binding, calling, refusals, and calls that are cut off."""

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.exceptions import ModelInvalidRequestError, OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from ragblend.engine.decoding.grammar import json_grammar
from ragblend.integrations.langchain import ChatRAGBlend, RAGBlendLLM
from ragblend.integrations.langchain.messages import turns_of
from ragblend.integrations.langchain.tools import openai_tools
from ragblend.integrations.tools import AnswerFormat
from ragblend.kvstore.errors import UsageError

QUESTION = "Who keeps the tide table?"


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int = Field(description="in years")
    tags: list[str]


class Count(BaseModel):
    """A number."""

    value: int = Field(ge=10, le=99)


@tool
def double(value: int) -> int:
    """Twice the value."""
    return 2 * value


def ring() -> str:
    """Rings the bell."""
    return "It rings."


@pytest.fixture
def caller_llm(caller_options) -> ChatRAGBlend:
    return ChatRAGBlend(**caller_options, max_tokens=60)


# --- structured output


@pytest.mark.parametrize(
    ("schema", "limit"),
    [(Person, 40), (Person.model_json_schema(), 60), ({"properties": {"name": {"type": "string"}}}, 40)],
    ids=["class", "schema", "properties"],
)
def test_an_answer_follows_the_schema_and_is_parsed(tiny, schema, limit):
    found = tiny.with_structured_output(schema).invoke(QUESTION, max_tokens=limit)
    if schema is Person:
        assert isinstance(found, Person)
    else:
        assert set(found) <= set(schema["properties"])


async def test_structured_answers_are_the_engines_own_in_all_ways(tiny):
    tiny = tiny.model_copy(update={"max_tokens": 50})
    model = tiny.with_structured_output(Person, include_raw=True)
    raw = model.invoke(QUESTION)
    assert raw["parsing_error"] is None
    assert raw["parsed"] == Person.model_validate_json(raw["raw"].text)
    prompt = tiny.backend.chat_prompt(turns_of([HumanMessage(QUESTION)]))
    schema = json_grammar(Person.model_json_schema())
    own = tiny.backend.engine.generate(prompt, grammar=schema, max_new_tokens=50)
    assert own.text == raw["raw"].text
    assert (await model.ainvoke(QUESTION))["parsed"] == raw["parsed"]
    parsed = tiny.with_structured_output(Person)
    assert list(parsed.stream(QUESTION))[-1] == raw["parsed"]
    assert [chunk async for chunk in parsed.astream(QUESTION)][-1] == raw["parsed"]


def test_structured_output_by_a_tool_call(caller_llm):
    found = caller_llm.with_structured_output(Count, method="function_calling").invoke(QUESTION)
    assert isinstance(found, Count)
    cut = caller_llm.with_structured_output(Person, method="function_calling")
    with pytest.raises(OutputParserException):
        cut.invoke(QUESTION, max_tokens=20)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"schema": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"schema": 3}, "a schema is not valid"),
        ({"schema": None}, "needs a schema"),
        ({"schema": Person, "method": "by heart"}, "method must be"),
        ({"schema": Person, "metod": "json_mode"}, "knows no metod"),
        ({"schema": {"enum": ["x" * 100_001]}}, "at most 100,000"),
    ],
)
def test_an_invalid_schema_is_refused_when_it_is_given(tiny, arguments, said):
    with pytest.raises(ModelInvalidRequestError, match=said):
        tiny.with_structured_output(**arguments)


# --- tools


@pytest.mark.parametrize("choice", ["any", "double"])
async def test_a_forced_call_is_made_in_all_ways(caller_llm, choice):
    model = caller_llm.bind_tools([double], tool_choice=choice)
    said = model.invoke(QUESTION)
    [call] = said.tool_calls
    assert (said.text, call["name"], list(call["args"])) == ("", "double", ["value"])
    for other in (await model.ainvoke(QUESTION), merged(model.stream(QUESTION))):
        assert [(c["name"], c["args"]) for c in other.tool_calls] == [(call["name"], call["args"])]


FORCING = (
    "any", "required", "double", {"type": "function", "function": {"name": "double"}},
    {"type": "tool", "name": "double"}, {"type": "any"}, {"type": "required"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "tools", "is_forced"),
    [
        *((choice, 0, False) for choice in ("none", {"type": "none"})),
        *((choice, 1, False) for choice in (None, "auto", {"type": "auto"})),
        *((choice, 1, True) for choice in FORCING),
    ],
    ids=str,
)
def test_a_choice_says_whether_a_tool_is_called(choice, tools, is_forced):
    answer_format = AnswerFormat.of(openai_tools([double]), choice)
    assert (len(answer_format.tools), answer_format.is_forced) == (tools, is_forced)


def test_parallel_calls_are_made_where_they_are_allowed(caller_llm):
    model = caller_llm.bind_tools([ring], tool_choice="any", parallel_tool_calls=True)
    said = model.invoke(QUESTION, max_tokens=200)
    assert len(said.tool_calls) > 1
    assert len({call["id"] for call in said.tool_calls}) == len(said.tool_calls)


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_a_call_that_is_cut_off_is_invalid_and_not_made(caller_llm, way):
    """LangChain completes the JSON of streamed calls, which would call the tool with half of an argument."""
    model = caller_llm.bind_tools([Person], tool_choice="any")
    said = model.invoke(QUESTION) if way == "invoke" else merged(model.stream(QUESTION))
    assert said.tool_calls == []
    [broken] = said.invalid_tool_calls
    assert broken["name"] == "Person"
    assert '{"name": "' in broken["args"]
    assert said.response_metadata["finish_reason"] == "length"


def test_later_turns_show_calls_as_the_template_does(caller_llm):
    call = {"name": "double", "args": {"value": 4}, "id": "c1"}
    answered = [AIMessage("", tool_calls=[call]), ToolMessage("8", tool_call_id="c1")]
    prompt = caller_llm.backend.chat_prompt(turns_of([HumanMessage("Double 4"), *answered]))
    text = caller_llm.backend.engine.tokenizer.decode(prompt.token_ids)
    assert '<tool_call>\n{"name": "double", "arguments": {"value": 4}}\n</tool_call>' in text


def test_agents_end_with_an_answer_or_an_object(caller_llm):
    asked = {"messages": [HumanMessage(QUESTION)]}
    said = create_agent(caller_llm, tools=[double]).invoke(asked)["messages"]
    assert [message.type for message in said] == ["human", "ai"]
    for tools, response_format in (([], Count), ([double], ProviderStrategy(Count))):
        agent = create_agent(caller_llm, tools=tools, response_format=response_format)
        found = agent.invoke(asked, {"recursion_limit": 6})
        assert isinstance(found["structured_response"], Count)


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([7], None, "a tool is not valid"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "letters, digits"),
        ([{"name": "a", "parameters": {"properties": {"b": {"type": "x"}}}}], None, "'a' cannot be enforced"),
        ([{"name": "a", "parameters": {"type": "array"}}], None, "'a' must be an object, not 'array'"),
        ([double], "triple", "tool_choice names 'triple', which is no tool; the tools are: double"),
        ([double], {"mode": "required"}, "names neither a tool nor a type"),
        ([double], {"type": "function", "function": {}}, "names neither a tool nor a type"),
        ([double], {}, "names neither a tool nor a type"),
        ([], "any", "there are no tools"),
    ],
)
def test_an_invalid_tool_or_choice_is_refused_when_it_is_given(caller_llm, tools, choice, said):
    with pytest.raises(ModelInvalidRequestError, match=said):
        caller_llm.bind_tools(tools, tool_choice=choice)


# --- log-probabilities


def test_log_probabilities_have_the_form_of_openais_interface(tiny):
    said = tiny.invoke(QUESTION, max_tokens=3, logprobs=True, top_logprobs=2)
    content = said.response_metadata["logprobs"]["content"]
    assert len(content) == 3
    for each in content:
        assert set(each) == {"token", "logprob", "bytes", "top_logprobs"}
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0  # greedy
        assert len(each["top_logprobs"]) == 2
    streamed = merged(tiny.stream(QUESTION, max_tokens=3, logprobs=True, top_logprobs=2))
    assert streamed.response_metadata["logprobs"] == said.response_metadata["logprobs"]
    assert "logprobs" not in tiny.invoke(QUESTION, max_tokens=1, logprobs=False).response_metadata
    with pytest.raises(UsageError, match="from 0 to 20"):
        tiny.invoke(QUESTION, logprobs=True, top_logprobs=21)


def test_the_text_model_has_structured_output_and_log_probabilities(tiny_options):
    model = RAGBlendLLM(**tiny_options, max_tokens=40)
    assert isinstance(json.loads(model.invoke(QUESTION, response_format={"type": "json_object"})), dict)
    [[said]] = model.generate([QUESTION], logprobs=True).generations
    assert said.generation_info["logprobs"]["content"][0]["top_logprobs"] == []


def merged(chunks: Any) -> Any:
    first, *others = chunks
    return sum(others, first)
