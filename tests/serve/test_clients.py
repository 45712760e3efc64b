"""Unmodified third-party clients get whole and streamed answers, with passages from the store."""

import asyncio

import httpx
import pytest
from servers import LEDGER, LIGHT

QUESTION = "Who kept the ledgers?"


class LangChain:
    def __init__(self, served, told, http, async_http):
        from langchain_openai import ChatOpenAI

        https = {"http_client": http, "http_async_client": async_http}
        self.client = ChatOpenAI(**told, **https, base_url=f"{served.url}/v1", stream_usage=True)

    def whole(self, text):
        return self._counted(self.client.invoke(text))

    def streamed(self, text):
        pieces = list(self.client.stream(text))
        return self._counted(sum(pieces[1:], pieces[0]))

    async def awaited(self, text):
        pieces = [piece async for piece in self.client.astream(text)]
        return self._counted(sum(pieces[1:], pieces[0]))

    def _counted(self, message):
        return str(message.content), message.usage_metadata["input_token_details"]["cache_read"]


class LlamaIndex:
    def __init__(self, served, told, http, async_http):
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike

        https = {"http_client": http, "async_http_client": async_http}
        self.client = OpenAILike(**told, **https, api_base=f"{served.url}/v1", is_chat_model=True)
        self.messages = lambda text: [ChatMessage(content=text)]

    def whole(self, text):
        return self._counted(self.client.chat(self.messages(text)))

    def streamed(self, text):
        *_, last = self.client.stream_chat(self.messages(text), stream_options={"include_usage": True})
        return self._counted(last)

    async def awaited(self, text):
        return self._counted(await self.client.achat(self.messages(text)))

    def _counted(self, response):
        return str(response.message.content), response.raw.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(
    ("kind", "package"), [(LangChain, "langchain_openai"), (LlamaIndex, "llama_index.llms.openai_like")]
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
