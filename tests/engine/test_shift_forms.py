"""The forms of a shift against their formulas: row by row, in double precision, on a layer's true change."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from benches import chunk_places, largest_error, make_prompt, make_text

from ragblend.engine.selection import kernel
from ragblend.engine.selection.evidence import Change
from ragblend.engine.selection.probe import Probe

TEXTS = [make_text(seed, words=20) for seed in range(4)]


@dataclass(frozen=True)
class LayerOne:
    """Layer 1 of a prompt: there the computed rows get full prefill's own KV, so that the sums need nothing of ours.

    truth, stale, found: keys and values (heads, tokens, D) as full prefill has them, as stored, and shifted by half.
    chunk: of each row that is of a chunk, its number; picked: the computed ones among them.
    """

    truth: tuple[torch.Tensor, torch.Tensor]
    stale: tuple[torch.Tensor, torch.Tensor]
    found: tuple[torch.Tensor, torch.Tensor]
    inv_freq: torch.Tensor
    tokens: int
    chunk: dict[int, int]
    starts: list[int]
    picked: list[int]

    def left(self):
        """The rows of chunks that were not computed."""
        return [row for row in self.chunk if row not in self.picked]

    def held(self, row, kind, kv=None):
        """(heads, D): a row's stored keys (kind 0), turned back to position 0, or values (1)."""
        own = (self.stale if kv is None else kv)[kind][:, row]
        return own.double() if kind else turned(own, -row, self.inv_freq)

    def change(self, row, kind):
        return self.held(row, kind, self.truth) - self.held(row, kind)

    def assert_shifted(self, row, kind, by):
        """by (heads, D): what is to have been added to the row's keys, turned back to position 0, or to its values."""
        by = by if kind else turned(by, row, self.inv_freq)
        for now, before, added in zip(self.found[kind][:, row], self.stale[kind][:, row], by, strict=True):
            assert largest_error(now, before + added) < 1e-3

    def assert_moved(self, row, kind, by_more_than):
        for now, before in zip(self.found[kind][:, row], self.stale[kind][:, row], strict=True):
            assert largest_error(now, before) > by_more_than


def turned(vectors, position, inv_freq):
    """Keys (..., D) of half-split pairs turned by so many tokens, pair by pair as complex numbers."""
    half, vectors = inv_freq.numel(), vectors.double()
    angles = position * inv_freq.double()
    pairs = torch.complex(vectors[..., :half], vectors[..., half : 2 * half])
    numbers = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag, vectors[..., 2 * half :]], dim=-1)


@pytest.fixture
def shifted(bench, monkeypatch):
    """shifted(form): the LayerOne of four texts behind each other, 60% computed, half of the form's shift added."""
    bench.engine.encode(TEXTS)

    def prefilled(form):
        chosen, rows = [], Probe.rows
        monkeypatch.setattr(Probe, "rows", lambda *a: chosen.append(rows(*a)) or chosen[-1])
        prompt = bench.engine.tokenize(make_prompt(TEXTS))
        tokens, places = len(prompt.token_ids), chunk_places(prompt)
        reused = bench.engine.prefill(prompt, method="reuse").cache
        found = bench.engine.prefill(prompt, method=f"probe:shift={form},strength=0.5", ratio=0.6).cache
        chunk = {row: number for number, place in enumerate(places) for row in range(*place)}
        decoder = bench.engine._resources.decoder
        return LayerOne(
            truth=bench.kv(prompt.token_ids)[1],
            stale=reused.span(1, 0, tokens),
            found=found.span(1, 0, tokens),
            inv_freq=decoder.ropes[decoder.layer_types[1]],
            tokens=tokens,
            chunk=chunk,
            starts=[start for start, _ in places],
            picked=[row for row in chosen[-1].tolist() if row in chunk],
        )

    return prefilled


def drawn_mean(layer, number, changes, brake):
    """Of changes {row: vector} a chunk's mean, drawn to that of all as if so many more rows had had it."""
    own = [change for row, change in changes.items() if layer.chunk[row] == number]
    common = sum(changes.values()) / len(changes)
    if not own:
        return common if brake else torch.zeros_like(common)
    return (sum(own) + brake * common) / (len(own) + brake)


@pytest.mark.parametrize(("form", "brake"), [("chunk", 0), ("mix", 16), ("common", 1e9)])
def test_the_forms_that_are_means(shifted, form, brake):
    layer = shifted(form)
    rows, size = len(layer.picked), layer.stale[0].shape[-1]
    for kind in (0, 1):
        changes = {row: layer.change(row, kind) for row in layer.picked}
        for row in layer.left():
            by = drawn_mean(layer, layer.chunk[row], changes, brake) * 0.5 * rows / (rows + 1.5 * size)
            layer.assert_shifted(row, kind, by)
        # Together, because a chunk without a change of its own has no mean.
        assert largest_error(layer.found[kind][:, layer.left()], layer.stale[kind][:, layer.left()]) > 0.01


