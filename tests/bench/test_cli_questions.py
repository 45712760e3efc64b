"""What `ragblend bench quality` measures is what was asked for: each question once, with the codec that was named."""

import json


def test_the_same_questions_twice_are_measured_once_and_said(bench, entries, tmp_path) -> None:
    """It ended in an AssertionError of the journal, and a second run counted every question twice."""
    path = tmp_path / "twice.json"
    path.write_text(json.dumps(entries[:2] * 2))
    arguments = ("quality", "--data", path, "--methods", "reuse", "--max-new-tokens", "2", "--json")
    for _ in range(2):
        done = bench(*arguments)
        assert [row["n"] for row in json.loads(done.stdout)] == [2]
        assert done.stderr.count("it is measured once") == 2
    skipped = json.loads((tmp_path / "out" / "quality.json").read_text())["settings"]["skipped"]
    assert len(skipped) == 2


def test_a_seed_below_0_is_refused_before_anything_is_measured(bench, home) -> None:
    """numpy refused it when everything was measured."""
    done = bench("quality", "--seed", "-1")
    assert done.exit_code == 2
    assert "--seed" in done.stderr
    assert not home.exists()


def test_what_packed_kv_loses_is_measured_in_a_journal_of_its_own(
    bench, data_file, tmp_path, monkeypatch
) -> None:
    arguments = ("quality", "--data", data_file, "--methods", "full,reuse", "--json")
    raw = json.loads(bench(*arguments).stdout)
    monkeypatch.setenv("RAGBLEND_KV_CODEC", "int8")
    packed = json.loads(bench(*arguments).stdout)
    assert packed[0]["kl"] == raw[0]["kl"] == 0  # full prefill stores nothing
    assert 0 < abs(packed[1]["kl"] - raw[1]["kl"]) < 0.1 * raw[1]["kl"]
    assert len(list((tmp_path / "out").glob("quality-*.jsonl"))) == 2
    assert json.loads((tmp_path / "out" / "quality.json").read_text())["environment"]["kv_codec"] == "int8"


def test_packed_kv_is_measured_although_raw_kv_was_kept(bench, data_file, tmp_path, monkeypatch) -> None:
    """The KV that --keep-kv had left was measured once more, under int8's name."""
    arguments = ("quality", "--data", data_file, "--methods", "reuse", "--json", "--fresh")
    raw = json.loads(bench(*arguments, "--keep-kv").stdout)
    monkeypatch.setenv("RAGBLEND_KV_CODEC", "int8")
    packed = json.loads(bench(*arguments, "--keep-kv").stdout)
    assert 0 < abs(packed[0]["kl"] - raw[0]["kl"]) < 0.1 * raw[0]["kl"]
