"""Other ways to answer from many passages: LangChain's chains and LlamaIndex's synthesizers, on the same engine.

map_reduce, map_rerank and refine are LangChain's own chains with LangChain's own prompts (`modes_chains.py`);
llama-tree_summarize and llama-refine are LlamaIndex's own (`modes_llama_index.py`). They are asked the same question
over the same passages; each call is read in full, or by a method (`refine+cacheblend`). Their prompts are others than
full prefill's, so only their answers, times and token counts can be compared with it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ragblend.app.bench.prefilling import BenchError
from ragblend.app.bench.variants import LANGCHAIN_MODES, LLAMA_INDEX_MODES, Variant
from ragblend.integrations.backend import Backend
from ragblend.integrations.finding import MINIMUM
from ragblend.integrations.passages import Passage, node_id_of
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine

PACKAGES = ("langchain_core", "langchain_classic")
LLAMA_INDEX_PACKAGES = ("llama_index.core",)
# What map_reduce takes out of one passage is no answer: LangChain asks for "any relevant text verbatim".
EXTRACT_TOKENS = 128
SCORE_TOKENS = 16  # for map_rerank's "Score: 100" behind its answer


@dataclass(frozen=True)
class ModeAnswer:
    """A mode's answer; ttft_ms from the start of its first call to its answer's first token; tokens of all calls.

    unscored: how many of map_rerank's candidates came without a score; None for the other modes.
    """

    text: str
    ttft_ms: float
    calls: int
    prompt_tokens: int
    generated_tokens: int
    unscored: int | None = None


@dataclass(frozen=True)
class Call:
    """One call as it was answered; after_first_ms: from its first token to its end."""

    prompt_tokens: int
    generated_tokens: int
    method: str
    hits: int
    misses: int
    after_first_ms: float

    @classmethod
    def of(cls, prompt_tokens: int, generated_tokens: int, kv: dict[str, Any]) -> "Call":
        """kv: as our adapters put it in what a call answers."""
        after_first_ms = kv["total_ms"] - kv["ttft_ms"]
        return cls(prompt_tokens, generated_tokens, kv["method"], kv["hits"], kv["misses"], after_first_ms)


Answered = tuple[ModeAnswer, tuple[Call, ...]]


def answer_of(text: str, ttft_ms: float, calls: Sequence[Call], unscored: int | None = None) -> Answered:
    """The answer with the sums over its calls."""
    prompt_tokens = sum(call.prompt_tokens for call in calls)
    generated_tokens = sum(call.generated_tokens for call in calls)
    return ModeAnswer(text, ttft_ms, len(calls), prompt_tokens, generated_tokens, unscored), tuple(calls)


def check_packages(variants: Sequence[Variant]) -> None:
    """Raise UsageError if a mode's framework is not installed: now, and not after an hour of measuring."""
    asked = {variant.mode for variant in variants}
    for modes, framework, packages, extra in (
        (LANGCHAIN_MODES, "LangChain", PACKAGES, "[langchain]"),
        (LLAMA_INDEX_MODES, "LlamaIndex", LLAMA_INDEX_PACKAGES, "[llama-index]"),
    ):
        missing = " and ".join(name for name in packages if not _is_installed(name))
        if missing and asked.intersection(modes):
            raise UsageError(
                f"--methods: the modes {', '.join(modes)} are {framework}'s and need {missing}, which is not "
                f"installed: pip install 'ragblend{extra}'"
            )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def settings() -> dict[str, Any]:
    """What a mode's numbers depend on besides the engine: how long its calls may be, and the frameworks' versions."""
    packages = {name: _version(name) for name in (*PACKAGES, *LLAMA_INDEX_PACKAGES)}
    return {"extract_tokens": EXTRACT_TOKENS, "score_tokens": SCORE_TOKENS, **packages}


def _version(name: str) -> str | None:
    try:
        return version(name.replace("_", "-").replace(".", "-"))
    except PackageNotFoundError:
        return None


def answer(
    engine: "Engine",
    variant: Variant,
    passages: Sequence[str],
    question: str,
    max_new_tokens: int,
    extract_tokens: int = EXTRACT_TOKENS,
) -> ModeAnswer:
    """Ask the mode. The passages' KV must be in the store, for those whose calls are fused.

    extract_tokens: of what map_reduce takes out of one passage. Raises BenchError where something else would have been
    measured; PromptTooLongError.
    """
    with _known(engine, passages):
        if variant.mode in LLAMA_INDEX_MODES:
            from ragblend.app.bench import modes_llama_index

            said, calls = modes_llama_index.ask(engine, variant, passages, question, max_new_tokens)
        else:
            said, calls = _ask_langchain(engine, variant, passages, question, max_new_tokens, extract_tokens)
    _check(variant, passages, calls)
    return said


def _ask_langchain(
    engine: "Engine",
    variant: Variant,
    passages: Sequence[str],
    question: str,
    max_new_tokens: int,
    extract_tokens: int,
) -> Answered:
    from ragblend.app.bench.modes_chains import Models, ask, chat_model

    assert variant.mode is not None, variant
    models = Models(
        answering=chat_model(engine, variant, max_new_tokens),
        extracting=chat_model(engine, variant, extract_tokens),
        scoring=chat_model(engine, variant, max_new_tokens + SCORE_TOKENS),
        prompt_tokens=engine.context_window - max_new_tokens,
    )
    return ask(variant.mode, models, passages, question)


@contextmanager
def _known(engine: "Engine", passages: Sequence[str]) -> Iterator[None]:
    """Inside the block the passages are found in prompts: in every variant's, so that all read the same token ids."""
    registry = Backend(home=str(engine.home), collection=engine.config.collection).registry
    named = [Passage(text) for text in passages]
    registry.add(named)
    try:
        yield
    finally:
        registry.remove([node_id_of(passage) for passage in named])


def _check(variant: Variant, passages: Sequence[str], calls: Sequence[Call]) -> None:
    """A passage that is not found or not stored is computed exactly, and looks perfect."""
    asked = variant.arguments["method"]
    if others := {call.method for call in calls} - {asked}:
        raise BenchError(f"{variant} was served by {', '.join(others)} prefill; choose another --model")
    findable = sum(len(text) >= MINIMUM for text in passages)
    reused = sum(call.hits for call in calls)
    if asked != "full" and (reused < findable or any(call.misses for call in calls)):
        raise BenchError(
            f"{variant} reused {reused} of {findable} passages, and would compute the others exactly; the store's "
            "budget is too small for one question, or another process is evicting"
        )