def test_the_linear_form_is_ridge_regression_on_the_computed_rows(shifted):
    """By least squares; a head's own keys or values and the place alone say what becomes of them."""
    layer, trusted = shifted("linear"), []
    size = layer.stale[0].shape[-1]
    for kind in (0, 1):
        spread = torch.stack([layer.held(row, kind) for row in layer.picked]).std()
        heads = [LinearByHand(layer, head, kind, spread) for head in (0, 1)]
        trusted += [each.trust(row) for each in heads for row in layer.left()[::7]]
        strength = 0.5 * len(layer.picked) / (len(layer.picked) + 1.5 * size)
        for row in layer.left()[::7]:
            layer.assert_shifted(row, kind, strength * torch.stack([each.says(row) for each in heads]))
            layer.assert_moved(row, kind, by_more_than=1e-3)
    assert min(trusted) < 0.5 < max(trusted) == 1


class LinearByHand:
    """One head's regression."""

    def __init__(self, layer, head, kind, spread):
        self.layer, self.head, self.kind, self.spread = layer, head, kind, spread
        picked = layer.picked
        self.changes = {row: layer.change(row, kind)[head] for row in picked}
        self.centre = sum(self.features(row) for row in picked) / len(picked)
        system = torch.stack([self.features(row) - self.centre for row in picked])
        wanted = torch.stack([self.changes[row] - self.mean(row) for row in picked])
        count, size = system.shape[1], wanted.shape[1]
        ridge = 4 * count / len(picked) * float((system**2).sum(0).mean()) + 1e-6
        damped = torch.cat([system, math.sqrt(ridge) * torch.eye(count, dtype=torch.float64)])
        right = torch.cat([wanted, torch.zeros(count, size, dtype=torch.float64)])
        self.weights = torch.linalg.lstsq(damped, right).solution
        self.scales = (system**2).sum(0) + ridge
        self.typical = sum(float((each**2 / self.scales).sum()) for each in system) / len(picked)

    def features(self, row):
        place = row - self.layer.starts[self.layer.chunk[row]]
        where = [1 / (1 + place), math.log1p(place) / 6, row / self.layer.tokens]
        where = 3 * self.spread * torch.tensor(where, dtype=torch.float64)
        return torch.cat([self.layer.held(row, self.kind)[self.head], where])

    def mean(self, row):
        return drawn_mean(self.layer, self.layer.chunk[row], self.changes, 16)

    def trust(self, row):
        away = float(((self.features(row) - self.centre) ** 2 / self.scales).sum()) / self.typical
        return 1 / (1 + 8 * max(0.0, away - 1))

    def says(self, row):
        return self.mean(row) + self.trust(row) * ((self.features(row) - self.centre) @ self.weights)


@pytest.mark.parametrize("most", [768, 12])
def test_the_kernel_form_is_kernel_ridge_regression_on_the_computed_rows(shifted, monkeypatch, most):
    """One pair of rows at a time; of too many computed rows some are learnt from."""
    monkeypatch.setattr(kernel, "MOST_LEARNT", most)
    layer = shifted("kernel")
    picked, left = layer.picked, layer.left()[::7]
    if most < len(picked):
        picked = [picked[int((place + 0.5) * len(picked) / most)] for place in range(most)]

    def features(row):
        parts = []
        for kind in (0, 1):
            known = torch.stack([layer.held(each, kind) for each in picked])
            mean = known.mean(0)
            parts.append((layer.held(row, kind) - mean).flatten() / (known - mean).square().mean().sqrt())
        return torch.cat(parts)

    feature = {row: features(row) for row in {*picked, *left}}

    def squared(one, other):
        return float((feature[one] - feature[other]).square().sum())

    pairs = [squared(a, b) for a in picked for b in picked if a != b]
    typical = sum(pairs) / len(pairs)

    def alike(one, other):
        near = 2 * math.exp(-abs(one - other) / 128) if layer.chunk[one] == layer.chunk[other] else 0
        return (1 + near) / math.sqrt(1 + squared(one, other) / (0.25 * typical))

    system = torch.tensor([[alike(a, b) for b in picked] for a in picked], dtype=torch.float64)
    system += 0.3 * torch.eye(len(picked), dtype=torch.float64)
    strength = 0.5 * len(picked) / (len(picked) + layer.stale[0].shape[-1] / 2)
    for kind in (0, 1):
        changes = torch.stack([layer.change(row, kind) for row in picked])
        weights = torch.linalg.solve(system, changes.flatten(1))
        for row in left:
            likeness = torch.tensor([alike(row, each) for each in picked], dtype=torch.float64)
            layer.assert_shifted(row, kind, strength * (likeness @ weights).view_as(changes[0]))
            layer.assert_moved(row, kind, by_more_than=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_in_bfloat16_a_row_far_from_all_others_is_still_like_its_twin(seed):
    """Its square needs more digits than bfloat16 has: rounded to one number, the twins would seem far apart."""
    torch.manual_seed(seed)
    stored = torch.randn(2, 2, 400, 16)
    stored[:, :, 20:22] = 100 * torch.randn(2, 2, 1, 16)
    stored = stored.bfloat16()
    rows = torch.arange(0, 400, 2)
    changes = torch.randn(2, 2, len(rows), 16)
    plan = SimpleNamespace(spans=[SimpleNamespace(start=0, stop=400)])

    def shifted(dtype):
        keys, values = stored.to(dtype)
        change = Change(
            0, rows, *changes, start=0, stop=400, stored_keys=keys, stored_values=values, still=None
        )
        return kernel.kernel_shift(1.0, plan, change).keys[:, 21].double()

    exact = shifted(torch.float32)
    assert exact.norm() > 1
    assert largest_error(shifted(torch.bfloat16), exact) < 0.05
