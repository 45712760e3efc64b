"""Programs that are no Python packages of this environment, run as a user runs them, each where it is installed.

They are found by PATH (`llm`, `aider`, `cn`, `node`), and Vercel's AI SDK in the folder that NODE_PATH names.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny_models
from servers import serving
from test_agent_loops import ANSWER, ASKED, FOUND, left_open, scripted, weather
from waiting import SOON_S

__all__ = ["left_open", "scripted"]
PROGRAMS = Path(__file__).with_name("clients")


@pytest.fixture(scope="module")
def caller(home_of, tmp_path_factory):
    """Coding assistants' prompts have thousands of tokens."""
    options = {"is_endless": True, "template": tiny_models.TOOLS_TEMPLATE, "max_position_embeddings": 32_768}
    folder = tiny_models.save_model("llama", tmp_path_factory.mktemp("models") / "caller", **options)
    with serving(home_of(), folder) as found:
        yield found


@pytest.fixture
def run(tmp_path):
    """run(program, *words): what it printed; in an empty home of its own."""

    def started(program, *words, folder=tmp_path, **variables):
        if (found := shutil.which(program)) is None:
            pytest.skip(f"{program} is not installed")
        settings = {name: os.environ[name] for name in ("PATH", "NODE_PATH") if name in os.environ}
        settings |= {"HOME": str(tmp_path), "LLM_USER_PATH": str(tmp_path), **variables}
        done = subprocess.run(
            [found, *words],
            cwd=folder,
            env=settings,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=4 * SOON_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return started


@pytest.fixture
def llm(run, tmp_path):
    """llm(served, *words). Source: llm.datasette.io/en/stable/other-models.html and /tools.html."""

    def started(served, *words):
        model = {"model_id": "ragblend", "model_name": served.service.model, "api_base": f"{served.url}/v1"}
        model |= {"supports_tools": True, "supports_schema": True, "api_key_name": "ragblend"}
        (tmp_path / "keys.json").write_text(json.dumps({"ragblend": served.keys["ada"]}))
        (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
        return run("llm", "-m", "ragblend", *words)

    return started


@pytest.mark.parametrize("more", [[], ["--no-stream"]], ids=["streamed", "whole"])
def test_llm_answers_and_goes_on(scripted, llm, more):
    served = scripted(lambda prompt: "Rome." if "Paris." in prompt else "Paris.")
    assert llm(served, *more, "Name a city.") == "Paris.\n"
    assert llm(served, *more, "-c", "Another one.") == "Rome.\n"


def test_llm_gives_an_object_of_its_schema(scripted, llm):
    served = scripted(lambda _: '{"city": "Paris"}')
    assert json.loads(llm(served, "--schema", "city str", "Name a city.")) == {"city": "Paris"}


def test_llm_calls_a_function_and_ends(scripted, llm, tmp_path):
    (tmp_path / "tools.py").write_text(
        f'def get_weather(city: str) -> str:\n    """The weather of a city."""\n    return "{FOUND}"\n'
    )
    assert llm(scripted(weather), "--functions", str(tmp_path / "tools.py"), ASKED).endswith(f"{ANSWER}\n")


def test_aider_edits_a_file_and_commits_it(scripted, run, tmp_path):
    """Source: aider.chat/docs/llms/openai-compat.html and /docs/scripting.html."""
    edited = "def add(a, b):\n    return a + b\n"
    served = scripted(lambda _: f"calc.py\n```\n{edited}```\n")
    work = tmp_path / "work"
    work.mkdir()
    (work / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    author = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org"}
    author |= {"GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.org"}
    for words in (["init", "-q"], ["add", "calc.py"], ["commit", "-qm", "First."]):
        run("git", *words, folder=work, **author)
    place = {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": served.keys["ada"]}
    words = [
        "--model",
        f"openai/{served.service.model}",
        "--edit-format",
        "whole",
        "--yes",
        "--no-check-update",
    ]
    words += ["--no-analytics", "--no-gitignore", "--no-show-model-warnings", "--map-tokens", "0"]
    words += ["--commit-prompt", "Say what was done."]
    run("aider", *words, "--message", "Let add return the sum.", "calc.py", folder=work, **author, **place)
    assert (work / "calc.py").read_text() == edited
    assert len(run("git", "log", "--oneline", folder=work).splitlines()) == 2


def test_continue_reads_a_file_and_ends(scripted, run, tmp_path):
    """Source: docs.continue.dev/guides/cli and docs.continue.dev/reference."""
    (tmp_path / "note.txt").write_text(FOUND)
    call = json.dumps({"name": "Read", "arguments": {"filepath": str(tmp_path / "note.txt")}})
    served = scripted(lambda prompt: ANSWER if FOUND in prompt else f"<tool_call>\n{call}\n</tool_call>")
    model = {"name": "RAGBlend", "provider": "openai", "model": served.service.model, "roles": ["chat"]}
    model |= {"apiBase": f"{served.url}/v1", "apiKey": served.keys["ada"], "capabilities": ["tool_use"]}
    config = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    words = [
        "--config",
        str(tmp_path / "config.yaml"),
        "--auto",
        "-p",
        "What does note.txt say of the weather?",
    ]
    assert run("cn", *words, CONTINUE_TELEMETRY_ENABLED="0").strip().endswith(ANSWER)


def test_vercels_sdk_calls_a_tool_and_gives_an_object(scripted, run, tmp_path):
    modules = Path(os.environ.get("NODE_PATH", ""))
    if not (modules / "ai").is_dir():
        pytest.skip("NODE_PATH names no folder with Vercel's `ai`")

    def answer_to(prompt):
        return '{"city": "Paris"}' if "Name a city." in prompt else weather(prompt)

    (tmp_path / "node_modules").symlink_to(modules)
    shutil.copy(PROGRAMS / "weather.mjs", tmp_path)
    served = scripted(answer_to)
    place = [f"{served.url}/v1", served.keys["ada"], served.service.model]
    said = json.loads(run("node", "weather.mjs", *place, ASKED, FOUND))
    assert said.pop("tokens") > 0
    assert said == {"whole": ANSWER, "steps": 2, "streamed": ANSWER, "place": {"city": "Paris"}}
