"""Packing: LlamaIndex's packers cut passages, ours keeps them whole, in this model's tokens."""

import llama_index.core
import pytest
from llama_helpers import recording
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from ragblend.integrations.llama_index import RAGBlendSynthesizer, configure
from ragblend.integrations.llama_index.nodes import passage_of
from ragblend.integrations.llama_index.packing import WholePassages, pack_texts

NODES = [
    NodeWithScore(
        node=TextNode(id_=f"n{n}", text=f"Chapter {n}. " + " ".join(f"word{i}of{n}" for i in range(30)))
    )
    for n in range(6)
]
TEXTS = [passage_of(node).text for node in NODES]


@pytest.mark.parametrize(
    ("texts", "joined"),
    [
        ([], []),
        (["a b", "c", "d e f", "g"], ["a b\n\nc", "d e f\n\ng"]),
        # Joined texts are split where they were joined.
        (["a b c\n\nd e"], ["a b c", "d e"]),
        (["a b", "c d e\n\nf g h"], ["a b", "c d e", "f g h"]),
        # Only a text longer than the room is cut.
        (["a b", "c d e f g", "h"], ["a b", "c", "d", "e", "f", "g", "h"]),
    ],
)
def test_whole_texts_are_joined_while_they_fit(texts, joined):
    assert list(pack_texts(texts, 4, lambda text: len(text.split()), lambda text: text.split())) == joined


def test_the_room_in_a_prompt_is_counted_in_the_models_tokens(llm):
    """LlamaIndex counts a message's text by tiktoken, which gives about half of this model's tokens."""
    helper = WholePassages.of_llm(llm)
    assert helper._token_counter.get_string_tokens(TEXTS[0]) == len(llm.tokenize(TEXTS[0]))
    assert helper.context_window == 2048 - llm.template_tokens
    assert 10 < llm.template_tokens < 100
    rules = ChatMessage("Answer from these passages alone. " * 20, role="system")
    asked = ChatPromptTemplate([rules, ChatMessage("{context_str}")])
    room = helper.get_text_splitter_given_prompt(asked, llm=llm, padding=0).chunk_size
    left = helper.context_window - helper.num_output - len(llm.tokenize(rules.content))
    assert rules.estimate_tokens() + 100 < len(llm.tokenize(rules.content))
    assert left - 20 < room < left  # less the roles


def test_a_text_that_needs_cutting_is_counted_however_long_it_is(llm):
    """It was refused as a prompt longer than the window."""
    assert len(llm.tokenize("word " * 60_000)) > 60_000


@pytest.fixture
def narrowed(make_llm):
    """An LLM with a window in which about three of the six nodes have room, beside LlamaIndex's prompt and padding."""

    def make(mode):
        llm = make_llm(max_new_tokens=4, register_retrieved=False, learn_from_prompts=False)
        beside = {"compact": 1200, "tree_summarize": 500}[mode]
        llm.context_window = beside + int(3.5 * len(llm.tokenize(TEXTS[0])))
        assert llm.context_window < 2048
        llm.remember(NODES, encode=True)
        return llm

    return make


def shares(recorder):
    """(passages found, passages that are in the prompts in whole or in part)"""
    prompts = ["\n".join(m.content for m in end.messages) for end in recorder.ends]
    touched = sum(any(f"word{i}of{n} " in p for i in range(30)) for p in prompts for n in range(6))
    return sum(len(kv["chunks"]) for kv in recorder.kv), touched


@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
def test_the_stock_packer_cuts_passages_at_the_window_and_ours_does_not(narrowed, mode):
    narrow = narrowed(mode)
    exact = PromptHelper.from_llm_metadata(narrow.metadata, tokenizer=narrow.tokenize)
    with recording() as recorder:
        get_response_synthesizer(narrow, prompt_helper=exact, response_mode=mode).synthesize("Who?", NODES)
    resolved, touched = shares(recorder)
    assert 0 < resolved < touched
    with recording() as recorder:
        RAGBlendSynthesizer(narrow, mode).synthesize("Who?", NODES)
    assert shares(recorder) == (6, 6)
    assert all(kv["misses"] == 0 for kv in recorder.kv)
    assert len(recorder.kv) > 1


def test_configure_makes_stock_synthesizers_pack_whole_passages(narrowed, settings):
    before = llama_index.core.global_tokenizer, settings._prompt_helper
    narrow = narrowed("compact")
    assert before == (llama_index.core.global_tokenizer, settings._prompt_helper), (
        "an LLM alone changes nothing"
    )
    configure(narrow)
    assert settings.llm is narrow
    with recording() as recorder:
        get_response_synthesizer(response_mode="compact").synthesize("Who?", NODES)
    assert shares(recorder) == (6, 6)
    assert settings._chat_prompt_helper._token_counter.tokenizer == narrow.tokenize
