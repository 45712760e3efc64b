"""Packed linear layers give the same numbers for any number of rows, only where that is faster."""

import pytest
import torch
from torch import nn

from ragblend.engine.model import packing
from ragblend.engine.model.packing import MAX_PACKED_ROWS, PackedLinear, can_pack, pack

needs_onednn = pytest.mark.skipif(
    not can_pack(), reason="this processor does not compute bfloat16 with oneDNN"
)


class Block(nn.Module):
    """What packing meets in a model: layers with and without bias, tied weights, and layers of other kinds."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.embed = nn.Embedding(48, 64, dtype=dtype)
        self.inner = nn.ModuleDict({"up": nn.Linear(64, 160, dtype=dtype)})
        self.head = nn.Linear(64, 48, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.special = type("Special", (nn.Linear,), {})(64, 8, dtype=dtype)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().requires_grad_(False).eval()


@needs_onednn
@pytest.mark.parametrize("rows", [1, 7, 64, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 700])
def test_packed_layers_give_the_same_numbers_for_any_number_of_rows(block, rows):
    hidden = torch.randn(1, rows, 64, dtype=torch.bfloat16)
    up = block.inner["up"]
    expected = nn.functional.linear(hidden.double(), up.weight.double(), up.bias.double())
    assert pack(block) == 2
    packed = block.inner["up"]
    assert isinstance(packed, PackedLinear)
    found = packed(hidden)
    assert found.shape == (1, rows, 160) and found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), expected, atol=2e-2, rtol=1e-2)


@needs_onednn
def test_only_passes_over_few_rows_use_the_packed_copy(block):
    pack(block)
    up = block.inner["up"]
    up.packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros_like(up.weight), 64)
    rows = torch.ones(1, MAX_PACKED_ROWS, 64, dtype=torch.bfloat16)
    assert torch.equal(up(rows)[0, 0], up.bias)
    assert not torch.equal(up(torch.cat([rows, rows], 1))[0, 0], up.bias)
    with pytest.raises(RuntimeError):
        up(rows.float())  # as a plain layer of bfloat16 refuses it


@needs_onednn
def test_packing_does_not_change_the_state_dict(block):
    before = {name: value.data_ptr() for name, value in block.state_dict().items()}
    assert pack(block) == 2
    assert {name: value.data_ptr() for name, value in block.state_dict().items()} == before
    assert block.head.weight is block.embed.weight
    assert (block.inner["up"].in_features, block.inner["up"].out_features) == (64, 160)
    assert type(block.special).__name__ == "Special"
    assert pack(block) == 0  # what is packed stays


@needs_onednn
def test_nothing_is_packed_if_memory_is_short(block, monkeypatch):
    needed = block.inner["up"].weight.nbytes + block.head.weight.nbytes
    monkeypatch.setattr(packing, "available_bytes", lambda: 4 * needed - 1)
    assert pack(block) == 0 and type(block.head) is nn.Linear
    monkeypatch.setattr(packing, "available_bytes", lambda: 4 * needed)
    assert pack(block) == 2


def test_without_the_operators_nothing_is_packed(block, monkeypatch):
    monkeypatch.setattr(packing, "_operators", lambda: object())
    assert not can_pack() and pack(block) == 0
