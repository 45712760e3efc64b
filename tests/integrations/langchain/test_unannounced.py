"""Passages that no retriever announces: which models register them (`test_programs.py` shows the reuse)."""

from typing import Any

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from waiting import SOON_S

from ragblend.integrations.langchain import RAGBlendLLM

QUESTIONS = ("What is the ringer paid in?", "Who keeps the tide table?", "What does the lamp burn?")
PROMPT = ChatPromptTemplate.from_messages(
    [("human", "Answer from these notes alone.\nNotes:\n{context}\nQuestion: {question}\nAnswer:")]
)

ORDERS = (
    "You answer from the notes of the keepers alone, in one sentence, and say so where they do not tell. " * 3
)


def notes(store, question: str) -> str:
    return "\n\n".join(found.page_content for found in store.similarity_search(question, k=3))


def as_chain(model, store):
    """One pipe; the search is a function in it."""
    both = RunnableLambda(lambda question: {"question": question, "context": notes(store, question)})
    return (both | PROMPT | model).invoke


def kv(answer) -> dict[str, Any]:
    return answer.response_metadata["kv"]


def test_nothing_is_learned_when_switched_off_and_with_full_prefill(make_tiny, store) -> None:
    for model in (make_tiny(learn_from_prompts=False), make_tiny(method="full")):
        ask = as_chain(model, store)
        assert not any(kv(ask(question))["chunks"] for question in QUESTIONS)
    assert not len(model.backend.registry)


def test_the_text_model_learns_no_text_with_control_tokens(place, store) -> None:
    """They act as such in a bare text; in a passage they would be plain text."""
    model = RAGBlendLLM(**place, max_tokens=4)
    mark = next(iter(model.backend.engine.tokenizer.all_special_tokens))
    control = (
        f"A line of the template with {mark} in it, as long as a passage, and the same in every prompt. " * 3
    )
    answers = []
    for question in QUESTIONS:
        text = f"{control}\n\n{notes(store, question)}\n\nQuestion: {question}\nAnswer:"
        answers.append(model.generate([text]).generations[0][0].generation_info["kv"])
        assert model.backend.engine.finish_background(SOON_S)
    assert answers[2]["reused"]
    texts = model.backend.text_prompt(text)
    assert not any(mark in (chunk.text or "") for chunk in texts.chunks)
    assert texts.token_ids.count(model.backend.engine.tokenizer.all_special_ids[0]) >= 3


def test_short_repeated_instructions_are_no_passage_but_long_ones_are(make_tiny) -> None:
    """Short ones cost little to read, and matter most; long ones may contain passages."""
    model = make_tiny()
    for question in QUESTIONS:
        assert not kv(model.invoke([("system", ORDERS), ("user", question)]))["chunks"]
    longer = "\n".join(f"{n}. {ORDERS.upper()}" for n in range(4))
    found = [
        kv(model.invoke([("system", longer), ("user", question)]))["chunks"] for question in QUESTIONS[:2]
    ]
    assert [len(each) for each in found] == [0, 1]


def test_short_instructions_are_no_passage_where_they_recurred_in_questions(make_tiny) -> None:
    model = make_tiny()
    found = [kv(model.invoke(f"{ORDERS}\n\n{question}"))["chunks"] for question in QUESTIONS]
    assert found[-1]
    assert not kv(model.invoke([("system", ORDERS), ("user", QUESTIONS[0])]))["chunks"]
