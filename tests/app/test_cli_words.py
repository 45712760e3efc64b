"""The command line's help, collections, interrupts, closed pipes and encodings."""

import errno
import io
import json
import os
import signal
import subprocess
import sys

import pytest
import typer.main
from waiting import SOON_S

from ragblend.app.cli.main import app, main

CODE = "import sys; from ragblend.app.cli.main import main; sys.exit(main(sys.argv[1:]))"


def commands(group, path=()):
    """Every command and group with its words."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


def test_help_shows_every_text(capfd, monkeypatch):
    """`[default: RAGBLEND_HOME ...]` was taken for markup and not shown."""
    monkeypatch.setenv("COLUMNS", "1000")
    found = 0
    for path, command in commands(typer.main.get_command(app)):
        assert main([*path, "--help"]) == 0
        shown = "".join(capfd.readouterr().out.split())
        texts = [text for parameter in command.params if (text := getattr(parameter, "help", None))]
        missing = [text for text in [command.help, *texts] if "".join((text or "").split()) not in shown]
        assert missing == [], path
        found += len(texts)
    assert found > 100


def test_help_lists_last_what_is_seldom_needed(capfd):
    assert main(["ask", "--help"]) == 0
    shown = capfd.readouterr().out
    assert shown.index("--top-k") < shown.index(" Advanced ") < shown.index("--method")


@pytest.mark.parametrize(
    ("words", "position", "offered"),
    [
        ("ragblend do", 1, {"docs", "doctor"}),
        ("ragblend docs ", 2, {"list", "show", "rm"}),
        ("ragblend ask --keep", 2, {"--keep-tokens"}),
    ],
)
def test_the_shell_completes_without_loading_anything(words, position, offered):
    code = f"import sys; sys.modules.update(torch=None, sqlite3=None, numpy=None); {CODE}"
    asked = {"_RAGBLEND_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    how = {"env": os.environ | asked, "capture_output": True, "text": True, "timeout": SOON_S}
    done = subprocess.run([sys.executable, "-c", code], **how)
    assert done.returncode == 0 and set(done.stdout.split()) == offered, done.stderr


@pytest.fixture
def two(cli, documents, capfd):
    """A home with two collections: three documents and one."""
    assert cli("ingest", documents) == 0
    assert cli("ingest", documents / "sky.txt", "--collection", "harbour") == 0
    capfd.readouterr()
    return cli


def test_collections_are_listed_with_what_they_hold(two, told, capfd):
    rows = told("collections")["collections"]
    assert [(row["collection"], row["documents"], row["passages"], row["current"]) for row in rows] == [
        ("default", 3, 4, True),
        ("harbour", 1, 1, False),
    ]
    assert two("collections") == 0
    assert "1 document" in capfd.readouterr().out


def test_doctor_checks_every_collection(two, open_workspace, capfd):
    """It checked the default collection only, and reported nothing when another one's index was missing."""
    assert two("doctor") == 0
    assert "4 documents in default, harbour" in capfd.readouterr().out
    with open_workspace(collection="harbour") as workspace:
        workspace.index.delete(list(workspace.index.node_ids()))
    assert two("doctor") == 1
    assert "harbour: 1 passages of the registry are not in the index" in capfd.readouterr().out


