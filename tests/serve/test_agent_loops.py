"""Agent frameworks' tool loops, as their documentation has them, over a model that calls a tool, then answers."""

import asyncio
import gc
import os

import pytest
import torch
from servers import events

from ragblend.engine.decoding import loop

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is downloaded at the import
os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other programs
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED, FOUND, ANSWER = "How is the weather in Paris?", "18 degrees, and rain", "It rains in Paris."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA},
}


class Script:
    """A logits processor that makes the model say what `answer_to` gives for its prompt, within a grammar."""

    def __init__(self, tokenizer, answer_to, prompt_tokens):
        self._tokenizer, self._answer_to = tokenizer, answer_to
        self._prompt_tokens, self._ids = prompt_tokens, None

    def __call__(self, input_ids, scores):
        if self._ids is None:
            prompt = self._tokenizer.decode(input_ids[0, : self._prompt_tokens])
            said = self._tokenizer.encode(self._answer_to(prompt), add_special_tokens=False)
            self._ids = [*said, self._tokenizer.eos_token_id]
        return scores + 1e4 * torch.nn.functional.one_hot(
            torch.tensor([self._ids[input_ids.shape[1] - self._prompt_tokens]]), scores.shape[1]
        )


@pytest.fixture(scope="module")
def left_open():
    """Connections that some clients do not close: no fault of the tests after these."""
    yield
    gc.collect()


@pytest.fixture
def scripted(caller, monkeypatch, left_open):
    """scripted(answer_to): the server, whose model says that."""
    made = loop.logits_processors

    def begin(answer_to):
        def processors(options, prompt_tokens, *more):
            found = made(options, prompt_tokens, *more)
            found.insert(0, Script(caller.engine.tokenizer, answer_to, prompt_tokens))
            return found

        monkeypatch.setattr(loop, "logits_processors", processors)
        return caller

    return begin


def weather(prompt):
    """The call, and once the prompt has what the tool found, the answer."""
    return ANSWER if FOUND in prompt else CALL


def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return FOUND


def openai_chat(served):
    """Source: platform.openai.com/docs/guides/function-calling."""
    from openai import OpenAI

    client, messages = OpenAI(**served.openai), [{"role": "user", "content": ASKED}]
    while True:
        answer = client.chat.completions.create(model="", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather("Paris")})


def openai_responses(served):
    """Source: platform.openai.com/docs/guides/function-calling, with items."""
    from openai import OpenAI

    client, items = OpenAI(**served.openai), [{"role": "user", "content": ASKED}]
    tools = [{"type": "function", **TOOL["function"], "strict": False}]
    while True:
        answer = client.responses.create(model="", input=items, tools=tools)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": FOUND} for call in calls
        ]


def litellm(served):
    """Source: docs.litellm.ai/docs/completion/function_call."""
    import litellm

    messages = [{"role": "user", "content": ASKED}]
    place = {"api_base": f"{served.url}/v1", "api_key": served.keys["ada"]}
    place["model"] = f"openai/{served.service.model}"
    while True:
        answer = litellm.completion(**place, messages=messages, tools=[TOOL], tool_choice="auto")
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            found = {"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": FOUND}
            messages.append(found)


def langchain(model):
    """Source: docs.langchain.com/oss/python/langchain/agents."""
    from langchain.agents import create_agent

    agent = create_agent(model, tools=[get_weather])
    return agent.invoke({"messages": [{"role": "user", "content": ASKED}]})["messages"][-1].content


def langchain_openai(served):
    from langchain_openai import ChatOpenAI

    return langchain(ChatOpenAI(**served.openai, model=served.service.model))


def langchain_ollama(served):
    from langchain_ollama import ChatOllama

    key = {"headers": served.ollama_headers}
    return langchain(ChatOllama(model=served.service.model, base_url=served.url, client_kwargs=key))


def llama_index(llm, agent="FunctionAgent", **options):
    """Source: developers.llamaindex.ai, "Building an agent"; it streams unless it is told otherwise."""
    from llama_index.core.agent import workflow

    async def run():
        return await getattr(workflow, agent)(tools=[get_weather], llm=llm, **options).run(ASKED)

    return str(asyncio.run(run()))


def openai_like(served, **options):
    from llama_index.llms.openai_like import OpenAILike

    place = {"api_base": f"{served.url}/v1", "api_key": served.keys["ada"], "model": served.service.model}
    return OpenAILike(**place, is_chat_model=True, **options)


def llama_index_openai(served):
    return llama_index(openai_like(served, is_function_calling_model=True))


def llama_index_ollama(served):
    from llama_index.llms.ollama import Ollama

    return llama_index(Ollama(model=served.service.model, base_url=served.url, headers=served.ollama_headers))


