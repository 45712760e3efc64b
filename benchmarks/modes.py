"""Runs LangChain's map_reduce, map_rerank and refine on the same engine, to compare them with the methods.

They are LangChain's own chains as `load_qa_chain` makes them, with LangChain's own prompts, and are asked the same
question about the same passages; each call is prefilled in full, or by a method (`refine+cacheblend`). Their prompts
differ from full prefill's, so only their answers, times and token counts can be compared with it. One thing is added:
LangChain's map_rerank raises ValueError if a single answer has no score, which happens with small models. Imports
LangChain.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
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

from ragblend.integrations.backend import Backend
from ragblend.integrations.langchain import ChatRAGBlend
from ragblend.integrations.passages import Passage, node_id_of
from ragblend.integrations.text_index import MINIMUM
from ragblend.kvstore.errors import PromptTooLongError, RagBlendError
from ragblend.measuring.data import Question
from ragblend.measuring.prefilling import BenchError
from ragblend.measuring.quality import Measure, Outcome, against_gold, asked
from ragblend.measuring.records import Record
from ragblend.measuring.variants import Variant

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine
    from ragblend.engine.prompts.segments import Prompt

# map_reduce extracts more than an answer from a passage: LangChain asks for "any relevant text verbatim".
EXTRACT_TOKENS = 128
SCORE_TOKENS = 16  # for map_rerank's "Score: 100" after its answer
MOST_TOKENS = 3000  # LangChain's own limit for texts that are reduced in one call
TEMPLATE_TOKENS = 64  # the chat template's, which LangChain does not count
COLLAPSES = 5  # LangChain would never end with a model whose summaries do not get shorter
Call = dict[str, Any]  # our adapter's report of one call: tokens, times, method and hits
UNSCORED = "-1"  # below every possible score


@dataclass(frozen=True)
class Mode:
    """A mode and how its calls are prefilled: in full (`refine`), or by a method (`refine+cacheblend`)."""

    name: str
    method: str = "full"
    ratio: float | None = None

    @property
    def variant(self) -> Variant:
        """Its name in results."""
        return Variant(self.name if self.method == "full" else f"{self.name}+{self.method}", self.ratio)

    @property
    def arguments(self) -> dict[str, Any]:
        """The prefill arguments of its calls."""
        return Variant(self.method, self.ratio).arguments


@dataclass(frozen=True)
class ModeAnswer:
    """A mode's answer. ttft_ms: from its first call to the answer's first token; tokens: of all calls."""

    text: str
    ttft_ms: float
    calls: int
    prompt_tokens: int
    generated_tokens: int
    unscored: int | None = None


def settings() -> dict[str, Any]:
    """What a mode's numbers depend on beside the engine: limits of its calls, and LangChain's versions."""
    packages = {name: version(name) for name in ("langchain-core", "langchain-classic")}
    return {"extract_tokens": EXTRACT_TOKENS, "score_tokens": SCORE_TOKENS, **packages}


def measuring(mode: Mode) -> Measure:
    """A function that measures a mode; fields that compare next-token distributions are None in its records."""
    warm: list[Mode] = []

    def measure(
        engine: "Engine", question: Question, prompt: "Prompt", reference: Outcome, max_new_tokens: int
    ) -> Record:
        try:
            if not warm:  # two passages make every kind of call, and one token each is enough
                answer(engine, mode, question.passages[:2], asked(question), 1, 1)
                warm.append(mode)
            said = answer(engine, mode, question.passages, asked(question), max_new_tokens)
        except PromptTooLongError as error:  # prompt lengths are known only when the prompts are made
            raise PromptTooLongError(f"{question.place}, {mode.variant}: {error}") from error
        spent = {name: value for name, value in asdict(said).items() if name != "text"}
        undefined: dict[str, Any] = dict.fromkeys(("kl", "top1", "exact_match", "recomputed_fraction"))
        known: dict[str, Any] = {
            "question": question.digest,
            "method": mode.variant.method,
            "ratio": mode.ratio,
        }
        return Record(
            **known, **undefined, **spent, **against_gold(said.text, question), full_ttft_ms=reference.ttft_ms
        )

    return measure


def answer(
    engine: "Engine",
    mode: Mode,
    passages: Sequence[str],
    question: str,
    max_new_tokens: int,
    extract_tokens: int = EXTRACT_TOKENS,
) -> ModeAnswer:
    """Ask the mode; extract_tokens: longest text that map_reduce extracts from a passage.

    The passages' KV must be stored, for fused calls. Raises BenchError if something else would be measured.
    """
    models = Models(
        answering=chat_model(engine, mode, max_new_tokens),
        extracting=chat_model(engine, mode, extract_tokens),
        scoring=chat_model(engine, mode, max_new_tokens + SCORE_TOKENS),
        prompt_tokens=engine.context_window - max_new_tokens,
    )
    with _known(engine, passages):
        said, calls = ask(mode.name, models, passages, question)
    _check(mode, passages, calls)
    return said


@dataclass(frozen=True)
class Models:
    """One model for each kind of call, as their longest answers differ; prompt_tokens: the longest prompt."""

    answering: BaseChatModel
    extracting: BaseChatModel
    scoring: BaseChatModel
    prompt_tokens: int


class Scored(RegexParser):
    """LangChain's parser of map_rerank's answers; an answer without a score gets the lowest one."""

    def parse(self, text: str) -> dict[str, str]:
        try:
            found = super().parse(text)
        except ValueError:
            found = {"answer": text.strip(), "score": ""}
        return found | {"score": found["score"] or UNSCORED}


class Watch(BaseCallbackHandler):
    """Records every call when it ends."""

    raise_error = True  # an error here must not be recorded as a measurement

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.last_end = 0.0

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.last_end = perf_counter()
        message: Any = response.generations[0][0]
        used, kv = message.message.usage_metadata, message.message.response_metadata["kv"]
        self.calls.append({**used, **kv})


def chat_model(engine: "Engine", mode: Mode, max_tokens: int) -> ChatRAGBlend:
    """LangChain's model over this engine, which prefills as the mode says; without LangChain's cache."""
    config = engine.config
    model = ChatRAGBlend(
        model=config.model,
        home=str(engine.home),
        collection=config.collection,
        device=config.device,
        dtype=config.dtype,
        register_retrieved=False,
        max_tokens=max_tokens,
        cache=False,
        **mode.arguments,
    )
    assert model.backend.engine is engine, engine.config
    return model


def ask(mode: str, models: Models, passages: Sequence[str], question: str) -> tuple[ModeAnswer, list[Call]]:
    """The mode's answer, timed, and the calls that it took."""
    watch = Watch()
    inputs = {"input_documents": [Document(text) for text in passages], "question": question}
    with _quiet():
        chain = load_chain(mode, models)
        begun = perf_counter()
        try:
            said = chain.invoke(inputs, {"callbacks": [watch]})
        except RagBlendError:
            raise
        except ValueError as error:  # LangChain's, when extracts do not fit, however often shortened
            raise BenchError(
                f"LangChain's {mode} gave up ({error}); pass --passages N to read fewer"
            ) from error
        ended = perf_counter()
    # map_rerank's answer is known after its last candidate; the other modes' last call generates the answer.
    last = watch.calls[-1]
    first_ms = 1000 * (watch.last_end - begun) - (last["total_ms"] - last["ttft_ms"])
    unscored = None
    if mode == "map_rerank":
        first_ms = 1000 * (ended - begun)
        unscored = sum(step["score"] == UNSCORED for step in said["intermediate_steps"])
    read, wrote = (sum(call[name] for call in watch.calls) for name in ("input_tokens", "output_tokens"))
    return ModeAnswer(said["output_text"], first_ms, len(watch.calls), read, wrote, unscored), watch.calls


