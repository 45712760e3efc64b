"""Tools and structured prediction in LlamaIndex: calls, objects, refusals, and calls that are cut off."""

import pytest
from llama_helpers import story_nodes
from llama_index.core import SummaryIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel, Field, field_validator

from ragblend.integrations.llama_index import RAGBlendLLM
from ragblend.kvstore.errors import PromptError, UsageError

QUESTION = "Who keeps the tide table?"
# LlamaIndex's agents read all attributes of a pydantic model.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
PROMPT = PromptTemplate("Tell me of {what}.")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    tags: list[str]


class Age(BaseModel):
    """Of somebody."""

    years: int = -1


def double(value: int) -> int:
    """Twice the value."""
    return 2 * value


def note(text: str, author: str) -> str:
    """Writes it down."""
    return f"{author}: {text}"


TOOLS = [FunctionTool.from_defaults(double)]


@pytest.fixture
def caller_llm(place, caller_folder):
    where = place | {"model": str(caller_folder)}
    llm = RAGBlendLLM(**where, max_new_tokens=60)
    yield llm
    llm.backend.engine.close()
    llm.backend.registry.close()


def calls_in(llm, response):
    return [(call.tool_name, call.tool_kwargs) for call in llm.get_tool_calls_from_response(response)]


async def test_a_required_call_is_made_in_all_ways(caller_llm):
    assert isinstance(caller_llm, FunctionCallingLLM)
    assert caller_llm.metadata.is_function_calling_model
    asked = {"user_msg": QUESTION, "tool_required": True}
    response = caller_llm.chat_with_tools(TOOLS, **asked)
    [(name, arguments)] = calls = calls_in(caller_llm, response)
    assert (name, list(arguments), response.message.content) == ("double", ["value"], None)
    assert calls_in(caller_llm, await caller_llm.achat_with_tools(TOOLS, **asked)) == calls
    assert calls_in(caller_llm, list(caller_llm.stream_chat_with_tools(TOOLS, **asked))[-1]) == calls
    stream = await caller_llm.astream_chat_with_tools(TOOLS, **asked)
    assert calls_in(caller_llm, [response async for response in stream][-1]) == calls
    said = caller_llm.predict_and_call(TOOLS, user_msg=QUESTION, tool_required=True)
    assert said.sources[0].raw_output == 2 * arguments["value"]


def test_an_answer_without_a_required_call_is_an_error(caller_llm):
    said = caller_llm.chat_with_tools(TOOLS, user_msg=QUESTION, max_new_tokens=3)
    assert caller_llm.get_tool_calls_from_response(said, error_on_no_tool_call=False) == []
    with pytest.raises(UsageError, match="calls no tool: it reached max_new_tokens"):
        caller_llm.get_tool_calls_from_response(said)


def test_tools_are_refused_with_a_prompt_function_that_does_not_show_them(caller_llm):
    """The model did not see the tools, but was constrained to call one."""
    caller_llm.messages_to_prompt = lambda messages: "\n".join(str(message.content) for message in messages)
    assert not caller_llm.metadata.is_function_calling_model
    with pytest.raises(UsageError, match="messages_to_prompt"):
        caller_llm.chat_with_tools(TOOLS, user_msg=QUESTION, tool_required=True)
    assert caller_llm.chat([ChatMessage(QUESTION)], max_new_tokens=3).message.content


def test_later_turns_show_calls_as_the_template_does(caller_llm):
    call = ToolCallBlock(tool_call_id="c1", tool_name="double", tool_kwargs={"value": 4})
    history = [
        ChatMessage("Double 4"),
        ChatMessage(role=MessageRole.ASSISTANT, blocks=[call]),
        ChatMessage("8", role=MessageRole.TOOL, additional_kwargs={"tool_call_id": "c1"}),
    ]
    request = caller_llm._prepare_chat(history, {"tools": [t.metadata.to_openai_tool() for t in TOOLS]})
    text = caller_llm.backend.engine.tokenizer.decode(request.make_prompt().token_ids)
    assert '<tool_call>\n{"name": "double", "arguments": {"value": 4}}\n</tool_call>' in text
    assert '"name": "double", "description"' in text


async def test_a_program_with_a_tool_gives_its_object_in_all_ways(caller_llm):
    program = FunctionCallingProgram.from_defaults(
        Age, llm=caller_llm, prompt=PROMPT, tool_choice="any", allow_parallel_tool_calls=False
    )
    found = program(what="it")
    assert isinstance(found, Age)
    assert list(program.stream_call(what="it"))[-1].model_dump() == found.model_dump()
    stream = await program.astream_call(what="it")
    assert [each async for each in stream][-1].model_dump() == found.model_dump()


