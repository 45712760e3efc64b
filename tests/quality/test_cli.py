"""`ragblend bench` as a command: the real engine with a tiny model, files on disk, JSON on stdout."""

import json

import pytest

from ragblend.engine.selection import METHODS
from ragblend.kvstore.errors import UsageError

ROW = {
    "method", "ratio", "n", "kl", "kl_ci", "top1", "exact_match", "f1", "rouge_l", "recovery", "ttft_ms", "speedup",
    "recomputed_fraction",
}  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"


def test_quality_prints_rows_and_writes_results_and_a_picture(bench, data_file, tmp_path) -> None:
    few = ("--limit", "2", "--ratios", "0.15,1", "--max-new-tokens", "6")
    done = bench("quality", "--data", data_file, *few, "--json")
    rows = json.loads(done.stdout)
    choosing = [
        name for name, policy in METHODS.items() if policy.fixed_ratio is None and not policy.uses_tree
    ]
    assert len(rows) == 3 + 2 * len(choosing)  # full, naive, reuse; 2 ratios
    assert all(set(row) >= ROW for row in rows)
    by_name = {(row["method"], row["ratio"]): row for row in rows}
    assert {row["n"] for row in rows} == {2}
    full = by_name["full", None]
    names = ("kl", "top1", "exact_match", "speedup", "recovery")
    assert [full[name] for name in names] == [0, 1, 1, 1, 1]
    reuse = by_name["reuse", None]
    assert reuse["kl"] > 1e-4
    assert reuse["recovery"] == 0
    assert reuse["recomputed_fraction"] == 0
    # Everything computed again is full prefill: the whole path (encode, load, move, scatter, compare) at once.
    for method in ("random", "epic"):
        exact = by_name[method, 1.0]
        assert exact["kl"] < 1e-6 * reuse["kl"] + 1e-7
        assert exact["exact_match"] == 1
        assert exact["recovery"] == pytest.approx(1, abs=1e-3)
    results = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert results["rows"] == rows
    assert results["environment"]["dtype"] == "float32"
    assert {(c["method"], c["against"]) for c in results["comparisons"]} >= {
        ("cacheblend", "random"),
        ("cacheblend", "reuse"),
        ("cacheblend-k", "epic"),
    }
    assert (tmp_path / "out" / "quality.png").read_bytes().startswith(PNG)


def test_exact_answers_are_scored_and_a_run_is_resumed(bench, entries, tmp_path) -> None:
    numbers = ["1234567", "7654321", "1111111", "2222222"]
    for place, entry in enumerate(entries[:3]):
        entry |= {"required": numbers, "answers": [", ".join(numbers)], "instruction": "\nNumbers only."}
        entry["task"] = "all" if place < 2 else "some"
    path = tmp_path / "exact.json"
    path.write_text(json.dumps(entries[:3]))
    arguments = ("quality", "--data", path, "--methods", "full,reuse", "--json")
    bench(*arguments, "--limit", "1")
    rows = json.loads(bench(*arguments).stdout)
    assert [row["n"] for row in rows] == [3, 3]
    assert all(row["accuracy"] is not None and row["found"] is not None for row in rows)
    results = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert {row["task"]: row["n"] for row in results["tasks"]} == {"all": 2, "some": 1}
    assert results["settings"]["resumed_records"] == 2
    assert results["settings"]["max_new_tokens"] > 32  # four numbers of seven figures take more


def test_skip_leaves_out_and_reports_unusable_questions(bench, entries, tmp_path) -> None:
    from ragblend.kvstore.errors import PromptTooLongError

    entries[1]["question"] = " "
    entries[2]["ctxs"][0]["text"] = "word " * 3000
    path = tmp_path / "spoilt.json"
    path.write_text(json.dumps(entries))
    arguments = ("quality", "--data", path, "--methods", "reuse", "--max-new-tokens", "2", "--json")
    with pytest.raises(UsageError, match=r"question 1: 'question' is empty"):
        bench(*arguments)
    done = bench(*arguments, "--skip")
    assert [row["n"] for row in json.loads(done.stdout)] == [2]
    assert "left out" in done.stderr
    skipped = json.loads((tmp_path / "out" / "quality.json").read_text())["settings"]["skipped"]
    assert ["'question' is empty" in each["reason"] for each in skipped] == [True, False]
    assert f"{path}, question 2 needs" in skipped[1]["reason"]  # the file's number, not the kept ones'
    assert "--skip" not in skipped[1]["reason"]
    entries[1]["question"] = "Why?"
    path.write_text(json.dumps(entries))
    (journal,) = (tmp_path / "out").glob("quality-*.jsonl")
    kept = journal.read_text()
    with pytest.raises(PromptTooLongError, match=r"question 2 needs .* --passages N .* --skip"):
        bench(*arguments)
    assert journal.read_text() == kept  # it stops before anything is measured


