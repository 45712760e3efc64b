"""`ragblend bench quality` with more methods and questions, for developers.

    python -m benchmarks.quality --figures --methods full,probe-shift,variant:keys=0 --ratios 0.15
    python -m benchmarks.quality --generate ruler:multi_value,tokens=4000,n=20 --methods full,cacheblend

`variant` is `probe-shift` with parts changed (`shift_variants.py`; a changed one needs `--fresh`). `--generate` makes
questions (`tasks.py`). All other options are the product's.
"""

from dataclasses import replace
from unittest.mock import patch

from benchmarks.common import product_app, run_product_app
from benchmarks.questions import Form, Generate, write_questions
from ragblend.app.cli.common import Cli
from ragblend.app.quality import cli as product
from ragblend.app.quality.requests import QualityRequest
from ragblend.app.quality.sources import QuestionSource


def quality(
    cli: Cli, source: QuestionSource, request: QualityRequest, generate: Generate = None, form: Form = None
) -> None:
    """Compare methods with full prefill, on questions of any format."""
    from benchmarks.shift_variants import VARIANT
    from ragblend.engine.selection import METHODS

    with patch.dict(METHODS, {VARIANT.name: VARIANT}):
        if generate or form:
            made = request.output / "questions.json"
            write_questions(cli, made, generate or [], source.data, form)
            source = replace(source, data=made)
        product.show_quality(cli, source, request)


if __name__ == "__main__":
    run_product_app(product_app(quality))
