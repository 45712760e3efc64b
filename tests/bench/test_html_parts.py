"""The pages' pieces: whatever a model, a document or a user has said is shown as text, and never read as HTML."""

import pytest

from ragblend.app.bench.data import Question
from ragblend.app.bench.html_parts import ReadyCell, table
from ragblend.app.bench.prompt_page import prompt_page
from ragblend.app.bench.records import Record


@pytest.mark.parametrize("evil", ["<td><script>alert(1)</script>", "<td>", "<th>", "<script>"])
def test_a_cell_that_looks_ready_made_is_escaped(evil) -> None:
    """The bug: what began with `<td` was taken for a cell of ours, and a model's answer may begin so."""
    shown = table(["a", evil], [[evil, "b"]])
    assert "<script" not in shown
    assert shown.count("<td") == shown.count("<th") - shown.count("<thead") == 2


def test_only_our_own_cells_are_taken_as_they_are() -> None:
    assert '<td class="better">1</td>' in table(["a"], [[ReadyCell('<td class="better">1</td>')]])


def test_an_answer_that_begins_with_a_cell_runs_no_script_on_the_prompts_page() -> None:
    from ragblend.app.bench.inspecting import Look

    question = Question(0, "why?", ("passage",), ("answer",))
    record = Record(
        question=question.digest, method="full", ratio=None, kl=0.0, top1=1.0, exact_match=True, gold_match=False,
        f1=0.0, rouge_l=0.0, recomputed_fraction=1.0, ttft_ms=1.0, full_ttft_ms=1.0, prompt_tokens=9,
        answer="<td><script>alert(1)</script>",
    )  # fmt: skip
    shown = prompt_page(Look(question, ("text",), (0,), {}), [record])
    assert "<script" not in shown
    assert "&lt;td&gt;&lt;script&gt;alert(1)" in shown
