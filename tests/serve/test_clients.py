"""Unmodified third-party clients get whole and streamed answers, with passages from the store."""

import asyncio
import re

import httpx
import pytest
from servers import LEDGER, LIGHT, eager_to_call

QUESTION = "Who kept the ledgers?"


class LangChainClient:
    """client: LangChain's model, each of whose answers is given as its text and the number of reused tokens."""

    def whole(self, text):
        return self._counted(self.client.invoke(text))

    def streamed(self, text):
        pieces = list(self.client.stream(text))
        return self._counted(sum(pieces[1:], pieces[0]))

    async def awaited(self, text):
        return self._counted(await self.client.ainvoke(text))


class LlamaIndexClient:
    """The same of LlamaIndex's model."""

    def messages(self, text):
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(content=text)]

    def whole(self, text):
        return self._counted(self.client.chat(self.messages(text)))

    def streamed(self, text, **options):
        *_, last = self.client.stream_chat(self.messages(text), **options)
        return self._counted(last)

    async def awaited(self, text):
        return self._counted(await self.client.achat(self.messages(text)))


class LangChainOpenAI(LangChainClient):
    def __init__(self, served, told, http, async_http):
        from langchain_openai import ChatOpenAI

        https = {"http_client": http, "http_async_client": async_http}
        self.client = ChatOpenAI(**told, **https, base_url=f"{served.url}/v1", stream_usage=True)

    async def awaited(self, text):
        pieces = [piece async for piece in self.client.astream(text)]
        return self._counted(sum(pieces[1:], pieces[0]))

    def _counted(self, message):
        return str(message.content), message.usage_metadata["input_token_details"]["cache_read"]


class LlamaIndexOpenAI(LlamaIndexClient):
    def __init__(self, served, told, http, async_http):
        from llama_index.llms.openai_like import OpenAILike

        https = {"http_client": http, "async_http_client": async_http}
        self.client = OpenAILike(**told, **https, api_base=f"{served.url}/v1", is_chat_model=True)

    def streamed(self, text):
        return super().streamed(text, stream_options={"include_usage": True})

    def _counted(self, response):
        return str(response.message.content), response.raw.usage.prompt_tokens_details.cached_tokens


class ReusedTokens:
    """The reused tokens of each answer by the server's metrics: those of Ollama's API do not say."""

    def __init__(self, served):
        self.served = served
        self.count_before = self.count()

    def count(self):
        with self.served.client("owner-key") as client:
            text = client.get("/metrics").text
        return int(re.search(r'^ragblend_tokens_total{kind="reused"} (\d+)$', text, re.MULTILINE)[1])

    def reused(self):
        before, self.count_before = self.count_before, self.count()
        return self.count_before - before


class LangChainOllama(LangChainClient, ReusedTokens):
    def __init__(self, served, told, http, async_http):
        super().__init__(served)
        self.client = langchain_ollama(served, num_predict=told["max_tokens"], temperature=0)

    def _counted(self, message):
        assert message.usage_metadata["output_tokens"] == 6
        assert message.response_metadata["done_reason"] == "length"
        return str(message.content), self.reused()


class LlamaIndexOllama(LlamaIndexClient, ReusedTokens):
    def __init__(self, served, told, http, async_http):
        super().__init__(served)
        self.client = llama_index_ollama(served, temperature=0, additional_kwargs={"num_predict": 6})

    def _counted(self, response):
        return str(response.message.content), self.reused()


def key_of(served):
    """The key, as arguments of Ollama's client. Nobody closes the frameworks' clients, so connections are not kept."""
    return {"headers": {"authorization": f"Bearer {served.keys['ada']}", "connection": "close"}}


def langchain_ollama(served, **options):
    from langchain_ollama import ChatOllama

    where = {"base_url": served.url, "client_kwargs": key_of(served)}
    return ChatOllama(model=served.service.model, validate_model_on_init=True, **where, **options)


