"""`variant` is `probe-shift` with parts changed: each parameter changes only its part."""

from unittest.mock import patch

import pytest
from bench_fixtures import some_text

from benchmarks.shift_variants import VARIANT
from ragblend.engine.prompts.segments import Chunk
from ragblend.engine.selection import METHODS, policy_named
from ragblend.kvstore.errors import UsageError

TEXTS = [some_text(seed, 120) + f" It has {seed}41 seats." for seed in range(3)]


@pytest.fixture
def logits(shared_engine):
    """logits(method): of a prompt over TEXTS, at a third of the stored tokens."""
    engine = shared_engine
    engine.encode(TEXTS)
    prompt = engine.tokenize(engine.chat_prompt(None, [Chunk(text) for text in TEXTS], "How many seats?"))
    return lambda method: engine.prefill(prompt, method=method, ratio=0.33).logits


def changed(**parameters):
    said = ",".join(f"{name}={value}" for name, value in parameters.items())
    with patch.dict(METHODS, {VARIANT.name: VARIANT}):
        return policy_named(f"variant:{said}")


def apart(one, two) -> float:
    return float((one - two).abs().max())


def test_the_default_variant_equals_probe_shift(logits):
    assert apart(logits(VARIANT), logits("probe-shift")) < 1e-5


def test_zero_factors_shift_nothing(logits):
    """What `probe` would give, had it the same rows."""
    unshifted = changed(keys=0, values=0)
    assert apart(logits(unshifted), logits(VARIANT)) > 1e-4
    assert apart(logits(unshifted), logits(changed(first=1))) < 1e-5


@pytest.mark.parametrize(
    "parameters",
    [{"keys": 0}, {"values": 0}, {"last": 0.5}, {"spared": "figures"}, {"spared": "looked-at"},
     {"scope": "passage"}, {"scope": "mean"}],
)  # fmt: skip
def test_each_part_can_be_changed(logits, parameters):
    found = logits(changed(**parameters))
    assert found.isfinite().all()
    assert apart(found, logits(VARIANT)) > 1e-6


@pytest.mark.parametrize("parameters", [{"scope": "wide"}, {"spared": "words"}, {"figure_gain": -1}])
def test_invalid_parameters_are_refused(parameters):
    with pytest.raises(UsageError, match=next(iter(parameters))):
        changed(**parameters)
