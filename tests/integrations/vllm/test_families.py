"""Each family in vLLM: the gate is passed, all rows recomputed is vLLM itself, a policy is the built-in engine's."""

import math

import pytest
import tiny_models
from vllm_helpers import QUESTION, SHAPE, passage, serve

from ragblend.engine.prompts.segments import Chunk

FAMILIES = ("llama", "llama-llama3", "qwen2", "qwen3", "mistral", "gemma3")
TEXTS = [passage(number) for number in range(4)]


def kl(output, expected: list[float]) -> float:
    """KL(expected || output) of the first token, from log-probabilities."""
    found = {i: each.logprob for i, each in output.outputs[0].logprobs[0].items()}
    return sum(math.exp(p) * (p - found[i]) for i, p in enumerate(expected) if math.isfinite(p))


def logprobs_of(output) -> list[float]:
    found = output.outputs[0].logprobs[0]
    return [found[i].logprob if i in found else -math.inf for i in range(400)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_fused_in_vllm_as_it_is_here(has_vllm, family, tmp_path):
    folder = tiny_models.save_model(family, tmp_path / family, is_endless=family != "gemma3", **SHAPE)
    made = serve(
        folder, tmp_path / "home", enable_prefix_caching=False
    )  # else the second prompt is the first one
    try:
        made.engine.encode(TEXTS, [f"p{n}" for n in range(len(TEXTS))])
        ids = made.ids(TEXTS[::-1])
        own, recomputed, fused = (
            made.ask([ids], [said])[0]
            for said in ({"off": True}, {"method": "recompute"}, {"method": "probe-shift", "ratio": 0.3})
        )
        assert (
            own.kv_transfer_params is None and recomputed.kv_transfer_params["ragblend"]["reused_tokens"] == 0
        )
        assert kl(recomputed, logprobs_of(own)) < 1e-6
        assert recomputed.outputs[0].token_ids == own.outputs[0].token_ids

        report = fused.kv_transfer_params["ragblend"]
        assert report["reused_tokens"] > 100 and report["missing_tokens"] == 0
        prompt = made.engine.tokenize(
            made.engine.chat_prompt(None, [Chunk(t) for t in TEXTS[::-1]], QUESTION)
        )
        logits = made.engine.prefill(prompt, method="probe-shift", ratio=0.3).logits
        assert kl(fused, logits.log_softmax(-1).tolist()) < 1e-6
        assert kl(fused, logprobs_of(own)) > 1e-5, "the policy changes nothing, so nothing was compared"
    finally:
        made.close()
