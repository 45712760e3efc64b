"""`python -m benchmarks.questions` writes files that the product reads."""

import pytest
from typer.testing import CliRunner

from benchmarks.common import product_app
from benchmarks.questions import questions
from ragblend.kvstore.errors import UsageError
from ragblend.measuring.data import load


@pytest.fixture
def write(model_folder, home, tmp_path):
    def write(*arguments):
        where = ["--model", model_folder, "--home", home, "--device", "cpu", "--dtype", "float32"]
        line = [str(part) for part in (*where, *arguments, "--out", tmp_path / "new" / "made.json")]
        CliRunner().invoke(product_app(questions), line, catch_exceptions=False)
        return load(tmp_path / "new" / "made.json").questions

    return write


def test_generated_lengths_use_the_models_tokenizer(write, engine) -> None:
    questions = write(
        "--generate", "two_hop,tokens=1200,chunk=300,n=2", "--generate", "ruler:multi_key,tokens=900,n=1"
    )
    assert [question.task for question in questions] == ["two_hop 1,200"] * 2 + ["multi_key 900"]
    assert sum(map(engine.count_tokens, questions[0].passages)) == pytest.approx(1200, rel=0.05)
    assert all(question.required for question in questions)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --generate, or --data"),
        (("--data", "a.json"), "--data with its --format"),
        (("--generate", "two_hop", "--data", "a.json"), "give --generate, or --data"),
        (("--generate", "multi_valu"), "did you mean 'multi_value'"),
    ],
)
def test_wrong_arguments_are_refused_before_a_model_is_loaded(write, home, arguments, said) -> None:
    with pytest.raises(UsageError, match=said):
        write(*arguments)
    assert not home.exists()
