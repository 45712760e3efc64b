"""`ragblend bench quality` with more variants and questions, for developers.

    python -m benchmarks.quality --methods full,cacheblend,map_reduce,refine+cacheblend --ratios 0.15
    python -m benchmarks.quality --generate ruler:multi_value,tokens=4000,n=20 --methods full,transplant:by=cacheblend

Modes are LangChain's ways to read passages (`modes.py`); `transplant:by=METHOD` is an oracle, which recomputes nothing
and copies full prefill's KV at the rows that METHOD selects; `variant` is `probe-shift` with parts changed
(`shift_variants.py`). `--generate` makes questions (`tasks.py`). All other options are the product's.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.common import product_app, run_product_app
from benchmarks.questions import Form, Generate, write_questions
from ragblend.app.cli.common import Cli
from ragblend.app.quality import cli as product
from ragblend.app.quality.requests import QualityRequest
from ragblend.app.quality.sources import QuestionSource
from ragblend.kvstore.errors import UsageError, install_hint
from ragblend.measuring.data import Question
from ragblend.measuring.quality import ExtraVariants, Measure, Outcome, outcome_of, record_of
from ragblend.measuring.records import Record
from ragblend.measuring.variants import (
    Variant,
    base_name,
    parse_pairs,
    parse_variants,
    split_methods,
    with_all,
)

if TYPE_CHECKING:
    from benchmarks.modes import Mode
    from ragblend.engine.engine import Engine
    from ragblend.engine.prompts.segments import Prompt

MODES = ("map_reduce", "map_rerank", "refine")
ORACLE = "transplant"


def quality(
    cli: Cli, source: QuestionSource, request: QualityRequest, generate: Generate = None, form: Form = None
) -> None:
    """Compare methods, modes (MODE+METHOD) and oracles with full prefill, on questions of any format."""
    from benchmarks.shift_variants import VARIANT
    from ragblend.engine.selection import METHODS

    with patch.dict(METHODS, {VARIANT.name: VARIANT}):
        names, others = parse(request.methods, request.ratios, request.compare or [])
        if generate or form:
            made = request.output / "questions.json"
            write_questions(cli, made, generate or [], source.data, form)
            source = replace(source, data=made)
        product.show_quality(cli, source, replace(request, methods=names), others)


def parse(methods: str, ratios: str, compare: list[str]) -> tuple[str, ExtraVariants]:
    """Split a list of methods into the engine's own, as a list again, and the others. Raises UsageError."""
    import ragblend.integrations
    from ragblend.engine.selection import METHODS, WITHOUT_RATIO, method_names

    names = split_methods(with_all(methods, METHODS))
    modes = [mode for name in names for mode in modes_of(name, ratios)]
    oracles = [
        Variant(name, each.ratio)
        for name in names
        if base_name(name) == ORACLE
        for each in parse_variants(ORACLE, ratios, [ORACLE], ())
    ]
    own = ",".join(name for name in names if base_name(name) != ORACLE and not modes_of(name, ratios))
    variants: dict[Variant, Measure] = {each: transplanted(each) for each in oracles}
    depends = None
    if modes:
        from benchmarks.modes import measuring, settings

        variants |= {mode.variant: measuring(mode) for mode in modes}
        depends = settings()
    if compare:  # modes have no divergence to compare
        parse_pairs(
            compare, [*(parse_variants(own, ratios, method_names(), WITHOUT_RATIO) if own else ()), *oracles]
        )
    code = tuple(Path(path) for path in ragblend.integrations.__path__) if modes else ()
    if any(base_name(name) == "variant" for name in names):
        code += (Path(__file__).parent,)
    return own, ExtraVariants(variants, depends, code)


def modes_of(name: str, ratios: str) -> "list[Mode]":
    """The modes that a name stands for; none for a method."""
    from ragblend.engine.selection import METHODS, WITHOUT_RATIO

    mode, plus, method = name.partition("+")
    if mode not in MODES:
        return []
    try:
        from benchmarks.modes import Mode
    except ModuleNotFoundError as error:
        raise UsageError(f"--methods: {mode!r} needs {error.name}: {install_hint('langchain')}") from error
    if not plus:
        return [Mode(mode)]
    return [
        Mode(mode, each.method, each.ratio) for each in parse_variants(method, ratios, METHODS, WITHOUT_RATIO)
    ]


def transplanted(oracle: Variant) -> Measure:
    """A function that measures the oracle. Raises UsageError for a wrong parameter."""
    from benchmarks.oracles import Transplant
    from ragblend.engine.selection.policy_names import with_parameters

    policy = with_parameters(Transplant(), oracle.method) if ":" in oracle.method else Transplant()
    assert isinstance(policy, Transplant)

    def measure(
        engine: "Engine",
        question: Question,
        prompt: "Prompt",
        reference: Outcome,
        max_new_tokens: int,
    ) -> Record:
        reference.prefilled.cache.truncate()  # remove the answer, which follows the prompt
        given = policy.given(reference.prefilled.cache)
        outcome = outcome_of(engine, prompt, oracle, reference, max_new_tokens, given)
        return record_of(question, oracle, reference, outcome, engine)

    return measure


if __name__ == "__main__":
    run_product_app(product_app(quality))
