"""Where nothing can be fused, or fusing fails in a model with several groups of blocks, vLLM serves the prompts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_models
from vllm_helpers import SHAPE, passage, report_of

TEXTS = [passage(number) for number in range(4)]


@pytest.fixture
def start(serving, tmp_path):
    """Starts a server of a family, with stored passages."""

    def started(family):
        folder = tiny_models.save_model(family, tmp_path / "model", is_endless=family == "llama", **SHAPE)
        made = serving(folder, tmp_path / "home", enable_prefix_caching=False)
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
    ("is_async", "is_v2_runner", "kind", "policy"),
    [
        (False, False, "FullAttentionSpec", "recompute"),
        (True, False, "FullAttentionSpec", "fail"),
        (False, True, "FullAttentionSpec", "fail"),
        (False, False, "SlidingWindowSpec", "fail"),
    ],
)
def test_vllm_recomputes_failed_prompts_only_where_it_can_go_back(is_async, is_v2_runner, kind, policy):
    from ragblend.integrations.vllm.runtime import failure_policy

    scheduler = SimpleNamespace(async_scheduling=is_async)
    config = SimpleNamespace(scheduler_config=scheduler, use_v2_model_runner=is_v2_runner)
    group = SimpleNamespace(kv_cache_spec=type(kind, (), {})())
    assert failure_policy(config, SimpleNamespace(kv_cache_groups=[group])) == policy


def test_with_policy_fail_a_prompt_that_cannot_be_computed_ends_with_an_error(
    start, monkeypatch, fail_fusing
):
    """Its answer would be made of blocks that were never written."""
    llama = start("llama")
    monkeypatch.setattr(llama.core.scheduler, "recompute_kv_load_failures", False)  # what `fail` does
    ids, others = llama.ids(TEXTS), llama.ids(TEXTS[::-1])
    fail_fusing(lambda request: list(request.prompt.token_ids) == ids)
    lost, whole = llama.ask([ids, others])
    assert lost.outputs[0].finish_reason == "error" and not lost.outputs[0].token_ids
    assert report_of(whole)["hits"] == len(TEXTS) and whole.outputs[0].token_ids
    fail_fusing(lambda request: False)
    assert report_of(*llama.ask([ids]))["hits"] == len(TEXTS)


def test_a_failure_is_computed_here_and_a_second_one_stops_fusing(start, fail_fusing):
    made = start("gemma3")
    ids = made.ids(TEXTS)
    [own] = made.ask([ids], [{"off": True}])
    fail_fusing(lambda request: request.policy.name != "full")
    [computed] = made.ask([ids])
    assert computed.outputs[0].token_ids == own.outputs[0].token_ids
    assert "no room" in report_of(computed)["error"]
    fail_fusing(message="no room at all")
    assert "no room at all" in report_of(*made.ask([ids]))["error"]
    fail_fusing(lambda request: False)
    [later] = made.ask([ids])
    assert later.kv_transfer_params is None
    assert later.outputs[0].token_ids == own.outputs[0].token_ids