def load_chain(mode: str, models: Models) -> BaseCombineDocumentsChain:
    """The chain with LangChain's own prompts; only the parser of scores is replaced."""
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress advice in the log: LangChain's to build agents, and ours about map_reduce's last prompt."""
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
    return not record.getMessage().startswith("no known passage stands in this prompt")


@contextmanager
def _known(engine: "Engine", passages: Sequence[str]) -> Iterator[None]:
    """Within the block the passages are recognised in prompts of all variants, so that all have the same token ids."""
    registry = Backend(home=str(engine.home), collection=engine.config.collection).registry
    named = [Passage(text) for text in passages]
    registry.add(named)
    try:
        yield
    finally:
        registry.remove([node_id_of(passage) for passage in named])


def _check(mode: Mode, passages: Sequence[str], calls: Sequence[Call]) -> None:
    """Raise BenchError for a passage that was not found or not stored: it would be computed exactly."""
    asked = mode.arguments["method"]
    if others := {call["method"] for call in calls} - {asked}:
        raise BenchError(f"{mode.variant} was served by {', '.join(others)} prefill; choose another --model")
    findable = sum(len(text) >= MINIMUM for text in passages)
    reused = sum(call["hits"] for call in calls)
    if asked != "full" and (reused < findable or any(call["misses"] for call in calls)):
        raise BenchError(
            f"{mode.variant} reused {reused} of {findable} passages, and would compute the others exactly; the store's "
            "budget is too small for one question, or another process is evicting"
        )
