"""Packing prompts right: this model's token counts, and passages kept whole.

LlamaIndex's own `PromptHelper` counts by tiktoken unless it is given a tokenizer, joins what was retrieved, and cuts
that at the window: a passage that is cut is not found again. This one puts as many whole passages in a prompt as fit.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import BaseTool
from llama_index.core.utilities.token_counting import TokenCounter

from ragblend.integrations.llama_index.llm import RAGBlendLLM

BETWEEN = "\n\n"  # what LlamaIndex puts between passages


class _ModelsCounter(TokenCounter):
    """Counts messages by its tokenizer too: LlamaIndex counts their text by its global one, whatever it is given."""

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        by_global = sum(message.estimate_tokens() for message in messages)
        own = sum(self.get_string_tokens(message.content or "") for message in messages)
        return super().estimate_tokens_in_messages(messages) + own - by_global


class WholePassages(PromptHelper):
    """A PromptHelper that cuts no passage, unless it is longer than the window by itself."""

    @classmethod
    def class_name(cls) -> str:
        return "WholePassages"

    @classmethod
    def of_llm(cls, llm: RAGBlendLLM, **options: Any) -> "WholePassages":
        """For that model: its window (less what its chat template takes) and its tokenizer."""
        numbers = LLMMetadata(context_window=_room(llm), num_output=llm.metadata.num_output)
        helper = cast("WholePassages", cls.from_llm_metadata(numbers, tokenizer=llm.tokenize, **options))
        helper._token_counter = _ModelsCounter(llm.tokenize)
        return helper

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = 5,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """As few texts as hold all the chunks, in order, each within the room that the prompt leaves."""
        splitter = self.get_text_splitter_given_prompt(prompt, padding=padding, llm=llm, tools=tools)
        count = self._token_counter.get_string_tokens
        texts = [text for chunk in text_chunks if (text := chunk.strip())]
        return list(packed(texts, splitter.chunk_size, count, splitter.split_text)) or [""]


def packed(
    texts: Sequence[str], room: int, count: Callable[[str], int], cut: Callable[[str], list[str]]
) -> Iterator[str]:
    """Whole texts, joined while they fit; one that is too long alone gives way at its paragraphs, then to `cut`.

    A text may be several passages that were joined before (`Refine` packs twice, the second time in less room): its
    paragraphs are where those meet.
    """
    held = ""
    for text in texts:
        joined = held + BETWEEN + text if held else text
        if count(joined) <= room:
            held = joined
            continue
        if held:
            yield held
        held = ""
        if count(text) <= room:
            held = text
        elif BETWEEN in text:
            yield from packed([part for part in text.split(BETWEEN) if part.strip()], room, count, cut)
        else:
            yield from cut(text)
    if held:
        yield held


def configure(llm: RAGBlendLLM, settings: Any = Settings) -> None:
    """Make that LLM LlamaIndex's default, with packing by its own tokenizer.

    Sets `Settings.llm`, `Settings.prompt_helper` and `Settings.chat_prompt_helper`, which every synthesizer and chat
    engine made from then on takes. `Settings.tokenizer` is left alone: node parsers count by it, and an index would be
    cut differently.
    """
    settings.llm = llm
    settings.prompt_helper = WholePassages.of_llm(llm)
    settings.chat_prompt_helper = ChatPromptHelper(
        _room(llm), llm.metadata.num_output, tokenizer=llm.tokenize
    )


def _room(llm: RAGBlendLLM) -> int:
    return max(1, llm.metadata.context_window - llm.template_tokens)
