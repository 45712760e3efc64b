"""Which rows a shift is added to, and what becomes of odd ones; what is added: test_shift_forms.py."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benches import chat, chunk_places, largest_error, make_prompt, make_text

from ragblend.engine.selection import METHODS, Policy, Shift, policy_named
from ragblend.engine.selection.evidence import Change
from ragblend.engine.selection.probe import Probe
from ragblend.engine.selection.shift import shift_of

TEXTS = [make_text(seed, words=20) for seed in range(4)]
FORMS = ("chunk", "common", "mix", "linear", "kernel")


@pytest.fixture
def stored(bench):
    bench.engine.encode(TEXTS)
    return bench


@pytest.mark.parametrize("form", FORMS)
def test_an_exact_chunk_is_never_shifted(stored, form):
    prompt = chat(stored, TEXTS)
    reused = stored.engine.prefill(prompt, method="reuse").cache
    found = stored.engine.prefill(prompt, method=f"probe:shift={form}", ratio=0.5)
    start, stop = chunk_places(prompt)[0]
    for layer in range(reused.geometry.layers):
        for a, b in zip(reused.span(layer, start, stop), found.cache.span(layer, start, stop), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_where_there_is_nothing_to_choose_nothing_is_shifted(stored, ratio):
    prompt = make_prompt(TEXTS)
    plain = stored.engine.prefill(prompt, method="reuse" if ratio == 0 else "recompute").logits
    found = stored.engine.prefill(prompt, method="probe-shift", ratio=ratio)
    assert largest_error(found.logits, plain) < 1e-4
    assert found.report.probe_rows == 0


class Probing(Policy):
    """Shifts rows of which it was told nothing, in many goes."""

    def rows(self, plan, probed=None):
        chosen = plan.always.clone()
        chosen[::2] = True
        return chosen.nonzero().squeeze(1)

    def corrects(self, plan):
        return True

    def correct(self, plan, change):
        return Shift(torch.zeros_like(change.stored_keys), torch.ones_like(change.stored_values))


def test_a_shift_is_there_before_the_first_row_looks(llama, monkeypatch):
    """Rows in several goes: the first must attend to what the change of the last one says."""
    import ragblend.engine.work as work

    llama.engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    whole = llama.engine.prefill(prompt, method=Probing(name="shifts"), ratio=0.5).logits
    monkeypatch.setattr(work, "BATCH_ROWS", 8)
    assert torch.equal(llama.engine.prefill(prompt, method=Probing(name="shifts"), ratio=0.5).logits, whole)
    assert largest_error(llama.engine.prefill(prompt, method="reuse").logits, whole) > 1e-2


def test_rows_of_an_earlier_probe_are_not_shifted(llama, monkeypatch):
    """They are right already."""
    llama.engine.encode(TEXTS)
    prompt = llama.engine.tokenize(make_prompt(TEXTS))
    seen, rows = [], Probe.rows
    monkeypatch.setattr(Probe, "rows", lambda *a: seen.append(a) or rows(*a))
    shifted = llama.engine.prefill(prompt, method="probe:passes=2,shift=common", ratio=0.6).cache
    done = seen[-1][2].computed.nonzero().squeeze(1)
    truth = llama.kv(prompt.token_ids)[1]
    assert done.numel() > 3
    for found, expected in zip(shifted.span(1, 0, len(prompt.token_ids)), truth, strict=True):
        assert largest_error(found[:, done], expected[:, done]) < 1e-4


def test_shifts_are_listed():
    assert METHODS["probe-shift"].corrects and policy_named("probe:shift=none").shift == "none"


def made_up_change(key_size=8, value_size=8, dtype=torch.float32):
    """(plan, change): two chunks behind five rows, 30 of 100 rows computed, changes that hang on what is stored."""
    generator = torch.Generator().manual_seed(3)
    plan = SimpleNamespace(
        tokens=110,
        token_ids=torch.zeros(110, dtype=torch.long),
        spans=[SimpleNamespace(start=5, stop=65), SimpleNamespace(start=65, stop=105)],
    )
    rows = torch.randperm(100, generator=generator)[:30].sort().values + 5
    stored = [torch.randn(2, 100, size, generator=generator).to(dtype) for size in (key_size, value_size)]
    mixed = [
        part.float() @ torch.randn(part.shape[-1], part.shape[-1], generator=generator) for part in stored
    ]
    changes = [part[:, rows - 5] * 0.3 + 0.5 for part in mixed]
    change = Change(
        layer=0,
        rows=rows,
        keys=changes[0],
        values=changes[1],
        start=5,
        stop=105,
        stored_keys=stored[0],
        stored_values=stored[1],
        still=lambda keys, positions: keys,
    )
    return plan, change


@pytest.mark.parametrize(("form", "error"), [("linear", 0.02), ("kernel", 0.02)])
def test_bfloat16_says_what_float32_says(form, error):
    plan, change = made_up_change(dtype=torch.bfloat16)
    wide = replace(change, stored_keys=change.stored_keys.float(), stored_values=change.stored_values.float())
    short, exact = shift_of(form, 0.8, plan, change), shift_of(form, 0.8, plan, wide)
    assert short.keys.dtype == torch.bfloat16
    for found, wanted in ((short.keys, exact.keys), (short.values, exact.values)):
        assert wanted.norm() > 1
        assert (found.float() - wanted).norm() < error * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_oracle_puts_the_truth_in_whatever_the_dtype(dtype):
    plan, change = made_up_change(dtype=dtype)
    truth = [torch.randn(2, 110, 8).to(dtype) for _ in ("keys", "values")]
    cache = SimpleNamespace(
        span=lambda layer, start, stop: (truth[0][:, start:stop], truth[1][:, start:stop])
    )
    policy = policy_named("transplant").given(cache, METHODS["heads"])
    policy._chosen[:] = [change.rows]
    shift, at = policy.correct(plan, change), change.rows - change.start
    for added, stored, true in zip(
        (shift.keys, shift.values), (change.stored_keys, change.stored_values), truth, strict=True
    ):
        assert largest_error(stored[:, at].float() + added[:, at], true[:, change.rows].float()) < 1e-6


@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
def test_a_row_much_larger_than_all_others_leaves_numbers(size):
    """Some models have them; in bfloat16 its square rounds off more than its distance to its like."""
    plan, change = made_up_change(dtype=torch.bfloat16)
    change.stored_keys[:, change.rows[:2] - change.start] = size
    change.stored_keys[:, 90] = size
    shift = shift_of("kernel", 0.8, plan, replace(change, known={}))
    assert shift.keys.isfinite().all() and shift.values.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_rows_that_are_all_alike_tell_no_distance(dtype):
    """A passage of one word again and again, and other rows beside it."""
    plan, change = made_up_change(dtype=dtype)
    for part in (change.stored_keys, change.stored_values):
        part[:, change.rows - change.start] = part[:, :1].clone()
    shift = shift_of("kernel", 0.8, plan, change)
    assert shift.keys.isfinite().all() and shift.values.isfinite().all()


def test_far_from_all_computed_rows_nothing_is_shifted():
    plan, change = made_up_change()
    change.stored_keys[:, 95] = 1e4
    shift = shift_of("kernel", 0.8, plan, change)
    assert 95 + change.start not in change.rows
    assert shift.keys[:, 95].norm() < 0.01 * shift.keys.norm(dim=(0, 2)).median()


def test_of_one_computed_row_nothing_is_learnt():
    plan, change = made_up_change()
    alone = replace(change, rows=change.rows[:1], keys=change.keys[:, :1], values=change.values[:, :1])
    assert shift_of("kernel", 0.8, plan, alone) is None
    two = replace(change, rows=change.rows[:2], keys=change.keys[:, :2], values=change.values[:, :2])
    assert shift_of("kernel", 0.8, plan, two).keys.isfinite().all()


def test_keys_may_be_wider_than_values():
    plan, change = made_up_change(key_size=8, value_size=4)
    shift = shift_of("kernel", 0.8, plan, change)
    assert shift.keys.shape == change.stored_keys.shape and shift.values.shape == change.stored_values.shape
    assert shift.keys.norm() > 1 and shift.values.norm() > 1


def test_values_narrower_than_keys():
    """The two have regressions of their own then; each says what it says beside others of its size."""
    plan, change = made_up_change(key_size=8, value_size=4)
    found = shift_of("linear", 0.8, plan, change)
    keys_alone = replace(change, values=change.keys, stored_values=change.stored_keys)
    values_alone = replace(change, keys=change.values, stored_keys=change.stored_values)
    torch.testing.assert_close(found.keys, shift_of("linear", 0.8, plan, keys_alone).keys)
    torch.testing.assert_close(found.values, shift_of("linear", 0.8, plan, values_alone).values)