def llama_index_ollama(served, **options):
    from llama_index.llms.ollama import Ollama

    return Ollama(model=served.service.model, base_url=served.url, **key_of(served), **options)


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        (LangChainOpenAI, "langchain_openai"),
        (LlamaIndexOpenAI, "llama_index.llms.openai_like"),
        (LangChainOllama, "langchain_ollama"),
        (LlamaIndexOllama, "llama_index.llms.ollama"),
    ],
)
def test_framework_clients_get_answers_and_reuse_stored_passages(served, kind, package) -> None:
    pytest.importorskip(package, reason="the client's package is not installed")
    told = {"model": served.service.model, "api_key": served.keys["ada"], "max_tokens": 6, "temperature": 0}
    for at in range(2):  # what stands in two prompts is learnt
        served.chat("\n\n".join([f"{package}, {at}.", LEDGER, LIGHT, QUESTION]))
        served.engine.finish_background()

    def prompt(number):
        """With a beginning of its own: what is reused of it are the passages."""
        return "\n\n".join([f"{number} by {package}.", LIGHT, LEDGER, QUESTION])

    async def asked(http):
        async with httpx.AsyncClient() as async_http:
            client = kind(served, told, http, async_http)
            whole = await asyncio.to_thread(client.whole, prompt(0))
            streamed = await asyncio.to_thread(client.streamed, prompt(1))
            again = await asyncio.to_thread(client.streamed, prompt(0))
            return [whole, streamed, await client.awaited(prompt(2)), again]

    with httpx.Client() as http:
        answers = asyncio.run(asked(http))
    assert all(text and cached > 60 for text, cached in answers)
    assert answers[0][0] == answers[-1][0]


def hoist(up: bool) -> str:
    """Hoist a flag."""
    return "It is up." if up else "It is down."


def langchain_loop(served):
    pytest.importorskip("langchain_ollama", reason="the client's package is not installed")
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    model, [tool] = langchain_ollama(served, num_predict=60), [tool(hoist)]
    messages = [HumanMessage("Hoist it.")]
    with eager_to_call():
        messages.append(model.bind_tools([tool]).invoke(messages))
    messages += [tool.invoke(call) for call in messages[-1].tool_calls]
    return [message.content for message in messages[2:]], model.invoke(messages).content


def llama_index_loop(served):
    pytest.importorskip("llama_index.llms.ollama", reason="the client's package is not installed")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    model, tool = (
        llama_index_ollama(served, additional_kwargs={"num_predict": 60}),
        FunctionTool.from_defaults(hoist),
    )
    messages = [ChatMessage(content="Hoist it.")]
    with eager_to_call():
        said = model.chat_with_tools([tool], chat_history=messages)
    calls = model.get_tool_calls_from_response(said)
    results = [str(tool(**call.tool_kwargs)) for call in calls]
    messages += [said.message, *(ChatMessage(role="tool", content=result) for result in results)]
    return results, model.chat(messages).message.content


@pytest.mark.parametrize("loop", [langchain_loop, llama_index_loop])
def test_the_tools_of_framework_clients_run_by_ollamas_api(caller, loop) -> None:
    results, answer = loop(caller)
    assert results in (["It is up."], ["It is down."]) and answer


def test_langchains_structured_output_and_embeddings_by_ollamas_api(served) -> None:
    pytest.importorskip("langchain_ollama", reason="the client's package is not installed")
    from langchain_ollama import OllamaEmbeddings

    schema = {
        "title": "number",
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
    }
    model = langchain_ollama(served, num_predict=40).with_structured_output(schema)
    assert model.invoke("How many?").keys() == {"n"}
    where = {"base_url": served.url, "client_kwargs": key_of(served)}
    vectors = OllamaEmbeddings(model=served.service.models[1], **where).embed_documents(["a boat", "a quay"])
    assert [len(vector) for vector in vectors] == [384, 384]