def pydantic_ai(served):
    """Source: ai.pydantic.dev/tools."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(served.service.model, provider=OpenAIProvider(**served.openai))
    return Agent(model, tools=[get_weather]).run_sync(ASKED).output


def agents_of(served, model_class):
    from agents import Agent, Runner, function_tool
    from openai import AsyncOpenAI

    model = model_class(model=served.service.model, openai_client=AsyncOpenAI(**served.openai))
    agent = Agent(name="Weather", instructions="Be brief.", model=model, tools=[function_tool(get_weather)])
    return Runner.run_sync(agent, ASKED).final_output


def openai_agents(served):
    """Source: openai.github.io/openai-agents-python/models."""
    from agents import OpenAIChatCompletionsModel

    return agents_of(served, OpenAIChatCompletionsModel)


def openai_agents_responses(served):
    from agents import OpenAIResponsesModel

    return agents_of(served, OpenAIResponsesModel)


@pytest.mark.parametrize(
    ("run", "package"),
    [
        (openai_chat, "openai"),
        (openai_responses, "openai"),
        (litellm, "litellm"),
        (langchain_openai, "langchain_openai"),
        (langchain_ollama, "langchain_ollama"),
        (llama_index_openai, "llama_index.llms.openai_like"),
        (llama_index_ollama, "llama_index.llms.ollama"),
        (pydantic_ai, "pydantic_ai"),
        (openai_agents, "agents"),
        (openai_agents_responses, "agents"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_frameworks_tool_loop_ends_with_the_answer(scripted, run, package) -> None:
    pytest.importorskip(package, reason="the client's package is not installed")
    assert run(scripted(weather)) == ANSWER


@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
def test_a_react_agent_reads_its_calls_from_the_text(scripted, streaming) -> None:
    """Source: developers.llamaindex.ai, "ReAct agent". Its first answer here is none of its forms: it asks again."""
    pytest.importorskip("llama_index.llms.openai_like", reason="the client's package is not installed")

    def answer_to(prompt):
        if FOUND in prompt:
            return f"Thought: I know it.\nAnswer: {ANSWER}"
        if "Error while parsing the output" not in prompt:
            return 'Thought: I ask.\nAction: get_weather("Paris")'
        return 'Thought: I ask.\nAction: get_weather\nAction Input: {"city": "Paris"}'

    llm = openai_like(scripted(answer_to), context_window=4096, max_tokens=100)
    assert llama_index(llm, "ReActAgent", streaming=streaming) == ANSWER


def test_instructor_asks_again_until_the_arguments_are_valid(scripted) -> None:
    """Source: python.useinstructor.com/concepts/retrying."""
    instructor = pytest.importorskip("instructor", reason="the client's package is not installed")
    from openai import OpenAI
    from pydantic import BaseModel, field_validator

    class Town(BaseModel):
        """A town."""

        inhabitants: int

        @field_validator("inhabitants")
        @classmethod
        def _check(cls, value):  # which no schema says
            if value < 1000:
                raise ValueError("a town has a thousand at least")
            return value

    def answer_to(prompt):
        many = 2000 if "a town has a thousand at least" in prompt else 7
        return f'<tool_call>\n{{"name": "Town", "arguments": {{"inhabitants": {many}}}}}\n</tool_call>'

    served = scripted(answer_to)
    client = instructor.from_openai(OpenAI(**served.openai), mode=instructor.Mode.TOOLS)
    asked = [{"role": "user", "content": "How many live in the town?"}]
    found = client.chat.completions.create(
        model=served.service.model, response_model=Town, messages=asked, max_retries=3
    )
    assert found.inhabitants == 2000


ENDS = [
    f"<|{name}|>" for name in ("endoftext", "fim_prefix", "fim_suffix", "fim_middle", "fim_pad", "im_end")
]
ENDS += ["<|repo_name|>", "<|file_sep|>", "<|im_start|>", "/src/", "#- coding: utf-8", "```", "t.", "\nt"]
EDIT = "This is the code to rewrite:\n```python\na - b\n```\n\nThe user's request is: add them"
READ = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CALLED = {"role": "assistant", "content": " ", "tool_calls": [READ]}
RESULT = {"role": "tool", "content": FOUND, "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (
            "chat/completions",
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}],
        ),
        ("chat/completions", [{"role": "user", "content": ASKED}, CALLED, RESULT]),
        ("completions", "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n<|fim_middle|>"),
        ("completions", EDIT),
        ("chat/completions", [{"role": "user", "content": EDIT}, {"role": "assistant", "content": "```\n"}]),
    ],
    ids=["chat", "agent", "autocomplete", "edit", "apply"],
)
def test_the_requests_of_continue_end(caller, path, asked) -> None:
    """Source: github.com/continuedev/continue, core/llm and core/edit: an editor's extension, so only its bodies."""
    body = {"model": caller.service.model, "max_tokens": 12, "temperature": 0.01, "stream": True}
    if path == "completions":
        body |= {"prompt": asked, "stop": ENDS}
    else:
        body |= {"messages": asked, "stream_options": {"include_usage": True}}
        body |= {"tools": [TOOL], "parallel_tool_calls": False} if RESULT in asked else {}
    with caller.client() as client:
        answer = client.post(f"/v1/{path}", json=body, headers={"api-key": "none", "x-api-key": "none"})
    assert answer.status_code == 200, answer.text
    pieces = events(answer)
    reasons = [each["finish_reason"] for piece in pieces for each in piece["choices"]]
    assert reasons[-1] in ("stop", "length", "tool_calls") and not any(reasons[:-1])
    assert 0 < pieces[-1]["usage"]["completion_tokens"] <= 12
