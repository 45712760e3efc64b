"""The bundled SmolLM2 in bfloat16: the oracles on real weights, with the floor that the dtype sets."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from benches import reference_pair

from ragblend import Chunk, Engine, Literal, Prompt
from ragblend.engine.decoding.direct import DirectDecode
from ragblend.engine.decoding.eightbit import EightBit
from ragblend.engine.decoding.fourbit import FourBit
from ragblend.engine.decoding.grammar import json_grammar
from ragblend.engine.decoding.implementations import compare_implementations
from ragblend.engine.decoding.packed_weights import pack_weights
from ragblend.engine.model import convert
from ragblend.engine.model.checkpoints import find_model
from ragblend.engine.prompts.segments import Message
from ragblend.kvstore.layout import value_files

PASSAGES = [
    "The Orrery tramway opened in 1911 with eleven cars, each painted by a different guild of the lower town, and for "
    "the first winter it ran only as far as the fish market, because the bridge could not carry it.",
    "Ilse Marrow drove the last car of the old line. She kept the brass controller handle, and her granddaughter gave "
    "it to the museum in 1987 together with a diary that names every passenger of that night.",
    "The museum of the lower town stands where the depot was. Its largest room holds car number seven, restored with "
    "the colours of the glassblowers' guild, and a map on which the bridge is still missing.",
    "Electricity came from the mill at Tarn weir. When the river was low the trams stood still, and the council paid "
    "the passengers' ferry fares out of a fund that was called the dry purse.",
]


@pytest.fixture(scope="module")
def engine(smollm2_home):
    opened = Engine.open(home=smollm2_home, device="cpu", dtype="bfloat16")
    opened.encode(PASSAGES)
    opened.generate(Prompt([Literal("Read this.")]), max_new_tokens=1)
    opened.finish_background()  # what computes answers stays the same from here on
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def prompt(engine):
    chunks = [Chunk(text) for text in PASSAGES]
    return engine.tokenize(engine.chat_prompt(None, chunks, "Who gave the brass handle to the museum?"))


@pytest.fixture(scope="module")
def reference(engine, prompt):
    """(logits (T, vocab) in float32, KV by layer) of the prompt, through transformers alone, in bfloat16."""
    return reference_pair(engine.runtime.folder, prompt.token_ids, torch.bfloat16, "sdpa")


@pytest.fixture(scope="module")
def eager(engine, prompt):
    """The same by transformers' plainest attention: what two right answers in bfloat16 differ by."""
    return reference_pair(engine.runtime.folder, prompt.token_ids, torch.bfloat16, "eager")


def test_a_conversion_writes_nothing_to_the_terminal(smollm2_home, tmp_path, capfd):
    """Each of transformers' readers showed its own bar. This is the session's conversion, or a second one."""
    is_done = convert.is_converted(find_model("default"), smollm2_home, "bfloat16")
    opened = Engine.open(home=tmp_path if is_done else smollm2_home, device="cpu", dtype="bfloat16")
    assert (opened.runtime.folder / "config.json").is_file()
    assert "".join(capfd.readouterr()) == ""


def test_the_bundled_model_is_converted_once_for_all_homes(engine, with_smollm2, tmp_path, monkeypatch):
    """Each of the engine's, the app's and the documents' tests converted its own: 20 s each."""
    first = engine.runtime.folder
    monkeypatch.setattr(convert, "_convert", None)
    another = Engine.open(home=with_smollm2(tmp_path / "home"), device="cpu", dtype="bfloat16")
    assert another.runtime.folder.samefile(first)


def divergence(expected, found):
    """KL(expected || found) in nats."""
    p, q = (logits.double().log_softmax(-1) for logits in (expected, found))
    return float((p.exp() * (p - q)).sum())


def relative(found, expected):
    """Root mean square error, in standard deviations of what was expected."""
    return float((found.float() - expected.float()).pow(2).mean().sqrt() / expected.float().std())


def test_the_bundled_model_passes_the_gate(engine):
    assert engine.gate.passed, engine.gate.reason


