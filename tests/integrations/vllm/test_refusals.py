"""Where nothing can be fused, or something breaks in a model whose blocks are in several groups: the server goes on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_models
from vllm_helpers import SHAPE, passage, serve

TEXTS = [passage(number) for number in range(4)]


@pytest.fixture
def folder(has_vllm, tmp_path):
    return tiny_models.save_model("gemma3", tmp_path / "model", **SHAPE)


def served(folder, **options):
    made = serve(folder, folder.parent / "home", enable_prefix_caching=False, **options)
    made.engine.encode(TEXTS, [f"p{n}" for n in range(len(TEXTS))])
    return made


def test_what_the_gate_refuses_is_vllms_own(folder, monkeypatch):
    from ragblend.integrations.vllm import worker

    gate = worker.run_vllm_gate
    monkeypatch.setattr(
        worker, "run_vllm_gate", lambda *given: replace(gate(*given), passed=False, reason="made up")
    )
    made = served(folder)
    try:
        ids = made.ids(TEXTS)
        fused, own = made.ask([ids, ids], [{"method": "probe-shift"}, {"off": True}])
        assert fused.kv_transfer_params is None
        assert fused.outputs[0].token_ids == own.outputs[0].token_ids
    finally:
        made.close()


def test_a_store_of_another_version_leaves_all_prompts_to_vllm(folder, caplog):
    home = folder.parent / "home"
    (home / "kv").mkdir(parents=True)
    (home / "kv" / "FORMAT").write_text("ragblend-kv 99\n")
    made = serve(folder, home)
    try:
        assert "ragblend-kv 99" in caplog.text and "vLLM's own" in caplog.text
        ids = made.ids(TEXTS)
        asked, own = made.ask([ids, ids], [{"method": "probe-shift"}, {"off": True}])
        assert asked.kv_transfer_params is None
        assert asked.outputs[0].token_ids == own.outputs[0].token_ids
    finally:
        made.close()
    assert (home / "kv" / "FORMAT").read_text() == "ragblend-kv 99\n"


@pytest.fixture
def llama(has_vllm, tmp_path):
    folder = tiny_models.save_model("llama", tmp_path / "model", is_endless=True, **SHAPE)
    made = served(folder)
    yield made
    made.close()


def test_where_vllm_schedules_ahead_a_prompt_that_cannot_be_computed_ends_with_an_error(llama, monkeypatch):
    """Its answer would be made of blocks that nothing was written to."""
    from ragblend.integrations.vllm import worker
    from ragblend.integrations.vllm.runtime import failure_policy

    def policy(ahead=False, second=False, kind="FullAttentionSpec"):
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=ahead), use_v2_model_runner=second
        )
        group = SimpleNamespace(kv_cache_spec=type(kind, (), {})())
        return failure_policy(config, SimpleNamespace(kv_cache_groups=[group]))

    assert policy() == "recompute"
    assert {policy(ahead=True), policy(second=True), policy(kind="SlidingWindowSpec")} == {"fail"}
    scheduler = llama.llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "recompute_kv_load_failures", False)  # what `fail` does
    prefill, ids, others = worker.prefill, llama.ids(TEXTS), llama.ids(TEXTS[::-1])

    def breaks(runtime, request):
        if list(request.prompt.token_ids) == ids:
            raise MemoryError("no room")
        return prefill(runtime, request)

    monkeypatch.setattr(worker, "prefill", breaks)
    lost, whole = llama.ask([ids, others])
    assert lost.outputs[0].finish_reason == "error" and not lost.outputs[0].token_ids
    assert whole.kv_transfer_params["ragblend"]["hits"] == len(TEXTS) and whole.outputs[0].token_ids
    monkeypatch.setattr(worker, "prefill", prefill)
    [again] = llama.ask([ids])
    assert again.kv_transfer_params["ragblend"]["hits"] == len(TEXTS)


def test_a_reset_after_new_weights_ends_fusing(llama, caplog):
    ids = llama.ids(TEXTS)
    assert llama.ask([ids])[0].kv_transfer_params["ragblend"]["hits"] == len(TEXTS)
    assert llama.llm.llm_engine.engine_core.engine_core.reset_prefix_cache(reset_connector=True)
    asked, own = llama.ask([ids, ids], [{"method": "reuse", "label": "mine"}, {"off": True}])
    assert asked.kv_transfer_params is None and "start vLLM anew" in caplog.text
    assert asked.outputs[0].token_ids == own.outputs[0].token_ids
    [told] = llama.ask([[5, 6, 7]], [{"report": "mine"}])
    assert "weights" in told.kv_transfer_params["ragblend"]["refusal"]


def test_a_failure_is_computed_here_and_a_second_one_ends_fusing(folder, monkeypatch):
    from ragblend.integrations.vllm import worker

    made = served(folder)
    try:
        ids, prefill = made.ids(TEXTS), worker.prefill
        [own] = made.ask([ids], [{"off": True}])

        def breaks_unless_full(runtime, request):
            if request.policy.name != "full":
                raise MemoryError("no room")
            return prefill(runtime, request)

        monkeypatch.setattr(worker, "prefill", breaks_unless_full)
        [computed] = made.ask([ids])
        assert computed.outputs[0].token_ids == own.outputs[0].token_ids
        assert "no room" in computed.kv_transfer_params["ragblend"]["error"]

        def breaks(*given):
            raise MemoryError("no room at all")

        monkeypatch.setattr(worker, "prefill", breaks)
        [lost] = made.ask([ids])
        assert "no room at all" in lost.kv_transfer_params["ragblend"]["error"]
        monkeypatch.undo()
        [later] = made.ask([ids])
        assert later.kv_transfer_params is None
        assert later.outputs[0].token_ids == own.outputs[0].token_ids
    finally:
        made.close()
