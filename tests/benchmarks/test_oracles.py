"""The transplant oracle: full prefill's KV at the rows that another method selects, and nowhere else."""

import pytest
import torch

from benchmarks.oracles import Transplant
from benchmarks.quality import parse
from ragblend import Chunk
from ragblend.kvstore.errors import UsageError
from ragblend.measuring import quality
from ragblend.measuring.data import Question
from ragblend.measuring.records import Journal
from ragblend.measuring.variants import Variant

TEXTS = (
    "The harbour master kept two ledgers of the ships that came in from the north.",
    "On the ninth of November a storm broke the northern mole behind the lamp room.",
    "Only one of the ledgers was ever seen again, and nobody knows who has it now.",
)


def largest(one, other):
    return float((one - other).abs().max())


def test_transplant_copies_true_kv_at_the_selected_rows(engine):
    engine.encode(TEXTS)
    prompt = engine.tokenize(
        engine.chat_prompt(None, [Chunk(text) for text in TEXTS], "Who kept the ledgers?")
    )
    with pytest.raises(UsageError, match="bench quality"):  # it says who has the truth
        engine.prefill(prompt, method=Transplant())
    full, reused = (engine.prefill(prompt, method=method) for method in ("full", "reuse"))
    found = engine.prefill(prompt, method=Transplant(by="epic").given(full.cache), ratio=0.3)
    assert found.report.tokens.recomputed == 0
    start, stop = prompt.offsets[3], prompt.offsets[3] + len(prompt.chunks[1].token_ids)
    for layer in range(4):
        truth, stale, now = (each.cache.span(layer, start, stop) for each in (full, reused, found))
        for part in range(2):
            assert largest(now[part][:, :3], truth[part][:, :3]) < 1e-3
            assert torch.equal(now[part][:, -3:], stale[part][:, -3:])
    everything = engine.prefill(prompt, method=Transplant(by="recompute").given(full.cache))
    assert largest(everything.logits, full.logits) < 1e-3 < largest(reused.logits, full.logits)


def test_transplant_is_measured_beside_methods(engine, tmp_path):
    """It copies from the reference's KV, behind which the reference's answer stood a moment ago."""
    journal = Journal(tmp_path / "oracle.jsonl")
    _, others = parse("transplant:by=epic", "0.4", [])
    _, more = parse("transplant:by=random", "1", [])
    measures = {**others.variants, **more.variants}
    question = Question(0, "Who kept the ledgers?", TEXTS, ("the harbour master",))
    variants = (*measures, Variant("epic", 0.4))
    quality.run(engine, [question], variants, journal, max_new_tokens=3, others=measures)
    kl = {(record.method, record.ratio): record.kl for record in journal.records.values()}
    assert kl["transplant:by=random", 1.0] == pytest.approx(0, abs=1e-6)
    assert kl["transplant:by=epic", 0.4] != kl["epic", 0.4]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("transplant:by=foo", "there are recompute, random, epic, a3"),
        ("transplant:by=cacheblend", "before any is computed"),
        ("transplant:as=epic", "no parameter 'as'"),
    ],
)
def test_unsupported_transplants_are_refused(method, said):
    with pytest.raises(UsageError, match=said):
        parse(method, "0.3", [])
