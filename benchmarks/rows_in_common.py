"""Measures how much the question matters to a method: which rows it selects for two questions on the same passages.

    python -m benchmarks.rows_in_common --methods a3,prophet,probe-shift --ratio 0.15

The questions are those of `--figures`: eight for each set of passages, about different things. In common: the mean,
over all pairs of questions of a set, of the share of one's rows that the other has as well; by chance it would be the
ratio. `the question's` leaves out rows that all eight questions have.
"""

from collections.abc import Iterator
from itertools import combinations, groupby
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common import AnyHome, Model, markdown, opened, run
from benchmarks.method_pictures import watched
from ragblend.measuring.figures import figure_questions
from ragblend.measuring.prefilling import stored
from ragblend.measuring.quality import build_prompt

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine

ANSWER_TOKENS = 40


def chosen(engine: "Engine", method: str, ratio: float, sets: int) -> Iterator[list[set[int]]]:
    """For each set of passages, the rows that are selected for each of its questions."""
    from ragblend.engine.selection import policy_named

    for _, questions in groupby(figure_questions(sets, orders=1), lambda each: each.passages):
        of_set = list(questions)
        with stored(engine, of_set[0].passages, keep=True):
            rows = []
            for question in of_set:
                policy, seen = watched(policy_named(method))
                engine.prefill(build_prompt(engine, question, ANSWER_TOKENS), method=policy, ratio=ratio)
                assert seen.plan is not None
                last = seen.steps[-1][1]
                rows.append(set(last[seen.plan.candidates.cpu()[last]].tolist()))
            yield rows


def in_common(sets: list[list[set[int]]]) -> tuple[float, float]:
    """The share over all pairs, and without rows that all questions of a set have."""
    plain, own = [], []
    for rows in sets:
        of_all = set.intersection(*rows)
        for one, other in combinations(rows, 2):
            plain.append(len(one & other) / max(1, len(one)))
            if one > of_all:
                own.append(len((one & other) - of_all) / len(one - of_all))
    return fmean(plain), fmean(own) if own else 1.0


def main(
    methods: str = "a3,cacheblend,epic,prophet,probe,probe-shift",
    ratio: float = 0.15,
    sets: Annotated[int, typer.Option(min=1, help="Of passages, eight questions each.")] = 4,
    model: Model = "default",
    home: AnyHome = None,
) -> None:
    """Print a table of the methods."""
    table = []
    with opened(model, home) as engine:
        for method in methods.split(","):
            plain, own = in_common(list(chosen(engine, method, ratio, sets)))
            table.append([f"`{method}`", f"{plain:.0%}", f"{own:.0%}"])
    print(markdown(["method", "rows in common", "the question's"], table))


if __name__ == "__main__":
    run(main, __doc__)