@pytest.fixture
def interrupts():
    """Ctrl-C interrupts; a process in the background was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("json_too", [False, True])
def test_an_interrupted_answer_is_reported_and_kept(two, capfd, interrupts, json_too):
    def interrupt(number):
        if number == 2:
            interrupts()

    two.engine.on_piece = interrupt
    assert two("ask", "Sky?", *(["--json"] if json_too else [])) == 1
    shown = capfd.readouterr()
    assert "Interrupted" in shown.err and "Traceback" not in shown.err
    if json_too:
        assert json.loads(shown.out)["error"]["type"] == "Cancelled"
    else:
        assert shown.out.rstrip() == "It is"
    assert two.engine.stream_made.closed


def test_waiting_for_background_work_can_be_skipped(two, capfd, monkeypatch, interrupts):
    """The answer is complete by then."""
    two.engine.misses = 1
    monkeypatch.setattr(two.engine, "finish_background", interrupts)
    assert two("ask", "Sky?") == 0
    assert "Sources:" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [
        ("stdout", ["docs", "list"], 0),
        ("stdout", ["--help"], 0),
        ("stdout", ["--version"], 0),
        ("stderr", ["docs", "list", "--json"], 0),
        ("both", ["collections", "--json"], 0),
        ("both", ["docs", "show", "nosuch"], 1),
    ],
)
def test_a_closed_pipe_is_no_error_and_changes_no_exit_code(two, home, closed, arguments, code):
    reader, writer = os.pipe()
    os.close(reader)
    streams = {name: writer for name in ("stdout", "stderr") if closed in (name, "both")}
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    at = [] if {"--help", "--version"} & set(arguments) else ["--home", str(home)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments, *at], timeout=SOON_S, env=buffered, **given
    )
    os.close(writer)
    assert done.returncode == code
    assert not done.stderr, done.stderr
    assert closed != "stderr" or done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
@pytest.mark.parametrize("arguments", [["collections"], ["collections", "--json"], ["--version"]])
def test_a_full_disk_behind_stdout_is_an_error_without_traceback(home, arguments):
    at = [] if "--version" in arguments else ["--home", str(home)]
    with open("/dev/full", "w") as full:
        given = {"stdout": full, "stderr": subprocess.PIPE, "text": True, "timeout": SOON_S}
        done = subprocess.run([sys.executable, "-c", CODE, *arguments, *at], **given)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}\n",
    )


def test_a_closed_stderr_does_not_end_an_answer(two, monkeypatch, capfd):
    class Closed:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

        flush = write

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Closed())
        assert two("ask", "Sky?") == 0
    assert "Sources:" in capfd.readouterr().out


LATIN = os.fsdecode(b"caf\xe9")  # Python's word for bytes that are not UTF-8


@pytest.fixture
def written(monkeypatch):
    """What a command writes to a terminal of that encoding. Pytest's own takes everything."""

    def run(run_command, *arguments, encoding="utf-8", code=0):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", out)
            assert run_command(*arguments) == code
        return out.buffer.getvalue().decode(encoding)

    return run


def test_invalid_utf8_in_names_gives_valid_json(cli, written, documents):
    """After all the work it ended in a traceback."""
    (documents / f"{LATIN}.jpg").touch()
    value = json.loads(written(cli, "ingest", documents, documents / f"{LATIN}.png", "--json", code=1))
    assert len(value["added"]) == 3
    assert [each["path"] for each in value["skipped"]] == [str(documents / r"caf\xe9.jpg")]
    assert [each["path"] for each in value["failed"]] == [str(documents / r"caf\xe9.png")]
    bad = ["docs", "list", "--json", "--home", f"/dev/null/{LATIN}"]
    error = json.loads(written(lambda *given: main(given), *bad, code=1))["error"]
    assert f"/dev/null/{LATIN}" in error["message"]


def test_a_question_with_invalid_utf8_is_asked(two, told):
    assert told("ask", f"Who owns the {LATIN}?")["answer"] == "It is blue."
    assert "Who owns the caf??" in two.engine.requests[-1][0].segments[-1].text


@pytest.mark.parametrize("arguments", [[], ["--no-save"]])
def test_typed_input_in_another_encoding_is_accepted(two, monkeypatch, arguments):
    typed = io.TextIOWrapper(io.BytesIO(b"Who owns the caf\xe9?\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    assert two("chat", *arguments) == 0
    assert "Who owns the caf??" in two.engine.requests[-1][0].segments[-1].text


@pytest.mark.parametrize(
    ("encoding", "shown"), [("latin-1", "Café \\u0141"), ("ascii", "Caf\\u00e9 \\u0141")]
)
def test_characters_missing_in_the_terminals_encoding_are_escaped(two, written, encoding, shown):
    """The answer ended at such a character. The escapes are valid JSON too."""
    two.engine.reply = ["Café Ł", "ódź 🚢 ", "is blue."]
    said = written(two, "ask", "Sky?", encoding=encoding)
    assert said.startswith(shown) and "\\ud83d\\udea2 is blue." in said
    value = json.loads(written(two, "ask", "Sky?", "--json", encoding=encoding))
    assert value["answer"] == "Café Łódź 🚢 is blue."
