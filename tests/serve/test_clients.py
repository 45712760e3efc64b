"""Unmodified third-party clients get whole and streamed answers, with passages from the store."""

import asyncio
import operator
import re
from functools import reduce

import httpx
import pytest
from servers import LEDGER, LIGHT, NUMBER

QUESTION = "Who kept the ledgers?"


def langchain(client, said):
    """Asks LangChain's model whole, streamed and awaited; said(message): its text."""

    async def awaited(text):
        return said(reduce(operator.add, [piece async for piece in client.astream(text)]))

    return (
        lambda text: said(client.invoke(text)),
        lambda text: said(reduce(operator.add, client.stream(text))),
        awaited,
    )


def llama_index(client, said, **options):
    """The same of LlamaIndex's model; options: of a stream."""
    from llama_index.core.llms import ChatMessage

    async def awaited(text):
        return said(await client.achat([ChatMessage(content=text)]))

    return (
        lambda text: said(client.chat([ChatMessage(content=text)])),
        lambda text: said(list(client.stream_chat([ChatMessage(content=text)], **options))[-1]),
        awaited,
    )


def langchain_openai(served, http, async_http):
    from langchain_openai import ChatOpenAI

    def said(message):
        assert message.usage_metadata["input_token_details"]["cache_read"] > 60
        return message.content

    https = {"http_client": http, "http_async_client": async_http, "stream_usage": True}
    model = ChatOpenAI(**served.openai, model=served.service.model, **https, max_tokens=6, temperature=0)
    return langchain(model, said)


def llama_index_openai(served, http, async_http):
    from llama_index.llms.openai_like import OpenAILike

    def said(response):
        assert response.raw.usage.prompt_tokens_details.cached_tokens > 60
        return response.message.content

    place = {"api_base": f"{served.url}/v1", "api_key": served.keys["ada"], "model": served.service.model}
    https = {"http_client": http, "async_http_client": async_http, "is_chat_model": True}
    client = OpenAILike(**place, **https, max_tokens=6, temperature=0)
    return llama_index(client, said, stream_options={"include_usage": True})


def chat_ollama(served, **options):
    from langchain_ollama import ChatOllama

    where = {"base_url": served.url, "client_kwargs": {"headers": served.ollama_headers}}
    return ChatOllama(model=served.service.model, validate_model_on_init=True, **where, **options)


def langchain_ollama(served, *_):
    def said(message):
        assert message.usage_metadata["output_tokens"] == 6
        assert message.response_metadata["done_reason"] == "length"
        return message.content

    return langchain(chat_ollama(served, num_predict=6, temperature=0), said)


def llama_index_ollama(served, *_):
    from llama_index.llms.ollama import Ollama

    told = {"temperature": 0, "additional_kwargs": {"num_predict": 6}}
    client = Ollama(model=served.service.model, base_url=served.url, headers=served.ollama_headers, **told)
    return llama_index(client, lambda response: response.message.content)


def reused_tokens(served):
    """Of all answers: those of Ollama's API do not say."""
    with served.client("owner-key") as client:
        text = client.get("/metrics").text
    return int(re.search(r'^ragblend_tokens_total{kind="reused"} (\d+)$', text, re.MULTILINE)[1])


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        (langchain_openai, "langchain_openai"),
        (llama_index_openai, "llama_index.llms.openai_like"),
        (langchain_ollama, "langchain_ollama"),
        (llama_index_ollama, "llama_index.llms.ollama"),
    ],
)
def test_framework_clients_get_answers_and_reuse_stored_passages(served, kind, package) -> None:
    pytest.importorskip(package, reason="the client's package is not installed")
    for at in range(2):  # what stands in two prompts is learnt
        served.chat("\n\n".join([f"{package}, {at}.", LEDGER, LIGHT, QUESTION]))
        served.engine.finish_background()
    before = reused_tokens(served)

    def prompt(number):
        """With a beginning of its own: what is reused of it are the passages."""
        return "\n\n".join([f"{number} by {package}.", LIGHT, LEDGER, QUESTION])

    async def asked(http):
        async with httpx.AsyncClient() as async_http:
            whole, streamed, awaited = kind(served, http, async_http)
            first = await asyncio.to_thread(whole, prompt(0))
            others = [await asyncio.to_thread(streamed, prompt(1)), await awaited(prompt(2))]
            return [first, *others, await asyncio.to_thread(streamed, prompt(0))]

    with httpx.Client() as http:
        answers = asyncio.run(asked(http))
    assert all(answers) and answers[0] == answers[-1]
    assert reused_tokens(served) - before > 4 * 60


def test_langchains_structured_output_and_embeddings_by_ollamas_api(served) -> None:
    pytest.importorskip("langchain_ollama", reason="the client's package is not installed")
    from langchain_ollama import OllamaEmbeddings

    schema = {"title": "number", **NUMBER}
    model = chat_ollama(served, num_predict=40).with_structured_output(schema)
    assert model.invoke("How many?").keys() == {"n"}
    where = {"base_url": served.url, "client_kwargs": {"headers": served.ollama_headers}}
    vectors = OllamaEmbeddings(model=served.service.models[1], **where).embed_documents(["a boat", "a quay"])
    assert [len(vector) for vector in vectors] == [384, 384]