@pytest.mark.parametrize("method", ["full", "recompute"])
def test_computing_every_row_equals_the_model_up_to_rounding(engine, prompt, reference, eager, method):
    """The floor is measured: transformers with itself, sdpa beside eager, differs by KL 2.5e-3 on this prompt.

    What is nearer to float32 is not said by it: where attention is by products, it rounds where eager attention does.
    """
    found = engine.prefill(prompt, method=method).logits
    expected, other = reference[0][-1], eager[0][-1]
    kl, rms = divergence(expected, found), relative(found, expected)
    floor = divergence(expected, other), relative(other, expected)
    print(
        f"{method}: KL {kl:.1e} nats, relative RMS {rms:.1e}; floor of bfloat16: {floor[0]:.1e}, {floor[1]:.1e}"
    )
    assert kl < 2 * floor[0]
    assert rms < 2 * floor[1]


def test_reuse_differs_by_more_than_rounding(engine, prompt, reference):
    """Or the test above could not tell right from wrong."""
    naive = engine.prefill(prompt, method="naive")
    assert divergence(reference[0][-1], naive.logits) > 0.01


def test_full_prefill_answers_as_transformers(engine, prompt, reference):
    result = engine.generate(prompt, method="full", max_new_tokens=24)
    assert result.token_ids[0] == int(reference[0][-1].argmax())
    assert len(result.text) > 20
    assert result.text == "".join(engine.stream(prompt, method="full", max_new_tokens=24))


@pytest.mark.parametrize("question", ["Repeat the letter a for ever.", "Do not answer in JSON."])
def test_answers_are_held_to_a_schema(engine, question):
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    asked = engine.chat([Message("user", (Literal(question),))])
    said = engine.generate(asked, max_new_tokens=64, grammar=json_grammar(schema | {"required": ["a", "n"]}))
    jsonschema.validate(json.loads(said.text), schema | {"required": ["a", "n"]})


def test_its_weights_are_packed_in_four_bits_with_the_same_logits(engine, prompt):
    """No further from the model's own forward than bfloat16 itself is from float32."""
    packed = {}
    pack_weights(engine.runtime.decoder, packed, engine.runtime.has_quantized_weights)
    kinds = {name: type(each) for name, each in packed.items()}
    assert kinds == dict.fromkeys(packed, FourBit) | {"head": EightBit} and len(kinds) == 7 * 30 + 1
    rows = DirectDecode(engine.runtime.decoder, packed)
    assert compare_implementations(engine.runtime.decoder, rows, prompt.token_ids).divergence < 5e-3


def test_stored_values_are_little_larger_than_their_kv(engine):
    """Must show 5: within 2% for chunks of the default size."""
    text = " ".join(PASSAGES * 3)
    ids = engine.tokenize(Prompt([Literal("x"), Chunk(text)])).segment_ids[1]
    key = engine.encode([text]).keys[0]
    (file,) = [f for f in value_files(engine.store.root) if f.digest == key.digest]
    raw = len(ids) * engine.runtime.decoder.geometry.token_bytes
    assert len(ids) > 400
    assert raw < file.nbytes < 1.02 * raw
    on_disk = sum(file.nbytes for file in value_files(engine.store.root))
    assert on_disk == engine.store.stats().bytes, "the budget counts other bytes than the disk holds"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")
def test_an_answers_memory_is_at_most_one_and_a_half_times_its_kv(engine, smollm2_home):
    """Must show 5, for six chunks of 512 tokens, in a process of its own.

    What tensors take is counted: 1.28 of the KV, and nothing when the answer is there (with AMX 1.47, when all heads'
    keys were packed for each tile). Seen from outside a first answer of 100 tokens is 1.1 to 1.7 of it, the more the
    busier the machine is, by how threads and pages fall and kernels are compiled; a second one needs 0.4 at most, for
    what the first one gave back serves again. Products of a new shape for each token made the first one 2.2.
    """
    found = memory_of(smollm2_home)
    assert found["hits"] == 6
    assert found["tokens"] > 3000
    assert found["generated"] == 100
    assert 1 < found["allocated_bytes"] / found["kv_bytes"] < 1.4
    assert found["left_bytes"] == 0
    first, second = (each / found["kv_bytes"] for each in found["resident_bytes"])
    assert first < 2, "what is counted is not what the process takes"
    assert second < 0.7, "an answer leaves something behind"


def memory_of(home):
    """What memory_worker.py prints."""
    worker = Path(__file__).with_name("memory_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(home), "cacheblend"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