async def test_an_agent_calls_its_tool(caller_llm):
    agent = FunctionAgent(tools=TOOLS, llm=caller_llm, initial_tool_choice="double", streaming=True)
    said = await agent.run(user_msg=QUESTION, max_iterations=3)
    assert [(call.tool_name, list(call.tool_kwargs)) for call in said.tool_calls] == [("double", ["value"])]


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_call_that_is_cut_off_is_logged_and_not_made(caller_llm, caplog, streaming):
    """An agent ended with an empty answer, without a reason."""
    agent = FunctionAgent(tools=[note], llm=caller_llm, initial_tool_choice="note", streaming=streaming)
    said = await agent.run(user_msg=QUESTION, max_iterations=3)
    assert said.tool_calls == []
    [broken] = said.response.additional_kwargs["invalid_tool_calls"]
    assert (broken["name"], broken["arguments"][:9]) == ("note", '{"text": ')
    [record] = [each for each in caplog.records if each.name == "ragblend"]
    assert (
        "(60) ended the answer within a call of note, which is not made; allow more with max_tokens"
        in record.message
    )


async def test_structured_predict_gives_the_object_in_all_ways(make_llm):
    llm = make_llm(max_new_tokens=50)
    found = llm.structured_predict(Person, PROMPT, what="the harbour")
    assert isinstance(found, Person)
    assert await llm.astructured_predict(Person, PROMPT, what="the harbour") == found
    partly = list(llm.stream_structured_predict(Person, PROMPT, what="the harbour"))
    assert partly[-1] == found
    assert len(partly) > 5
    stream = await llm.astream_structured_predict(Person, PROMPT, what="the harbour")
    assert [each async for each in stream][-1] == found
    said = llm.as_structured_llm(Person).complete("Tell me of the harbour.")
    assert said.raw == found


class Raw(BaseModel):
    """Its JSON schema has a keyword that is not supported."""

    data: str = Field(json_schema_extra={"not": {"const": "x"}})


@pytest.mark.parametrize(
    ("output_cls", "limit", "why"), [(Raw, 50, "cannot be enforced"), (Person, 3, "that was found takes")]
)
async def test_an_unsupported_class_is_refused(make_llm, output_cls, limit, why):
    """Not by a ValueError, for which a query engine would say "Empty Response"."""
    llm = make_llm(max_new_tokens=limit)
    ways = [
        lambda: llm.structured_predict(output_cls, PROMPT, what="it"),
        lambda: list(llm.stream_structured_predict(output_cls, PROMPT, what="it")),
        lambda: llm.as_structured_llm(output_cls).complete("Tell me of it."),
    ]
    for mode in ("compact", "tree_summarize"):
        engine = SummaryIndex(story_nodes()).as_query_engine(
            llm=llm, output_cls=output_cls, response_mode=mode
        )
        ways.append(lambda engine=engine: engine.query(QUESTION))
    for ask in ways:
        with pytest.raises(PromptError, match=why):
            ask()
    with pytest.raises(PromptError, match=why):
        await llm.astructured_predict(output_cls, PROMPT, what="it")
    with pytest.raises(PromptError, match=why):
        [each async for each in await llm.astream_structured_predict(output_cls, PROMPT, what="it")]
    assert not issubclass(PromptError, ValueError)


def test_an_unsupported_class_is_refused_for_programs_with_tools(caller_llm):
    caller_llm.pydantic_program_mode = PydanticProgramMode.FUNCTION
    with pytest.raises(PromptError, match="cannot be enforced"):
        caller_llm.structured_predict(Raw, PROMPT, what="it")


def test_an_answer_that_is_no_object_of_the_class_is_a_value_error(make_llm):
    """So that `Refine` goes on with the next passage."""

    class Never(Person):
        @field_validator("name")
        @classmethod
        def none_is_right(cls, name: str) -> str:
            raise ValueError("no")

    with pytest.raises(ValueError, match="the answer is no valid Never"):
        make_llm(max_new_tokens=50).structured_predict(Never, PROMPT, what="it")


def test_log_probabilities_are_given_where_they_are_asked_for(llm):
    said = llm.complete(QUESTION, max_new_tokens=3, logprobs=True, top_logprobs=2)
    assert [len(token) for token in said.logprobs] == [2, 2, 2]
    assert all(each.logprob <= 0 for token in said.logprobs for each in token)
    chatted = llm.chat([ChatMessage(QUESTION)], max_new_tokens=3, logprobs=True)
    assert [len(token) for token in chatted.logprobs] == [1, 1, 1]
    last = list(llm.stream_chat([ChatMessage(QUESTION)], max_new_tokens=3, logprobs=True))[-1]
    assert last.logprobs == chatted.logprobs
    assert llm.complete(QUESTION).logprobs is None
