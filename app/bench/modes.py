"""Other ways to answer from many passages: LangChain's map_reduce, map_rerank and refine, on the same engine.

They are LangChain's own chains with LangChain's own prompts (`modes_chains.py`), asked the same question over the
same passages; each call is read in full, or by a method (`refine+cacheblend`). Their prompts are others than full
prefill's, so only their answers, times and token counts can be compared with it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ragblend.app.bench.prefilling import BenchError
from ragblend.app.bench.variants import Variant
from ragblend.integrations.backend import Backend
from ragblend.integrations.finding import MINIMUM
from ragblend.integrations.passages import Passage, node_id_of
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.app.bench.modes_chains import Call
    from ragblend.engine.engine import Engine

PACKAGES = ("langchain_core", "langchain_classic")
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


def check_packages() -> None:
    """Raise UsageError if LangChain is not installed: now, and not after an hour of measuring."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise UsageError(
            f"--methods: the modes map_reduce, map_rerank and refine are LangChain's and need {names}, which is not "
            "installed: pip install 'ragblend[langchain]'"
        )


def settings() -> dict[str, Any]:
    """What a mode's numbers depend on besides the engine: how long its calls may be, and LangChain's own versions."""
    packages = {name: version(name.replace("_", "-")) for name in PACKAGES}
    return {"extract_tokens": EXTRACT_TOKENS, "score_tokens": SCORE_TOKENS, **packages}


def answer(
    engine: "Engine",
    variant: Variant,
    passages: Sequence[str],
    question: str,
    max_new_tokens: int,
    extract_tokens: int = EXTRACT_TOKENS,
) -> ModeAnswer:
    """Ask the mode. The passages' KV must be in the store, for those whose calls are fused.

    Raises BenchError where something else would have been measured; PromptTooLongError.
    """
    from ragblend.app.bench.modes_chains import Models, ask, chat_model

    assert variant.mode is not None, variant
    models = Models(
        answering=chat_model(engine, variant, max_new_tokens),
        extracting=chat_model(engine, variant, extract_tokens),
        scoring=chat_model(engine, variant, max_new_tokens + SCORE_TOKENS),
        prompt_tokens=engine.context_window - max_new_tokens,
    )
    with _known(engine, passages):
        said, calls = ask(variant.mode, models, passages, question)
    _check(variant, passages, calls)
    return said


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


def _check(variant: Variant, passages: Sequence[str], calls: "Sequence[Call]") -> None:
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