def test_ttft_reports_the_parts_of_the_time(bench, data_file, tmp_path) -> None:
    small = "--chunks 2,3 --tokens 24 --repeats 1 --ratios 0.15"
    done = bench("ttft", *small.split(), "--no-memory", "--json", "--data", data_file)
    printed = json.loads(done.stdout)
    rows = printed["rows"]
    assert len(rows) == 2 * 2 * 4  # chunk counts, caches, methods
    assert {row["cache"] for row in rows} == {"warm", "cold"}
    for row in rows:
        assert sum(row["where_ms"].values()) == pytest.approx(row["ttft_ms"], rel=0.5)
        assert row["retrieve_ms"] is None  # nothing was ingested here
        assert row["fused_kv_bytes"] == row["prompt_tokens"] * 4 * 2 * 2 * 16 * 4
        assert row["raw_kv_bytes"] == row["chunks"] * 24 * 4 * 2 * 2 * 16 * 4
        assert row["blob_of_raw_kv"] > 1
    assert {row["speedup"] for row in rows if row["method"] == "full"} == {1.0}
    assert {row["load_ms"] for row in rows if row["method"] == "full"} == {0.0}
    assert all(row["load_ms"] > 0 for row in rows if row["method"] == "reuse")
    assert (tmp_path / "out" / "ttft.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("quality", "--methods", "full,magic"), "magic"),
        (("quality", "--ratios", "0.15,2"), "'2'"),
        (("quality", "--data", "nowhere.json"), "nowhere.json"),
        (("quality", "--data", "a.json", "--docs", "all"), "--data, --docs and --figures"),
        (
            ("quality", "--figures", "--data", "a.json"),
            "--data, --docs and --figures name different questions",
        ),
        (("quality", "--docs", "all"), "ragblend ingest"),
        (("quality", "--compare", "reuse,magic"), "--compare"),
        (("ttft", "--chunks", "0"), "--chunks"),
        (("ttft", "--tokens", "many"), "--tokens"),
        (("ttft", "--caches", "hot"), "hot"),
    ],
)
def test_wrong_arguments_are_usage_errors_before_any_model_is_loaded(bench, arguments, said, home) -> None:
    with pytest.raises(UsageError, match=said):
        bench(*arguments)
    assert not home.exists()


@pytest.mark.parametrize("command", ["quality", "ttft"])
def test_a_missing_package_is_named_before_measuring(bench, command, home, monkeypatch) -> None:
    from ragblend.app import extras

    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "matplotlib" else name)
    with pytest.raises(UsageError, match=r"without matplotlib: .*\[bench\]"):
        bench(command)
    assert not home.exists()


def test_an_interrupted_run_is_resumed(bench, data_file, engine, tmp_path, ctrl_c_at) -> None:
    arguments = ("quality", "--data", data_file, "--methods", "full,reuse", "--max-new-tokens", "3", "--json")
    calls = ctrl_c_at(4)
    stopped = bench(*arguments)
    assert (stopped.exit_code, stopped.stdout) == (1, "")
    assert "run the same command again" in stopped.stderr
    assert list(engine.store.keys()) == []  # interrupted or not, the passages are taken out again
    (journal,) = (tmp_path / "out").glob("quality-*.jsonl")
    kept = journal.read_text()
    assert kept.count('"question"') == 3
    rows = json.loads(bench(*arguments).stdout)
    assert len(calls) == 4 + 5  # eight records, three were there; the interrupted one was begun twice
    assert [row["n"] for row in rows] == [4, 4]
    assert journal.read_text().startswith(kept) and journal.read_text().count('"question"') == 8


def test_repeated_questions_are_measured_once(bench, entries, tmp_path) -> None:
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


def test_a_negative_seed_is_refused(bench, home) -> None:
    """numpy refused it when everything was measured."""
    done = bench("quality", "--seed", "-1")
    assert done.exit_code == 2
    assert "--seed" in done.stderr
    assert not home.exists()


def test_the_codec_is_respected_after_keep_kv(bench, data_file, tmp_path, monkeypatch) -> None:
    """The KV that --keep-kv had left was measured once more, under int8's name."""
    arguments = ("quality", "--data", data_file, "--limit", "1", "--methods", "reuse", "--json", "--fresh")
    raw = json.loads(bench(*arguments, "--keep-kv").stdout)
    monkeypatch.setenv("RAGBLEND_KV_CODEC", "int8")
    packed = json.loads(bench(*arguments, "--keep-kv").stdout)
    assert 0 < abs(packed[0]["kl"] - raw[0]["kl"]) < 0.1 * raw[0]["kl"]
