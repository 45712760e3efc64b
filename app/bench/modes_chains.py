"""LangChain's question-answering chains as `load_qa_chain` makes them, run under a watch. Imports LangChain.

The classes and prompts are LangChain's. One thing had to be added: its map_rerank ends in a ValueError as soon as one
answer of many comes without a score, which small models' answers do.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from langchain_classic.chains.combine_documents.base import BaseCombineDocumentsChain
from langchain_classic.chains.question_answering import load_qa_chain
from langchain_classic.chains.question_answering.map_rerank_prompt import PROMPT as MAP_RERANK_PROMPT
from langchain_classic.output_parsers.regex import RegexParser
from langchain_core._api import LangChainDeprecationWarning
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.outputs import LLMResult

from ragblend.app.bench.modes import Answered, Call, answer_of
from ragblend.app.bench.prefilling import BenchError
from ragblend.app.bench.variants import Variant
from ragblend.integrations.langchain import ChatRAGBlend
from ragblend.kvstore.errors import RagBlendError

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine

MOST_TOKENS = 3000  # LangChain's own limit for what is reduced in one call
TEMPLATE_TOKENS = 64  # the chat template's, which LangChain does not count
COLLAPSES = 5  # LangChain would go on for ever with a model whose summaries do not get shorter
UNSCORED = "-1"  # below every score that can be given


@dataclass(frozen=True)
class Models:
    """One model for each kind of call, as they end after different lengths; prompt_tokens: the longest prompt."""

    answering: BaseChatModel
    extracting: BaseChatModel
    scoring: BaseChatModel
    prompt_tokens: int


class Scored(RegexParser):
    """LangChain's parser of map_rerank's answers; one without a score loses to all that have one."""

    def parse(self, text: str) -> dict[str, str]:
        try:
            found = super().parse(text)
        except ValueError:
            found = {"answer": text.strip(), "score": ""}
        return found | {"score": found["score"] or UNSCORED}


class Watch(BaseCallbackHandler):
    """Sees every call as it ends."""

    raise_error = True  # what goes wrong here must not pass for a measurement

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.last_end = 0.0

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.last_end = perf_counter()
        message: Any = response.generations[0][0]
        used, kv = message.message.usage_metadata, message.message.response_metadata["kv"]
        self.calls.append(Call.of(used["input_tokens"], used["output_tokens"], kv))


def chat_model(engine: "Engine", variant: Variant, max_tokens: int) -> ChatRAGBlend:
    """LangChain's view of this very engine; never answered from LangChain's cache."""
    config = engine.config
    model = ChatRAGBlend(
        model=config.model,
        home=str(engine.home),
        collection=config.collection,
        device=config.device,
        dtype=config.dtype,
        max_tokens=max_tokens,
        register_retrieved=False,
        cache=False,
        **variant.arguments,
    )
    assert model.backend().engine is engine, config
    return model


def ask(mode: str, models: Models, passages: Sequence[str], question: str) -> Answered:
    """The mode's answer, timed, and the calls that it took."""
    watch = Watch()
    with _quiet():
        chain = load_chain(mode, models)
        inputs = {"input_documents": [Document(text) for text in passages], "question": question}
        begun = perf_counter()
        try:
            said = chain.invoke(inputs, {"callbacks": [watch]})
        except RagBlendError:
            raise
        except (
            ValueError
        ) as error:  # LangChain's, when extracts do not fit into one prompt however often shortened
            raise BenchError(
                f"LangChain's {mode} gave up ({error}); pass --passages N to read fewer"
            ) from error
        ended = perf_counter()
    # map_rerank's answer is known when the last candidate is; the others' last call is the one that says it.
    first = ended if mode == "map_rerank" else watch.last_end - watch.calls[-1].after_first_ms / 1000
    unscored = _unscored(said) if mode == "map_rerank" else None
    return answer_of(said["output_text"], 1000 * (first - begun), watch.calls, unscored)


def load_chain(mode: str, models: Models) -> BaseCombineDocumentsChain:
    """The chain with LangChain's own prompts; only its parser of scores is replaced."""
    if mode == "map_rerank":
        stock = MAP_RERANK_PROMPT.output_parser
        assert stock is not None, "LangChain's rerank prompt comes with its parser"
        parser = Scored(**stock.model_dump(exclude={"type"}))
        prompt = MAP_RERANK_PROMPT.model_copy(update={"output_parser": parser})
        return load_qa_chain(models.scoring, mode, prompt=prompt, return_intermediate_steps=True)
    if mode == "refine":
        return load_qa_chain(models.answering, mode)
    assert mode == "map_reduce", mode
    most = min(MOST_TOKENS, models.prompt_tokens - TEMPLATE_TOKENS)
    chain: Any = load_qa_chain(models.extracting, mode, reduce_llm=models.answering, token_max=most)
    chain.reduce_documents_chain.collapse_max_retries = COLLAPSES
    return chain


def _unscored(said: dict[str, Any]) -> int:
    return sum(step["score"] == UNSCORED for step in said["intermediate_steps"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without advice: LangChain's to build agents instead, ours to have map_reduce's last prompt know a document."""
    log = logging.getLogger("ragblend")
    log.addFilter(_is_no_advice)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LangChainDeprecationWarning)
            warnings.filterwarnings("ignore", message="The apply_and_parse method is deprecated")
            yield
    finally:
        log.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("no known document stands in this prompt")
