"""Packs prompts with this model's token counts, and keeps passages whole.

LlamaIndex's own `PromptHelper` counts by tiktoken unless it is given a tokenizer, and cuts the joined nodes at the
window, so that cut passages are not found. This one puts as many whole passages into a prompt as fit.
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

SEPARATOR = "\n\n"  # that LlamaIndex puts between passages


class _ModelTokenCounter(TokenCounter):
    """Counts messages by the model's tokenizer, too; LlamaIndex always counts them by its global tokenizer."""

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        by_global_tokenizer = sum(message.estimate_tokens() for message in messages)
        by_own_tokenizer = sum(self.get_string_tokens(message.content or "") for message in messages)
        return super().estimate_tokens_in_messages(messages) + by_own_tokenizer - by_global_tokenizer


class WholePassages(PromptHelper):
    """A PromptHelper that never cuts a passage that fits the window."""

    @classmethod
    def class_name(cls) -> str:
        return "WholePassages"

    @classmethod
    def of_llm(cls, llm: RAGBlendLLM, **options: Any) -> "WholePassages":
        """A helper with the model's tokenizer, and its window less the tokens of its chat template."""
        metadata = LLMMetadata(context_window=_usable_window(llm), num_output=llm.metadata.num_output)
        helper = cast("WholePassages", cls.from_llm_metadata(metadata, tokenizer=llm.tokenize, **options))
        helper._token_counter = _ModelTokenCounter(llm.tokenize)
        return helper

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = 5,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Join all chunks, in order, into as few texts as fit the prompt."""
        splitter = self.get_text_splitter_given_prompt(prompt, padding=padding, llm=llm, tools=tools)
        count = self._token_counter.get_string_tokens
        texts = [text for chunk in text_chunks if (text := chunk.strip())]
        return list(pack_texts(texts, splitter.chunk_size, count, splitter.split_text)) or [""]


def pack_texts(
    texts: Sequence[str], room: int, count: Callable[[str], int], cut: Callable[[str], list[str]]
) -> Iterator[str]:
    """Join whole texts while they fit in `room` tokens; split one that is too long at its paragraphs, then by `cut`.

    A text may be several passages that were joined before, as its paragraphs (`Refine` packs twice, the second time
    with less room).
    """
    joined = ""
    for text in texts:
        longer = joined + SEPARATOR + text if joined else text
        if count(longer) <= room:
            joined = longer
            continue
        if joined:
            yield joined
        joined = ""
        if count(text) <= room:
            joined = text
        elif SEPARATOR in text:
            yield from pack_texts([part for part in text.split(SEPARATOR) if part.strip()], room, count, cut)
        else:
            yield from cut(text)
    if joined:
        yield joined


def configure(llm: RAGBlendLLM, settings: Any = Settings) -> None:
    """Make that LLM LlamaIndex's default, with packing by its own tokenizer.

    Sets `Settings.llm`, `Settings.prompt_helper` and `Settings.chat_prompt_helper`, which every synthesizer and chat
    engine made afterwards uses. `Settings.tokenizer` is not changed, because node parsers use it and would split an
    index differently.
    """
    settings.llm = llm
    settings.prompt_helper = WholePassages.of_llm(llm)
    settings.chat_prompt_helper = ChatPromptHelper(
        _usable_window(llm), llm.metadata.num_output, tokenizer=llm.tokenize
    )


def _usable_window(llm: RAGBlendLLM) -> int:
    return max(1, llm.metadata.context_window - llm.template_tokens)
