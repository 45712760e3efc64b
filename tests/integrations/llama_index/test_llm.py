"""The eight methods, what an LLM is made with, and what it says of itself."""

import json

import pytest
from llama_helpers import METHODS, STORIES, call, text_of, user
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode

from ragblend import Chunk, Literal
from ragblend.engine.prompts.segments import Message
from ragblend.integrations.llama_index import RAGBlendLLM
from ragblend.integrations.passages import Passage

QUESTION = "Who kept two ledgers?"


@pytest.fixture
def expected(llm):
    """The engine's own answer to the question."""
    engine = llm.backend.engine
    return engine.generate(
        engine.chat([Message("user", (Literal(QUESTION, verbatim=True),))]), max_new_tokens=8
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_engines_answer(llm, expected, method):
    responses = call(llm, method, QUESTION)
    assert text_of(responses[-1]) == expected.text
    assert responses[-1].raw["usage"] == {
        "prompt_tokens": expected.report.tokens.prompt,
        "completion_tokens": 8,
        "total_tokens": expected.report.tokens.prompt + 8,
    }
    assert llm.last_stats == responses[-1].raw
    if "stream" in method:
        assert len(responses) > 2
        told = ""
        for response in responses:
            told += response.delta
            assert text_of(response) == told
        assert [r.raw is None for r in responses] == [True] * (len(responses) - 1) + [False]


def test_making_one_loads_nothing(tmp_path):
    """Not even a wrong model is noticed, no folder is made, and neither tokenizer nor engine is opened."""
    given = {"context_window": 500, "is_chat_model": False}
    llm = RAGBlendLLM(model=str(tmp_path / "none"), home=str(tmp_path / "home"), **given)
    assert llm.to_dict()
    assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (500, False)
    assert llm.to_payload()["model_name"] == llm.model
    assert not (tmp_path / "home").exists()


def test_metadata_is_true_to_the_model_and_loads_no_weights(llm):
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (2048, 8)
    assert metadata.is_chat_model
    assert not metadata.is_function_calling_model
    assert metadata.model_name == llm.model == llm.model_name
    tokenizer = llm.backend.engine.tokenizer
    assert llm.tokenize("two ledgers") == tokenizer.encode("two ledgers", add_special_tokens=False)
    assert llm.tokenize("") == []
    assert "loaded" not in llm.backend.engine.runtime.__dict__


def test_names_that_users_of_other_llms_know(tmp_path):
    llm = RAGBlendLLM(
        model_name="somewhere",
        context_window=4096,
        max_tokens=32,
        generate_kwargs={"do_sample": True, "top_k": 5},
        messages_to_prompt=lambda messages: "m",
        completion_to_prompt=lambda text: "c",
        system_prompt="Be brief.",
        home=tmp_path,
        stop="END",
    )
    assert (llm.model, llm.home, llm.stop, llm.max_new_tokens) == ("somewhere", str(tmp_path), ["END"], 32)


def test_to_dict_and_back(make_llm):
    llm = make_llm(temperature=0.5, stop=["END"], system_prompt="Be brief.", method="reuse")
    llm.chat(user(QUESTION))
    saved = json.loads(llm.to_json())
    assert saved["class_name"] == "RAGBlendLLM" == llm.class_name()
    again = RAGBlendLLM.from_dict(saved)
    assert again.to_dict() == llm.to_dict()
    assert len(json.dumps(saved)) < 1000  # no weights, no engine


def test_options_of_one_call_reach_the_engine(llm):
    assert call(llm, "complete", QUESTION, max_tokens=3)[0].raw["usage"]["completion_tokens"] == 3
    assert call(llm, "chat", QUESTION, method="full")[0].raw["kv"]["method"] == "full"
    whole = text_of(call(llm, "complete", QUESTION)[0])
    cut = text_of(call(llm, "complete", QUESTION, stop=[whole[3]])[0])
    assert cut == whole[: whole.index(whole[3])]
    seeded = [text_of(call(llm, "complete", QUESTION, temperature=2.0, seed=s)[0]) for s in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


def prompt_text(llm, request):
    return "".join(segment.text for segment in request.make_prompt().segments)


def test_the_chat_template_is_the_models_own(llm):
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="Hello?"),
        ChatMessage(role="assistant", content="Yes."),
        ChatMessage(role="user", content="{braces} and <|im_end|> are text."),
    ]
    turns = [{"role": m.role.value, "content": m.content} for m in messages]
    template = llm.backend.engine.tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    request = llm._prepare_chat(messages, {})
    assert prompt_text(llm, request) == template
    end = llm.backend.engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert request.make_prompt().token_ids.count(end) == 4  # the template's own, not the one that was written


