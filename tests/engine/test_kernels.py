"""Triton's kernels equal the plain way: on a CUDA device if there is one, else in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from benches import StagedTransfers, largest_error, make_prompt, make_text

from ragblend.engine import kernels

pytest.importorskip("triton")
from ragblend.engine.kernels import placement, rows_attention, shift
from ragblend.engine.kernels.placement import RowTable
from ragblend.engine.model.rope import Rope, angles, rotate_, rotated
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.codec import CODECS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not kernels.available(DEVICE), reason="Triton does not run here")

# Layout, sizes of keys and values, and of what is rotated.
SHAPES = [("half", 32, 32, 32), ("half", 48, 20, 24), ("interleaved", 16, 16, 16), ("unrotated", 32, 32, 32)]
TEXTS = [make_text(seed, words=9) for seed in range(3)]  # few: Triton's interpreter takes its time
# The interpreter is wrong for bfloat16, and a card multiplies float32 in fewer bits.
DTYPES = (torch.float16, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)


def scattered(count, tokens, heads=4, key_heads=2, size=32, dtype=DTYPES[0], room=20):
    """Rows, queries, keys and values; beyond the valid tokens the buffers hold NaN."""
    draw = torch.Generator().manual_seed(count)
    rows = torch.randperm(tokens, generator=draw)[:count].sort().values.to(DEVICE)
    query = torch.randn(count, heads, size, generator=draw).to(DEVICE, dtype).transpose(0, 1)
    buffers = [torch.randn(key_heads, tokens + room, size, generator=draw).to(DEVICE, dtype) for _ in "kv"]
    for buffer in buffers:
        buffer[:, tokens:] = torch.nan
    return rows, query, *(buffer[:, :tokens] for buffer in buffers)


@pytest.mark.parametrize(
    ("count", "tokens", "window"),
    [
        *((77, 300, window) for window in (None, 1, 7, 50, 1000)),
        *((count, tokens, window) for count, tokens in ((1, 1), (3, 40), (300, 300)) for window in (None, 7)),
    ],
)
def test_scattered_rows_see_the_keys_up_to_their_positions(count, tokens, window):
    dtype = DTYPES[(count + (window or 0)) % 2]
    rows, query, key, value = scattered(count, tokens, dtype=dtype)
    expected = rows_attention.attend_by_torch(query, key, value, rows, window)
    found = rows_attention.attend(query, key, value, rows, None, window).float()
    assert (found - expected).abs().max() < rows_attention.ALLOWED[dtype]


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(2, 2, 16), (9, 3, 64), (8, 2, 128), (2, 1, 256)])
def test_heads_of_a_group_share_their_keys(heads, key_heads, size):
    rows, query, key, value = scattered(20, 90, heads, key_heads, size)
    expected = rows_attention.attend_by_torch(query, key, value, rows)
    assert (rows_attention.attend(query, key, value, rows).float() - expected).abs().max() < 0.005


def test_every_tile_gives_the_same_rows():
    rows, query, key, value = scattered(90, 180)
    expected = rows_attention.attend_by_torch(query, key, value, rows)
    for blocks in {rows_attention.blocks_of(count, 32, True) for count in (1, 100, 1000)}:
        found = rows_attention.attend(query, key, value, rows, None, None, blocks).float()
        assert (found - expected).abs().max() < 0.005, blocks


@pytest.mark.parametrize(
    ("dtype", "size", "expected"),
    [
        (torch.float16, 32, True),
        (torch.float16, 48, False),
        (torch.float16, 8, False),
        (torch.float64, 32, False),
    ],
)
def test_other_heads_and_dtypes_take_the_plain_way(dtype, size, expected):
    assert rows_attention.supports(DEVICE, dtype, size, 2, False) is expected


def test_a_kernel_that_fails_or_is_wrong_is_not_used(caplog):
    def broken():
        raise RuntimeError("out of resource: shared memory")

    assert not kernels.passes_self_test(broken, "attention", 0.1) and "shared memory" in caplog.text
    assert not kernels.passes_self_test(lambda: float("nan"), "attention", 0.1) and "nan" in caplog.text
    assert kernels.passes_self_test(lambda: 0.05, "attention", 0.1)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("llama", method) for method in ("reuse", "exact", "probe-shift")),
        ("mistral", "cacheblend"),
        ("lfm2", "probe-shift"),
    ],
)
def test_prefill_by_kernels_equals_the_plain_way(fresh_bench_for, kind, method, monkeypatch):
    """On CUDA rows are in one block, and in 16 bits; the interpreter has float32."""
    on_device = {"device": "cuda", "dtype": "bfloat16"} if DEVICE.type == "cuda" else {}
    engine = fresh_bench_for(kind, fuse="all", **on_device).engine
    engine.encode(TEXTS)
    decoder, prompt = engine.runtime.decoder, make_prompt(TEXTS)
    if DEVICE.type == "cpu":  # as on an accelerator
        monkeypatch.setattr(engine.runtime, "transfers", StagedTransfers())
        monkeypatch.setattr("ragblend.engine.selection.shift.shifts_chunks_together", lambda device: True)
        monkeypatch.setattr(decoder, "tiles", False)
    told = []
    for by_kernels in (False, True):
        monkeypatch.setattr(decoder, "kernels", by_kernels)
        told.append(engine.prefill(prompt, method=method, ratio=0.3).logits)
    assert largest_error(*told) < (0.05 if DEVICE.type == "cuda" else 1e-4)


class Case:
    """Spans in a room, packed by a codec, for a pair of buffers: the second is not rotated."""

    def __init__(self, codec, layout, size, value_size, rotated, dtype):
        draw, g = torch.Generator().manual_seed(size), Geometry(1, 3, size, value_size, dtype)
        self.rope = Rope(torch.rand(rotated // 2, generator=draw).to(DEVICE), layout)
        self.deltas, self.spans = [float(7), *range(60, 125)], []
        room, rows = torch.zeros(0, dtype=torch.uint8), []
        every = torch.arange(1, 66), torch.zeros(5, dtype=torch.long), torch.full((16,), -1)
        for start, turns in zip((60, 4, 40), every, strict=True):
            sizes = (size, value_size)
            packed = CODECS[codec].pack(
                *(torch.randn(3, len(turns), each, generator=draw).to(g.torch_dtype) for each in sizes)
            )
            packed = torch.cat([part.flatten().view(torch.uint8) for part in packed])
            self.spans.append((start, turns, packed[: CODECS[codec].layer_nbytes(g, len(turns))].to(DEVICE)))
            rows.append((len(room), start, turns))
            room = torch.cat([room, torch.nn.functional.pad(packed, (0, -len(packed) % 256))])
        self.turns = angles(torch.tensor(self.deltas, device=DEVICE), self.rope.inv_freq)
        self.table, self.codec, self.g = RowTable(room.to(DEVICE), rows, g, codec), codec, g

    def buffers(self):
        return [
            torch.full((3, 130, size), -7.0).to(DEVICE, self.g.torch_dtype)
            for size in (self.g.key_size, self.g.value_size)
        ]

    def by_kernel(self):
        keys, values = self.buffers()
        self.table.place(keys, values, self.rope, self.turns)
        return keys, values

    def by_torch(self):
        keys, values = self.buffers()
        for start, turns, packed in self.spans:
            at = slice(start, start + len(turns))
            CODECS[self.codec].unpack(packed, self.g, keys[:, at], values[:, at])
            if turns[0] >= 0:
                rotate_(keys[:, at], self.turns[0][turns], self.turns[1][turns], self.rope)
        return keys, values


@pytest.mark.parametrize(
    ("codec", "shape", "dtype"),
    [
        (codec, shape, DTYPES[(across + down) % 2])
        for across, codec in enumerate(CODECS)
        for down, shape in enumerate(SHAPES)
        if (across + down) % 3 != 2  # pairs enough of a codec and a shape
    ],
)
def test_spans_are_unpacked_rotated_and_placed_by_one_launch(codec, shape, dtype):
    name = str(dtype).removeprefix("torch.")
    case = Case(codec, *shape, name)
    (keys, values), (own_keys, own_values) = case.by_kernel(), case.by_torch()
    assert torch.equal(values, own_values)
    assert torch.equal(keys[:, 40:56], own_keys[:, 40:56]), "not rotated"
    assert torch.equal(keys[:, 56:60], own_keys[:, 56:60]), "other rows keep what they have"
    # A product and a sum are rounded once or twice: a unit in the last place, in few numbers.
    assert largest_error(keys.float(), own_keys.float()) <= 4 * torch.finfo(dtype).eps
    if dtype != torch.float32:
        assert (keys == own_keys).float().mean() > 0.999
    assert placement.supports(DEVICE, name, shape[1], shape[2], shape[3] // 2, shape[0], codec)


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_staged_loading_by_kernels_equals_the_plain_way(fresh_bench_for, codec, monkeypatch):
    engine = fresh_bench_for("llama", kv_codec=codec, memory_budget_bytes=1 << 28).engine
    engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    expected = engine.prefill(prompt, method="cacheblend").logits
    assert engine.finish_background(30)
    monkeypatch.setattr(engine.runtime, "transfers", StagedTransfers())
    monkeypatch.setattr(engine.runtime.decoder, "kernels", True)
    for _ in ("from memory", "from files"):
        assert largest_error(engine.prefill(prompt, method="cacheblend").logits, expected) < 1e-4
        assert engine.finish_background(30)
        for tier in engine.store.tiers:
            tier.clear()


def shifted(layout, size, value_size, rotated, dtype, heads=3, tokens=60):
    """New rows, stored rows, rows that were computed, their positions, cos and sin, and the rope."""
    draw = torch.Generator().manual_seed(size)
    rope = Rope(torch.rand(rotated // 2, generator=draw).to(DEVICE), layout)
    new, stored = (
        tuple(
            torch.randn(tokens, heads, each, generator=draw).to(DEVICE, dtype).transpose(0, 1)
            for each in sizes
        )
        for sizes in [(size, value_size)] * 2
    )
    at = torch.arange(1, 40, 3, device=DEVICE)
    positions = torch.arange(20, 20 + len(at), device=DEVICE)
    turns = angles(torch.arange(tokens, device=DEVICE).float(), rope.inv_freq)
    return new, stored, at, positions, turns, rope


@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, DTYPES * 2, strict=True)))
def test_changes_of_computed_rows_are_unrotated(shape, dtype):
    new, stored, at, positions, (cos, sin), rope = shifted(*shape, dtype)
    keys, values = (a[:, at].float() - b[:, positions].float() for a, b in zip(new, stored, strict=True))
    keys = rotated(keys, cos[positions], -sin[positions], rope)
    expected = torch.cat([each.transpose(0, 1).flatten(1) for each in (keys, values)], 1)
    assert largest_error(shift.observed(new, at, stored, positions, (cos, sin), rope), expected) < 1e-5
    name = str(dtype).removeprefix("torch.")
    assert shift.supports(DEVICE, name, shape[1], shape[2], shape[3] // 2, shape[0])


@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, DTYPES * 2, strict=True)))
def test_corrections_are_added_at_their_positions(shape, dtype):
    more, stored, *_, (cos, sin), rope = shifted(*shape, dtype)
    more = tuple(each[:, :33] for each in more)
    expected = [each.float() for each in stored]
    expected[0][:, 11:44] += rotated(more[0].float(), cos[11:44], sin[11:44], rope)
    expected[1][:, 11:44] += more[1].float()
    shift.add(more, stored, 11, (cos, sin), rope)
    for found, wanted in zip(stored, expected, strict=True):
        assert largest_error(found.float(), wanted) < 4 * torch.finfo(dtype).eps


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ragblend.engine.kernels import placement, rows_attention, shift

def compiled(kernel, dtype, shape, capability, **options):
    kinds = {"count": "i32", "window": "i32", "scale": "fp32", "Cos": "*fp32", "Sin": "*fp32", "Rows": "*i64"}
    kinds |= {name: f"*{dtype}" for name in ("Q", "K", "V", "Out", "Memory", "Keys", "Values")}
    kinds |= {name: f"*{dtype}" for name in ("New_keys", "New_values", "More_keys", "More_values")}
    kinds |= {"At": "*i64", "Positions": "*i64"} | ({"Out": "*fp32"} if "SIZE" in shape else {})
    kinds |= {name: "*i32" for name in ("Begin", "Index", "Tokens", "AngleRows")}
    kinds |= {"Bytes": "*u8", "Halves": "*fp16"} | ({"Rows": "*i32"} if "PER_BYTE" in shape else {})
    signature = {name: "constexpr" if name in shape else kinds.get(name, "i32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in shape.items()}
    source = ASTSource(kernel, signature, constants)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared

for capability, most, count in (80, 163 << 10, 1), (80, 163 << 10, 1000), (90, 227 << 10, 100):
    rows, keys, warps, stages = rows_attention.blocks_of(count, 128, True)
    shape = {"D": 128, "M": rows, "N": keys, "WINDOWED": count == 100}
    shared = compiled(rows_attention._attend, "bf16", shape, capability, num_warps=warps, num_stages=stages)
    assert shared <= most, (capability, count, shared)
shape = {"SIZE": 128, "VALUE_SIZE": 128, "PAIRS": 64, "INTERLEAVED": False, "M": 16}
shape |= {"K2": 128, "V2": 128, "P2": 64}
for packing in placement.PACKINGS.values():
    of = dict(zip(("PER_BYTE", "TOKEN_GROUP", "VALUE_GROUP"), packing)) | {"ALIGNED": True}
    compiled(placement._place, "bf16", shape | of, 80, num_warps=4)
compiled(shift._observe, "bf16", shape, 80, num_warps=4)
compiled(shift._add, "bf16", shape, 80, num_warps=4)
"""


def test_kernels_compile_for_cards_that_are_not_here(tmp_path):
    """What the interpreter lets pass, a compiler may refuse; blocks must fit into a card's shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
