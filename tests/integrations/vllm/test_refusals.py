"""Where nothing can be fused, or fusing fails a step ahead, vLLM serves the prompts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_models
from vllm_helpers import SHAPE, passage, report_of

TEXTS = [passage(number) for number in range(4)]


@pytest.fixture
def start(serving, tmp_path):
    """Starts a server of a family, with stored passages."""

    def started(family, **options):
        folder = tiny_models.save_model(family, tmp_path / "model", is_endless=family == "llama", **SHAPE)
        made = serving(folder, tmp_path / "home", enable_prefix_caching=False, **options)
        made.engine.encode(TEXTS, [f"p{n}" for n in range(len(TEXTS))])
        return made

    return started


def assert_served_by_vllm(server, **options):
    ids = server.ids(TEXTS)
    asked, own = server.ask([ids, ids], [options or {"method": "probe-shift"}, {"off": True}])
    assert asked.kv_transfer_params is None
    assert asked.outputs[0].token_ids == own.outputs[0].token_ids


def test_a_model_that_fails_the_gate_is_served_by_vllm(start, monkeypatch):
    from ragblend.integrations.vllm import worker

    gate = worker.run_vllm_gate
    failed = {"passed": False, "reason": "made up"}
    monkeypatch.setattr(worker, "run_vllm_gate", lambda *given: replace(gate(*given), **failed))
    assert_served_by_vllm(start("gemma3"))


def test_a_store_of_another_version_leaves_all_prompts_to_vllm(serving, tmp_path, caplog):
    home, folder = tmp_path / "home", tiny_models.save_model("gemma3", tmp_path / "model", **SHAPE)
    (home / "kv").mkdir(parents=True)
    (home / "kv" / "FORMAT").write_text("ragblend-kv 99\n")
    made = serving(folder, home)
    assert "ragblend-kv 99" in caplog.text and "vLLM computes all prompts itself" in caplog.text
    assert_served_by_vllm(made)
    assert (home / "kv" / "FORMAT").read_text() == "ragblend-kv 99\n"


def test_a_reset_after_new_weights_stops_fusing(start, caplog):
    llama = start("llama")
    assert report_of(*llama.ask([llama.ids(TEXTS)]))["hits"] == len(TEXTS)
    assert llama.core.reset_prefix_cache(reset_connector=True)
    assert_served_by_vllm(llama, method="reuse", label="mine")
    assert "restart vLLM" in caplog.text
    assert "weights" in report_of(*llama.ask([[5, 6, 7]], [{"report": "mine"}]))["refusal"]


@pytest.mark.parametrize(
    ("is_async", "is_v2_runner", "kinds", "is_ahead"),
    [
        (False, False, ["FullAttentionSpec"], False),
        (True, False, ["FullAttentionSpec"], True),
        (False, True, ["FullAttentionSpec"], True),
        (False, False, ["SlidingWindowSpec"], True),
        (False, False, ["FullAttentionSpec", "FullAttentionSpec"], True),
    ],
)
def test_prompts_are_fused_a_step_ahead_where_vllm_cannot_go_back_in_a_step(
    is_async, is_v2_runner, kinds, is_ahead
):
    from ragblend.integrations.vllm.runtime import fuses_a_step_ahead

    scheduler = SimpleNamespace(async_scheduling=is_async)
    config = SimpleNamespace(scheduler_config=scheduler, use_v2_model_runner=is_v2_runner)
    groups = [SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in kinds]
    assert fuses_a_step_ahead(config, SimpleNamespace(kv_cache_groups=groups)) == is_ahead


@pytest.mark.parametrize(
    ("family", "options"), [("gemma3", {}), ("llama", {"async_scheduling": True})], ids=["groups", "async"]
)
def test_a_prompt_that_fails_a_step_ahead_is_computed_by_vllm_alone(start, fail_fusing, family, options):
    """With several groups of blocks the answer was wrong, and nothing was fused any more; else it ended in an error."""
    made = start(family, **options)
    ids, others = made.ids(TEXTS), made.ids(TEXTS[::-1])
    [own] = made.ask([ids], [{"off": True}])
    fail_fusing(lambda request: list(request.prompt.token_ids) == ids)
    lost, whole = made.ask([ids, others])
    assert lost.outputs[0].token_ids == own.outputs[0].token_ids
    assert "no room" in report_of(lost)["error"] and report_of(whole)["hits"] == len(TEXTS)
    fail_fusing(lambda request: False)
    assert report_of(*made.ask([ids]))["hits"] == len(TEXTS)