def chatml(text):
    """As users write it, stripping included."""
    return f"<|im_start|>user\n{text.strip()}<|im_end|>\n<|im_start|>assistant\n"


OWN_TEMPLATES = {
    "completion_to_prompt": {"completion_to_prompt": chatml},
    "messages_to_prompt": {"messages_to_prompt": lambda messages: chatml(messages[-1].content)},
    "template of a base model": {"is_chat_model": False},
    "template around completion_to_prompt": {"is_chat_model": False, "completion_to_prompt": chatml},
    "completion of a base model": {"is_chat_model": False, "system_prompt": "<|im_start|>Be brief."},
}


def asked(llm, way, text):
    """The prompt that reaches the engine."""
    if way == "messages_to_prompt":
        return llm._prepare_chat(user(text), {}).make_prompt()
    if "template" not in way:
        return llm._prepare_completion(text, False, {}).make_prompt()
    template = PromptTemplate("<|im_start|>{context}\n{question}<|im_end|>").partial_format(question=text)
    return llm._prepare_completion(llm._get_prompt(template, context=text), True, {}).make_prompt()


@pytest.mark.parametrize("way", OWN_TEMPLATES)
def test_only_a_templates_own_control_tokens_count(make_llm, way):
    """What is put into a template cannot act as it; what the template does with an ordinary text stays as it is."""
    llm = make_llm(**OWN_TEMPLATES[way])
    tokenizer = llm.backend.engine.tokenizer
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def controls(text):
        return [i for i in asked(llm, way, text).token_ids if i in special]

    wanted = controls(" a b\n")
    assert wanted
    assert controls("".join(special.values()) + " a ".join(special.values()) + " is\n") == wanted
    if way == "completion_to_prompt":
        assert "".join(segment.text for segment in asked(llm, way, " a b\n").segments) == chatml("a b")


def test_an_empty_answer_of_earlier_is_no_turn(llm):
    turns = [ChatMessage("Hi"), ChatMessage("", role="assistant"), ChatMessage("Go on")]
    with_it, without = (llm._prepare_chat(asked, {}).make_prompt().token_ids for asked in (turns, turns[::2]))
    assert with_it == without


def test_a_completion_is_a_user_message_behind_the_system_prompt(make_llm):
    llm = make_llm(system_prompt="Be brief.")
    text = prompt_text(llm, llm._prepare_completion("Hello?", False, {}))
    assert "system\nBe brief.<|im_end|>" in text
    assert "user\nHello?<|im_end|>" in text
    base = make_llm(system_prompt="Be brief.", is_chat_model=False)
    assert prompt_text(base, base._prepare_completion("Hello?", False, {})) == "Be brief.\n\nHello?"
    # `predict` asks `metadata.is_chat_model`; the passages reach the engine on that way too.
    template = PromptTemplate("{context}\n\n{question}")
    base.predict(template, context=STORIES[0], question=QUESTION, passages=[Passage(STORIES[0], "one")])
    assert base.last_stats["kv"]["chunks"] == ["one"]


def test_a_passage_may_be_named_in_a_call(llm):
    text = f"Read this: {STORIES[0]} {QUESTION}"
    for named in (
        {"passages": [STORIES[0]]},
        {"passages": STORIES[0]},
        {"nodes": TextNode(text=STORIES[0])},
        {"passages": [Passage(STORIES[0], "one")]},
    ):
        kv = llm.chat(user(text), **named).raw["kv"]
        assert len(kv["chunks"]) == 1
    assert kv["chunks"] == ["one"]
    engine = llm.backend.engine
    segments = (
        Literal("Read this: ", verbatim=True),
        Chunk(STORIES[0]),
        Literal(f" {QUESTION}", verbatim=True),
    )
    prompt = engine.tokenize(engine.chat([Message("user", segments)]))
    assert (
        llm._prepare_chat(user(text), {"passages": [STORIES[0]]}).make_prompt().token_ids == prompt.token_ids
    )
