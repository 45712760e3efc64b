"""Every example runs on a tiny model; the one that needs no ragblend computes the same."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

from ragblend import Chunk, Engine

EXAMPLES = Path(__file__).parents[2] / "examples"
# What a run must say: that KV was used, not only that nothing was raised.
SAYS = {
    "quickstart": "encoded 2, already stored 0",
    "own_policy": "tails: 30% recomputed",
    "with_llama_index": "nodes reused: 1, missing: 1",
    "with_langchain": "documents reused: 1",
    "fuse_in_200_lines": "KL from full prefill 0.00000",
}
ORDINARY = "The ledger names each ship, the hour that it came in, and what it carried. "


def module_of(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs(name, tiny_folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGBLEND_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(tiny_folder)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


@pytest.fixture(scope="module")
def fuse_alone():
    return module_of(EXAMPLES / "fuse_in_200_lines.py")


def test_fusing_needs_two_hundred_lines_and_no_ragblend() -> None:
    text = (EXAMPLES / "fuse_in_200_lines.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert "ragblend" not in text


@pytest.mark.parametrize("ratio", [0.3, 0.5, 1.0])
def test_its_logits_are_the_engines(fuse_alone, tiny_folder, tmp_path, ratio) -> None:
    """Three passages, the first of them exact, so that both a place and an order can be wrong."""
    engine = Engine.open(tiny_folder, home=tmp_path, device="cpu", dtype="float32")
    texts = [*fuse_alone.PASSAGES, ORDINARY * 2]
    engine.encode(texts)
    prompt = engine.tokenize(engine.chat_prompt(None, [Chunk(text) for text in texts], "Where were they?"))
    read = engine.prefill(prompt, method="cacheblend", ratio=ratio)
    reused = engine.prefill(prompt, method="reuse").logits
    engine.close()

    model, _ = fuse_alone.load(str(tiny_folder))
    prefix = list(prompt.prefix_ids)
    behind = prompt.segments[next(n for n, each in enumerate(prompt.segments) if isinstance(each, Chunk)) :]
    segments = [fuse_alone.Segment(prefix)]
    for each in behind:
        ids = list(each.token_ids)
        stored = isinstance(each, Chunk)
        segments.append(fuse_alone.encode(model, prefix, ids) if stored else fuse_alone.Segment(ids))
    logits = fuse_alone.fuse(model, segments, read.report.tokens.recomputed)

    torch.testing.assert_close(logits, read.logits, atol=1e-4, rtol=0)
    assert (logits - reused).abs().max() > 0.01, "computing rows again must make a difference here"
