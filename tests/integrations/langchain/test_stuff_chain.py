"""create_ragblend_stuff_documents_chain: the stock chain's text, with documents named by id."""

import asyncio
import inspect

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda
from waiting import SOON_S

from ragblend.integrations.backend import placeholders
from ragblend.integrations.langchain import create_ragblend_stuff_documents_chain

stock = pytest.importorskip(
    "langchain_classic.chains.combine_documents", reason="langchain-classic is missing"
)
QUESTION = "Who rings the bell?"
PROMPT = ChatPromptTemplate.from_messages([("system", "From the notes:\n\n{context}"), ("human", "{input}")])


@pytest.fixture
def asked():
    """A stand-in for a model, and the messages it was asked."""
    kept = []

    def model(value):
        kept.append(value.to_messages())
        return "answer"

    return kept, RunnableLambda(model)


def ids(message) -> list[str]:
    return [block["id"] for block in message.content if "id" in block]


def test_the_signature_is_the_stock_chains():
    ours, theirs = (
        {name: (p.kind, p.default) for name, p in inspect.signature(function).parameters.items()}
        for function in (create_ragblend_stuff_documents_chain, stock.create_stuff_documents_chain)
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("separator", "template"),
    [("\n\n", "{page_content}"), ("\n---\n", "[{source}]\n{page_content}\n"), ("\n\n", "{source}")],
)
def test_the_text_is_the_stock_chains(asked, documents, separator, template):
    kept, model = asked
    options = {"document_separator": separator, "document_prompt": PromptTemplate.from_template(template)}
    for make in (create_ragblend_stuff_documents_chain, stock.create_stuff_documents_chain):
        chain = make(model, PROMPT, **options)
        assert chain.invoke({"context": documents, "input": QUESTION}) == "answer"
    ours, theirs = kept
    assert [message.text for message in ours] == [message.text for message in theirs]
    system, human = ours
    assert human.content == QUESTION
    if "page_content" in template:
        assert ids(system) == ["tides", "bell", "lamp"]
        named = {block["id"]: block["text"] for block in system.content if "id" in block}
        assert named == {document.id: document.page_content for document in documents}


@pytest.mark.parametrize(
    ("name", "prompt"), [("context", PROMPT), ("notes", PromptTemplate.from_template("{notes}\n\n{input}"))]
)
def test_unregistered_documents_reach_the_model_by_id(make_tiny, documents, watcher, name, prompt):
    model = make_tiny(register_retrieved=False)
    chain = create_ragblend_stuff_documents_chain(model, prompt, document_variable_name=name)
    asked, config = {name: documents, "input": QUESTION}, {"callbacks": [watcher]}
    chain.invoke(asked, config)
    assert model.backend.engine.finish_background(timeout_s=SOON_S)
    whole = asyncio.run(chain.ainvoke(asked, config))
    assert "".join(chain.stream(asked, config)) == whole != ""
    assert [seen.kv["chunks"] for seen in watcher.calls] == [["tides", "bell", "lamp"]] * 3
    assert [seen.kv["hits"] for seen in watcher.calls] == [0, 3, 3]


def test_history_missing_documents_missing_ids_and_text_like_a_placeholder(asked, documents):
    kept, model = asked
    hostile = placeholders(8)[7]
    prompt = ChatPromptTemplate.from_messages(
        [
            SystemMessage("be brief"),
            MessagesPlaceholder("history"),
            ("human", "{context}\n\n{input} {context}"),
        ]
    )
    chain = create_ragblend_stuff_documents_chain(model, prompt)
    chain.invoke({"context": documents[:1], "input": "?", "history": [HumanMessage("hello")]})
    chain.invoke({"context": [], "input": "?", "history": []})
    chain.invoke({"context": [Document(documents[0].page_content)], "input": hostile, "history": []})
    assert [message.text for message in kept[0][:2]] == ["be brief", "hello"]
    assert ids(kept[0][2]) == ["tides", "tides"]
    assert all(name.startswith("sha256-") for name in ids(kept[2][-1])) and len(ids(kept[2][-1])) == 2
    assert hostile in kept[2][-1].text
    assert kept[0][2].text == f"{documents[0].page_content}\n\n? {documents[0].page_content}"
    assert kept[1][-1].text == "\n\n? "


def test_a_prompt_without_the_documents_variable_is_refused(asked):
    with pytest.raises(ValueError, match="must accept context as an input variable"):
        create_ragblend_stuff_documents_chain(asked[1], PromptTemplate.from_template("{input}"))
