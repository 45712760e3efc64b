"""The families of transformers, as tiny random models: each is fused right, or refused by name.

Those of `tiny_models` that are promised, LFM2 and GPT-2 have tests of their own.
"""

import warnings

import pytest
import tiny_models
import torch
from benches import Bench, chat, largest_error, make_text
from transformers import AutoConfig, AutoModelForCausalLM

from ragblend import Engine

TEXTS = [make_text(seed, words=16) for seed in range(3)]
ALLOWED = 1e-5
SHAPE = tiny_models.SHAPE | tiny_models.HEAD | {"num_hidden_layers": 2, "vocab_size": 400, "pad_token_id": 1}
SHAPE |= {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 1024}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
CONVOLVES = {"layer_types": ["conv", "full_attention"]}
PLAIN = "apertus arcee cohere diffllama ernie4_5 gemma glm glm4 helium nemotron olmo olmo2 seed_oss stablelm starcoder2"
SLIDES = "cohere2 cwm exaone4 gemma2 ministral olmo3"
FUSED: dict[str, dict[str, object]] = {
    **{name: {} for name in PLAIN.split()},
    **dict.fromkeys(SLIDES.split(), SLIDING),
    **dict.fromkeys(("mixtral", "qwen3_moe"), EXPERTS),
    "lfm3": CONVOLVES,
    "lfm2_moe": EXPERTS | CONVOLVES | {"head_dim": 24},  # a row's inputs do not fill their heads
    "gpt_oss": SLIDING | EXPERTS,
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
}
UNFIT = "bloom gpt_neox hunyuan_v1_dense jamba mpt opt phi persimmon"
REFUSED: dict[str, dict[str, object]] = {name: {} for name in UNFIT.split()} | {"gemma4_text": SLIDING}
UNSEEN = ("diffllama", "nemotron", "stablelm")  # they show nobody what their rows look at


@pytest.fixture(params=FUSED | REFUSED)
def bench(request, tmp_path):
    name, folder = request.param, tmp_path / "model"
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(name, **(SHAPE | (FUSED | REFUSED)[name]))
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, which would be all 1 and commute with any rotation
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tiny_models.make_tokenizer(adds_bos=False).save_pretrained(folder)
    engine = Engine.open(str(folder), tmp_path / "home", "cpu", "float32", fuse="all")
    yield Bench(name, folder, engine)
    engine.close()


def test_every_model_family_is_fused_correctly_or_refused(bench):
    """StableLM passed the gate, and then every question raised: its layers keep to themselves what they are given.
    Gemma 4 was not refused: loading it raised transformers' own error, because its layers' KV differ in shape.
    """
    name, engine = bench.name, bench.engine
    engine.encode(TEXTS)
    prompt = chat(bench, TEXTS)
    expected = bench.logits(prompt)[-1]
    assert largest_error(engine.prefill(prompt, method="full").logits, expected) < ALLOWED
    assert engine.gate.passed == (name in FUSED), engine.gate
    everything, default = engine.prefill(prompt, ratio=1.0), engine.prefill(prompt)
    assert largest_error(everything.logits, expected) < ALLOWED
    assert default.logits.isfinite().all()
    if name in REFUSED:
        assert default.report.method == "full" and engine.gate.reason in default.report.warning
        return
    again = engine.prefill(prompt, method="recompute")
    assert again.report.hits == len(TEXTS)
    assert largest_error(again.logits, expected) < ALLOWED
    assert default.report.method == ("spread-shift" if name in UNSEEN else "probe-shift")
    assert (
        0 < default.report.tokens.recomputed < default.report.tokens.recomputed + default.report.tokens.reused
    )
    assert (default.report.warning is not None) == (name in UNSEEN)
    if name in UNSEEN:  # by the verdict that is on file
        engine.close()
        assert engine.prefill(prompt).report.method == "spread-shift"
        assert largest_error(engine.prefill(prompt, ratio=1.0).logits, expected) < ALLOWED
