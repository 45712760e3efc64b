"""Moving keys, against rotation as complex numbers in float64."""

import pytest
import torch

from ragblend.engine.model.rope import HALF, INTERLEAVED, Rope, angles, move_keys, rotate_

HEADS, TOKENS, SIZE = 2, 7, 16


def make_keys(dtype=torch.float32):
    return torch.randn(HEADS, TOKENS, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)


def frequencies(rotated=SIZE):
    return 10_000.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


def rotated_by_hand(keys, positions, inv_freq, layout=HALF):
    """As complex numbers, in float64: the definition."""
    pairs, size = inv_freq.numel(), 2 * inv_freq.numel()
    out = keys.double().clone()
    for pair in range(pairs):
        one, two = (2 * pair, 2 * pair + 1) if layout == INTERLEAVED else (pair, pair + pairs)
        assert max(one, two) < size
        turned = torch.complex(out[..., one], out[..., two]) * torch.exp(
            1j * positions * inv_freq[pair].double()
        )
        out[..., one], out[..., two] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("rotated", [SIZE, SIZE // 2])
@pytest.mark.parametrize("layout", [HALF, INTERLEAVED])
def test_keys_rotate_by_their_delta(layout, rotated):
    rope = Rope(frequencies(rotated), layout)
    keys, deltas = make_keys(), torch.tensor([0, 1, -3, 100, 2000, -1500, 31])
    expected = rotated_by_hand(keys, deltas.double(), rope.inv_freq, layout)
    assert torch.allclose(move_keys(keys, deltas, rope).double(), expected, atol=2e-3)
    assert torch.allclose(
        move_keys(keys, 37, rope).double(),
        rotated_by_hand(keys, torch.tensor(37.0, dtype=torch.float64), rope.inv_freq, layout),
        atol=1e-5,
    )
    assert torch.equal(move_keys(keys, deltas, rope)[..., rotated:], keys[..., rotated:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_delta_of_zero_is_the_identity_bit_for_bit(dtype):
    keys = make_keys(dtype)
    keys[0, 0, 0], keys[0, 0, 1] = -0.0, float("nan")
    moved = move_keys(keys, 0, Rope(frequencies()))
    assert torch.equal(moved.view(torch.uint8), keys.contiguous().view(torch.uint8))
    plain = make_keys(dtype)
    assert torch.equal(move_keys(plain, torch.zeros(TOKENS, dtype=torch.long), Rope(frequencies())), plain)


def test_rotating_a_view_in_place_changes_nothing_else():
    """As the loader does it, in the middle of the fused buffers."""
    buffer = torch.randn(HEADS, 20, SIZE, generator=torch.Generator().manual_seed(1))
    before = buffer.clone()
    rotate_(buffer[:, 5:12], *angles(9, frequencies()), Rope(frequencies()))
    assert torch.equal(buffer[:, :5], before[:, :5])
    assert torch.equal(buffer[:, 12:], before[:, 12:])
    assert torch.equal(buffer[:, 5:12], move_keys(before[:, 5:12], 9, Rope(frequencies())))


def test_bfloat16_is_rounded_once():
    """Trig and products in float32: the error is that of one rounding, however far the keys move."""
    keys, rope = make_keys(torch.bfloat16), Rope(frequencies())
    exact = rotated_by_hand(keys, torch.tensor(5000.0, dtype=torch.float64), rope.inv_freq)
    moved = move_keys(keys, 5000, rope).double()
    assert float(((moved - exact).abs() / exact.abs().clamp_min(0.05)).max()) < 2**-8 + 2e-2
