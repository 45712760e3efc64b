"""The eight methods of the LLM, its parameters, and how it makes prompts."""

import json

import pytest
from llama_helpers import STORIES, user
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode

from ragblend.integrations.llama_index import RAGBlendLLM
from ragblend.integrations.passages import Passage

QUESTION = "Who kept two ledgers?"


# --- what it is


def test_metadata_is_the_models_own_and_loads_no_weights(llm):
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (2048, 8)
    assert metadata.is_chat_model
    assert not metadata.is_function_calling_model
    assert metadata.model_name == llm.model == llm.model_name
    tokenizer = llm.backend.engine.tokenizer
    assert llm.tokenize("two ledgers") == tokenizer.encode("two ledgers", add_special_tokens=False)
    assert llm.tokenize("") == []
    assert "loaded" not in llm.backend.engine.runtime.__dict__


def test_other_llms_names_of_parameters_are_taken(tmp_path):
    llm = RAGBlendLLM(
        model_name="somewhere", context_window=4096, max_tokens=32, home=tmp_path, stop="END",
        generate_kwargs={"do_sample": True, "top_k": 5}, system_prompt="Be brief.",
        messages_to_prompt=lambda messages: "m", completion_to_prompt=lambda text: "c",
    )  # fmt: skip
    assert (llm.model, llm.home, llm.stop, llm.max_new_tokens) == ("somewhere", str(tmp_path), ["END"], 32)


def test_it_is_saved_as_json_and_restored(make_llm):
    llm = make_llm(temperature=0.5, stop=["END"], system_prompt="Be brief.", method="reuse")
    llm.chat(user(QUESTION))
    saved = json.loads(llm.to_json())
    assert saved["class_name"] == "RAGBlendLLM" == llm.class_name()
    assert RAGBlendLLM.from_dict(saved).to_dict() == llm.to_dict()
    assert len(json.dumps(saved)) < 1000  # no weights, no engine


# --- prompts


def prompt_text(prepared):
    return "".join(segment.text for segment in prepared.make_prompt().segments)


def test_the_chat_template_is_the_models_own(llm):
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="Hello?"),
        ChatMessage(role="assistant", content="Yes."),
        ChatMessage(role="user", content="{braces} and <|im_end|> are text."),
    ]
    turns = [{"role": m.role.value, "content": m.content} for m in messages]
    tokenizer = llm.backend.engine.tokenizer
    prepared = llm._prepare_chat(messages, {})
    assert prompt_text(prepared) == tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert prepared.make_prompt().token_ids.count(end) == 4  # the template's own, not the one in the text


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


def prepare(llm, way, text):
    if way == "messages_to_prompt":
        return llm._prepare_chat(user(text), {})
    if "template" not in way:
        return llm._prepare_completion(text, False, {})
    template = PromptTemplate("<|im_start|>{context}\n{question}<|im_end|>").partial_format(question=text)
    return llm._prepare_completion(llm._get_prompt(template, context=text), True, {})


@pytest.mark.parametrize("way", OWN_TEMPLATES)
def test_only_a_templates_own_control_tokens_act_as_such(make_llm, way):
    """Those in inserted text do not; ordinary text is not changed."""
    llm = make_llm(**OWN_TEMPLATES[way])
    tokenizer = llm.backend.engine.tokenizer
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def controls(text):
        return [i for i in prepare(llm, way, text).make_prompt().token_ids if i in special]

    expected = controls(" a b\n")
    assert expected
    assert controls("".join(special.values()) + " a ".join(special.values()) + " is\n") == expected
    if way == "completion_to_prompt":
        assert prompt_text(prepare(llm, way, " a b\n")) == chatml("a b")


def test_an_empty_earlier_answer_is_left_out(llm):
    messages = [ChatMessage("Hi"), ChatMessage("", role="assistant"), ChatMessage("Go on")]
    with_it, without = (
        llm._prepare_chat(each, {}).make_prompt().token_ids for each in (messages, messages[::2])
    )
    assert with_it == without


def test_a_completion_is_a_user_message_after_the_system_prompt(make_llm):
    llm = make_llm(system_prompt="Be brief.")
    prompt = prompt_text(llm._prepare_completion("Hello?", False, {}))
    assert "system\nBe brief.<|im_end|>" in prompt
    assert "user\nHello?<|im_end|>" in prompt


def test_a_base_model_gets_plain_text_and_named_passages_are_found_in_it(make_llm):
    base = make_llm(system_prompt="Be brief.", is_chat_model=False)
    assert prompt_text(base._prepare_completion("Hello?", False, {})) == "Be brief.\n\nHello?"
    template = PromptTemplate("{context}\n\n{question}")
    base.predict(template, context=STORIES[0], question=QUESTION, passages=[Passage(STORIES[0], "one")])
    assert base.last_stats["kv"]["chunks"] == ["one"]


@pytest.mark.parametrize(
    ("named", "node_id"),
    [
        ({"passages": [STORIES[0]]}, None),
        ({"passages": STORIES[0]}, None),
        ({"nodes": TextNode(text=STORIES[0], id_="node")}, "node"),
        ({"passages": [Passage(STORIES[0], "one")]}, "one"),
    ],
    ids=["texts", "text", "node", "passage"],
)
def test_a_call_names_passages_as_texts_nodes_or_passages(llm, named, node_id):
    prompt = llm._prepare_chat(user(f"Read this: {STORIES[0]} {QUESTION}"), named).make_prompt()
    assert [(chunk.text, chunk.node_id) for chunk in prompt.chunks] == [(STORIES[0], node_id)]
