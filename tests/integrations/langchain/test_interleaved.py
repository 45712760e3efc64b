"""Several conversations at once: each answer's report names its own documents, in whatever order streams are read."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from watching import Watcher

from ragblend.integrations.langchain import create_ragblend_stuff_documents_chain, encode_documents

PROMPT = ChatPromptTemplate.from_messages([("system", "{context}"), ("human", "{input}")])
CONVERSATIONS = 4


@pytest.fixture(scope="module")
def library() -> dict[str, list[Document]]:
    """Two documents for each conversation, and one that all of them share."""
    shared = Document(
        "The parish council meets on the first Monday after the herring have come in.", id="shared"
    )
    return {
        str(number): [
            *(
                Document(
                    f"Ledger {number}: {number * 7 + page} barrels went out by the tide.",
                    id=f"{number}/{page}",
                )
                for page in range(2)
            ),
            shared,
        ]
        for number in range(CONVERSATIONS)
    }


class Shelf(BaseRetriever):
    """Finds the documents of the conversation whose number is the question."""

    library: dict[str, list[Document]]

    def _get_relevant_documents(self, query, *, run_manager):
        return self.library[query]


def text_of(documents) -> str:
    return "\n\n".join(document.page_content for document in documents)


@pytest.fixture(params=["text", "blocks"])
def chain(request, tiny, library):
    """Documents by their text, and by content blocks with ids."""
    encode_documents([d for documents in library.values() for d in documents], tiny, show_progress=False)
    found = {"context": itemgetter("input") | Shelf(library=library), "input": itemgetter("input")}
    if request.param == "blocks":
        return found | create_ragblend_stuff_documents_chain(tiny, PROMPT)
    return found | RunnablePassthrough.assign(context=joined) | PROMPT | tiny | StrOutputParser()


def joined(inputs) -> str:
    return "\n\n".join(document.page_content for document in inputs["context"])


def reported(watcher: Watcher) -> list[str]:
    [seen] = watcher.calls
    assert seen.kv["misses"] == 0
    return seen.kv["chunks"]


def expected(number: str) -> list[str]:
    return [f"{number}/0", f"{number}/1", "shared"]


def test_four_threads(chain, library):
    start = threading.Barrier(CONVERSATIONS)

    def converse(number: str):
        watchers = [Watcher(), Watcher()]
        start.wait()
        whole = chain.invoke({"input": number}, {"callbacks": [watchers[0]]})
        pieces = list(chain.stream({"input": number}, {"callbacks": [watchers[1]]}))
        return [reported(watcher) for watcher in watchers], whole, "".join(pieces)

    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        for number, (reports, whole, streamed) in zip(library, pool.map(converse, library), strict=True):
            assert reports == [expected(number)] * 2
            assert whole == streamed


def test_four_tasks(chain, library):
    async def converse(number: str):
        watchers = [Watcher(), Watcher()]
        whole = await chain.ainvoke({"input": number}, {"callbacks": [watchers[0]]})
        stream = chain.astream({"input": number}, {"callbacks": [watchers[1]]})
        pieces = [piece async for piece in stream]
        return [reported(watcher) for watcher in watchers], whole, "".join(pieces)

    async def converse_all():
        return await asyncio.gather(*(converse(number) for number in library))

    for number, (reports, whole, streamed) in zip(library, asyncio.run(converse_all()), strict=True):
        assert reports == [expected(number)] * 2
        assert whole == streamed


def test_sixteen_streams_at_once_whatever_the_default_pool_is_busy_with(tiny, library):
    """With one thread of the loop's pool for all of them, one that waited for the device kept the others from it."""
    encode_documents([d for documents in library.values() for d in documents], tiny, show_progress=False)
    numbers = [*library] * 4

    async def read(number: str):
        chunks = [chunk async for chunk in tiny.astream(text_of(library[number]))]
        return chunks[-1].response_metadata["kv"]["chunks"], "".join(chunk.text for chunk in chunks)

    async def read_all():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        queue = tiny.backend().engine.runtime.queue
        with queue.turn():
            tasks = [asyncio.create_task(read(number)) for number in numbers]
            while len(queue._waiting) <= len(numbers):
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(asyncio.wait_for(read_all(), 60))
    assert [chunks for chunks, _ in answers] == [expected(number) for number in numbers]
    assert len({(*chunks, text) for chunks, text in answers}) == len(library)


def test_two_streams_read_in_the_other_order(chain):
    """What hands ids over in a context variable gives the second stream's documents to the first."""
    alone = [chain.invoke({"input": number}) for number in "01"]
    watchers = [Watcher(), Watcher()]
    first, second = (
        chain.stream({"input": number}, {"callbacks": [watcher]})
        for number, watcher in zip("01", watchers, strict=True)
    )
    begun = [next(first), next(second)]
    later, earlier = "".join(second), "".join(first)
    assert [reported(watcher) for watcher in watchers] == [expected("0"), expected("1")]
    assert [begun[0] + earlier, begun[1] + later] == alone


def test_two_async_streams_read_in_the_other_order(chain):
    watchers = [Watcher(), Watcher()]

    async def streams():
        first, second = (
            chain.astream({"input": number}, {"callbacks": [watcher]})
            for number, watcher in zip("01", watchers, strict=True)
        )
        assert await anext(first) is not None
        assert await anext(second) is not None
        return "".join([piece async for piece in second]), "".join([piece async for piece in first])

    assert all(asyncio.run(streams()))
    assert [reported(watcher) for watcher in watchers] == [expected("0"), expected("1")]
