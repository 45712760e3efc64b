"""Passages that no retriever announces: who learns of them, and who does not (`test_programs.py`: what is reused)."""

import copy
import pickle
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from ragblend.integrations.langchain import RAGBlendLLM
from ragblend.integrations.langchain.listener import LEARNERS

QUESTIONS = ("What is the ringer paid in?", "Who keeps the tide table?", "What does the lamp burn?")
PROMPT = ChatPromptTemplate.from_messages(
    [("human", "Answer from these notes alone.\nNotes:\n{context}\nQuestion: {question}\nAnswer:")]
)


def notes(store, question: str) -> str:
    return "\n\n".join(found.page_content for found in store.similarity_search(question, k=3))


def as_chain(model, store):
    """One pipe; the search is a function in it."""
    both = RunnableLambda(lambda question: {"question": question, "context": notes(store, question)})
    return (both | PROMPT | model).invoke


def kv(answer) -> dict[str, Any]:
    return answer.response_metadata["kv"]


def test_without_the_switch_and_in_full_prefill_nothing_is_learnt(make_tiny, store) -> None:
    for model in (make_tiny(learn_from_prompts=False), make_tiny(method="full")):
        ask = as_chain(model, store)
        assert not any(kv(ask(question))["chunks"] for question in QUESTIONS)
    assert not len(model.backend.registry)


@pytest.mark.parametrize(
    "copied",
    [
        lambda model: pickle.loads(pickle.dumps(model)),
        copy.copy,
        copy.deepcopy,
        lambda model: model.model_copy(update={"collection": "other"}),
    ],
    ids=["pickled", "copied", "deep", "model_copy"],
)
def test_a_copy_learns_what_retrievers_find(make_tiny, store, copied) -> None:
    """Nothing validates it again, so that nobody had told it; in a worker there is no other."""
    model = copied(make_tiny())
    LEARNERS.models.clear()
    model = copied(model)
    store.as_retriever().invoke(QUESTIONS[0])
    assert list(LEARNERS.models.values()) == [model] and len(model.backend.registry)


def test_that_documents_were_changed_on_their_way_into_the_prompt_is_said(make_tiny, store, caplog) -> None:
    model = make_tiny()
    found = store.as_retriever().invoke(QUESTIONS[0])
    model.invoke("\n".join(each.page_content.upper() for each in found))
    assert "passages were retrieved, and none of them stands in this prompt unchanged" in caplog.text


def test_the_text_model_learns_but_no_control_tokens(place, store) -> None:
    """In a bare text they count: text that holds one is not a passage, which would make it words."""
    model = RAGBlendLLM(**place, max_tokens=4)
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


def test_short_instructions_that_come_back_are_no_passage(make_tiny) -> None:
    """Reading them costs little, and they are what matters most; of long ones, passages among them, it is learnt."""
    orders = (
        "You answer from the notes of the keepers alone, in one sentence, and say so where they do not tell. "
        * 3
    )
    model = make_tiny()
    for question in QUESTIONS:
        assert not kv(model.invoke([("system", orders), ("user", question)]))["chunks"]
    longer = "\n".join(f"{n}. {orders.upper()}" for n in range(4))
    found = [
        kv(model.invoke([("system", longer), ("user", question)]))["chunks"] for question in QUESTIONS[:2]
    ]
    assert [len(each) for each in found] == [0, 1]
