"""Passages that no retriever announces: they reach the model as text alone, and are known when they come back.

The calls, in their order, of LangChain's RAG tutorial (langchain-ai/docs, src/oss/langchain/rag.mdx) in its forms.
"""

from typing import Any, TypedDict

import pytest

pytest.importorskip("langchain", reason="langchain (the dev extra) is not installed")
pytest.importorskip("langgraph", reason="langchain (the dev extra) is not installed")

from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, StateGraph

from ragblend.integrations.langchain import RAGBlendLLM

QUESTIONS = ("What is the ringer paid in?", "Who keeps the tide table?", "What does the lamp burn?")
PROMPT = ChatPromptTemplate.from_messages(
    [("human", "Answer from these notes alone.\nNotes:\n{context}\nQuestion: {question}\nAnswer:")]
)


class Asked(TypedDict, total=False):
    question: str
    context: list[Any]
    answer: Any


def notes(store, question: str) -> str:
    return "\n\n".join(found.page_content for found in store.similarity_search(question, k=3))


def as_graph(model, store):
    """Two nodes of a graph: one searches, the other asks."""

    def retrieve(state: Asked) -> Asked:
        return {"context": store.similarity_search(state["question"], k=3)}

    def generate(state: Asked) -> Asked:
        text = "\n\n".join(found.page_content for found in state["context"])
        return {"answer": model.invoke(PROMPT.invoke({"question": state["question"], "context": text}))}

    graph = StateGraph(Asked).add_sequence([retrieve, generate]).add_edge(START, "retrieve").compile()
    return lambda question: graph.invoke({"question": question})["answer"]


def as_chain(model, store):
    """One pipe; the search is a function in it."""
    both = RunnableLambda(lambda question: {"question": question, "context": notes(store, question)})
    return (both | PROMPT | model).invoke


def as_middleware(model, store):
    """An agent whose system message is made of what was found for the last message."""

    @dynamic_prompt
    def with_context(request) -> str:
        question = request.state["messages"][-1].text
        return f"You answer from these notes alone:\n\n{notes(store, question)}"

    agent = create_agent(model, tools=[], middleware=[with_context])
    return lambda question: agent.invoke({"messages": [("user", question)]})["messages"][-1]


def kv(answer) -> dict[str, Any]:
    return answer.response_metadata["kv"]


@pytest.mark.parametrize("form", [as_graph, as_chain, as_middleware])
def test_what_comes_back_is_reused_from_the_third_prompt_on(form, make_tiny, store) -> None:
    model = make_tiny(learn_from_prompts=True)
    ask, engine = form(model, store), model.backend.engine
    found = []
    for question in QUESTIONS:
        found.append(kv(ask(question)))
        assert engine.finish_background(60)
    assert [each["reused"] + each["recomputed"] for each in found[:2]] == [0, 0]
    retrieved = len(engine.tokenizer.encode(notes(store, QUESTIONS[2]), add_special_tokens=False))
    assert found[2]["reused"] + found[2]["recomputed"] > retrieved / 2


def test_without_the_switch_and_in_full_prefill_nothing_is_learnt(make_tiny, store) -> None:
    for model in (make_tiny(), make_tiny(learn_from_prompts=True, method="full")):
        ask = as_chain(model, store)
        assert not any(kv(ask(question))["chunks"] for question in QUESTIONS)
    assert not len(model.backend.registry)


def test_another_collection_knows_nothing_of_it(make_tiny, store) -> None:
    for question in QUESTIONS[:2]:
        as_chain(make_tiny(learn_from_prompts=True), store)(question)
    assert not kv(as_chain(make_tiny(learn_from_prompts=True, collection="theirs"), store)(QUESTIONS[2]))[
        "chunks"
    ]


def test_the_text_model_learns_but_no_control_tokens(place, store) -> None:
    """In a bare text they count: text that holds one is not a passage, which would make it words."""
    model = RAGBlendLLM(**place, max_tokens=4, learn_from_prompts=True)
    mark = next(iter(model.backend.engine.tokenizer.all_special_tokens))
    control = (
        f"A line of the template with {mark} in it, as long as a passage, and the same in every prompt. " * 3
    )
    answers = []
    for question in QUESTIONS:
        text = f"{control}\n\n{notes(store, question)}\n\nQuestion: {question}\nAnswer:"
        answers.append(model.generate([text]).generations[0][0].generation_info["kv"])
        assert model.backend.engine.finish_background(60)
    assert answers[2]["reused"]
    texts = model.backend.text_prompt(text)
    assert not any(mark in (chunk.text or "") for chunk in texts.chunks)
    assert texts.token_ids.count(model.backend.engine.tokenizer.all_special_ids[0]) >= 3
