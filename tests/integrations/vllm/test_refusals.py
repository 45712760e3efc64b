"""Where nothing can be fused, or something breaks in a model whose blocks are in several groups: the server goes on."""

from dataclasses import replace

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
    from ragblend.integrations.vllm import working

    judged = working.judged
    monkeypatch.setattr(
        working, "judged", lambda *given: replace(judged(*given), passed=False, reason="made up")
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


def test_a_failure_is_computed_here_and_a_second_one_ends_fusing(folder, monkeypatch):
    from ragblend.integrations.vllm import working

    made = served(folder)
    try:
        ids, prefill = made.ids(TEXTS), working.prefill
        [own] = made.ask([ids], [{"off": True}])

        def breaks_unless_full(runtime, request):
            if request.policy.name != "full":
                raise MemoryError("no room")
            return prefill(runtime, request)

        monkeypatch.setattr(working, "prefill", breaks_unless_full)
        [computed] = made.ask([ids])
        assert computed.outputs[0].token_ids == own.outputs[0].token_ids
        assert "no room" in computed.kv_transfer_params["ragblend"]["error"]

        def breaks(*given):
            raise MemoryError("no room at all")

        monkeypatch.setattr(working, "prefill", breaks)
        [lost] = made.ask([ids])
        assert "no room at all" in lost.kv_transfer_params["ragblend"]["error"]
        monkeypatch.undo()
        [later] = made.ask([ids])
        assert later.kv_transfer_params is None
        assert later.outputs[0].token_ids == own.outputs[0].token_ids
    finally:
        made.close()
