"""Several conversations at once: each answer reports its own documents, in whatever order streams are read."""

import asyncio
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
SHARED = Document("The parish council meets on the first Monday after the herring have come in.", id="shared")


def ledger(number: int, page: int) -> Document:
    text = f"Ledger {number}: {number * 7 + page} barrels went out by the tide."
    return Document(text, id=f"{number}/{page}")


# Two documents for each conversation, and one that all of them share.
LIBRARY = {str(number): [ledger(number, 0), ledger(number, 1), SHARED] for number in range(4)}


class Shelf(BaseRetriever):
    """Finds the documents of the conversation whose number is the question."""

    def _get_relevant_documents(self, query, *, run_manager):
        return LIBRARY[query]


def joined(inputs) -> str:
    return "\n\n".join(document.page_content for document in inputs["context"])


@pytest.fixture(params=["text", "blocks"])
def chain(request, tiny):
    """Documents named by their text, and by content blocks with ids."""
    encode_documents([d for documents in LIBRARY.values() for d in documents], tiny, show_progress=False)
    found = {"context": itemgetter("input") | Shelf(), "input": itemgetter("input")}
    if request.param == "blocks":
        return found | create_ragblend_stuff_documents_chain(tiny, PROMPT)
    return found | RunnablePassthrough.assign(context=joined) | PROMPT | tiny | StrOutputParser()


def reported(watchers: list[Watcher]) -> list[list[str]]:
    calls = [seen for watcher in watchers for seen in watcher.calls]
    assert [seen.kv["misses"] for seen in calls] == [0] * len(watchers)
    return [seen.kv["chunks"] for seen in calls]


def expected(number: str) -> list[str]:
    return [f"{number}/0", f"{number}/1", "shared"]


def watched(number: str, watcher: Watcher):
    return {"input": number}, {"callbacks": [watcher]}


def test_four_tasks_report_their_own_documents(chain):
    async def converse(number: str):
        watchers = [Watcher(), Watcher()]
        whole = await chain.ainvoke(*watched(number, watchers[0]))
        pieces = [piece async for piece in chain.astream(*watched(number, watchers[1]))]
        return watchers, whole, "".join(pieces)

    async def converse_all():
        return await asyncio.gather(*(converse(number) for number in LIBRARY))

    for number, (watchers, whole, streamed) in zip(LIBRARY, asyncio.run(converse_all()), strict=True):
        assert reported(watchers) == [expected(number)] * 2
        assert whole == streamed


def test_two_streams_that_are_read_in_reverse_order_report_their_own_documents(chain):
    """A context variable would give the second stream's documents to the first."""
    alone = [chain.invoke({"input": number}) for number in "01"]
    watchers = [Watcher(), Watcher()]
    first, second = (chain.stream(*watched(*each)) for each in zip("01", watchers, strict=True))
    begun = [next(first), next(second)]
    later, earlier = "".join(second), "".join(first)
    assert reported(watchers) == [expected("0"), expected("1")]
    assert [begun[0] + earlier, begun[1] + later] == alone
