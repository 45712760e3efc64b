"""Each model family in vLLM: recomputing all rows equals vLLM itself, and a policy equals the built-in engine."""

import math

import pytest
import tiny_models
from vllm_helpers import SHAPE, passage, report_of

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
def test_a_family_is_fused_in_vllm_as_by_the_engine(serving, family, tmp_path):
    folder = tiny_models.save_model(family, tmp_path / family, is_endless=family != "gemma3", **SHAPE)
    # With caching the second prompt would reuse the first one's blocks.
    made = serving(folder, tmp_path / "home", enable_prefix_caching=False)
    made.engine.encode(TEXTS, [f"p{n}" for n in range(len(TEXTS))])
    prompt = made.prompt(TEXTS[::-1])
    own, recomputed, fused = (
        made.ask([list(prompt.token_ids)], [options])[0]
        for options in ({"off": True}, {"method": "recompute"}, {"method": "probe-shift", "ratio": 0.05})
    )
    assert own.kv_transfer_params is None and report_of(recomputed)["reused_tokens"] == 0
    assert kl(recomputed, logprobs_of(own)) < 1e-6
    assert recomputed.outputs[0].token_ids == own.outputs[0].token_ids
    assert report_of(fused)["reused_tokens"] > 100 and report_of(fused)["missing_tokens"] == 0
    logits = made.engine.prefill(prompt, method="probe-shift", ratio=0.05).logits
    assert kl(fused, logits.log_softmax(-1).tolist()) < 1e-6
    assert kl(fused, logprobs_of(own)) > 1e-5, "the policy changes nothing, so nothing was compared"
