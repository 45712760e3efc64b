"""Wrong arguments are refused before anything heavy is loaded, in a process that cannot import heavy packages."""

import json
import subprocess
import sys

import pytest
import torch

# Whatever reads a weight, embeds a word or opens an index needs one of these.
HEAVY = ("transformers", "safetensors", "sentence_transformers", "chromadb", "llama_index", "gradio")
RUN = """
import contextlib, io, json, os, sys
poisoned, runs = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(poisoned))
from ragblend.app.cli.main import main
done = []
for arguments, environment in runs:
    os.environ.update(environment)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(arguments)
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    for name in environment: del os.environ[name]
    done.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""


@pytest.fixture
def without(home):
    """Runs command lines in a process in which these cannot be imported; gives code, stdout, stderr of each.

    One process for all of them: it is Python's start that takes the time.
    """

    def run(runs, poisoned=HEAVY):
        given = [[[*arguments, "--home", str(home)], environment] for arguments, environment in runs]
        process = subprocess.run(
            [sys.executable, "-c", RUN],
            input=json.dumps([poisoned, given]),
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    return run


@pytest.fixture
def library(cli, documents, capfd):
    """A home with two collections."""
    assert cli("ingest", documents, "--collection", "harbour") == 0
    assert cli("ingest", documents / "sky.txt") == 0
    capfd.readouterr()


ASK = ("ask", "Why?")
REFUSED = {
    "method": ((*ASK, "--method", "prob-shift"), "did you mean 'probe-shift'"),
    "ratio": ((*ASK, "--ratio", "7"), "between 0 and 1"),
    "device": ((*ASK, "--device", "tpu"), "cpu, cuda or mps"),
    "device number": ((*ASK, "--device", "cuda:first"), "cpu, cuda or mps"),
    "dtype": ((*ASK, "--dtype", "int4"), "float32, bfloat16, float16"),
    "top k": ((*ASK, "--top-k", "0"), "number of passages"),
    "model": ((*ASK, "--model", "defualt"), "did you mean 'default'"),
    "model folder": ((*ASK, "--model", "/no/such/folder"), "/no/such/folder"),
    "gguf": ((*ASK, "--model", "gone.gguf"), "gone.gguf"),
    "collection": ((*ASK, "--collection", "harbor"), "default, harbour; did you mean 'harbour'"),
    "trace": ((*ASK, "--trace", "x.foo"), ".json"),
    "chat": (("chat", "--method", "nosuch"), "cacheblend"),
    "chat in": (("chat", "--collection", "nosuch"), "default, harbour"),
    "ingest on": (("ingest", ".", "--device", "tpu"), "cpu, cuda or mps"),
    "ingest for": (("ingest", ".", "--model", "defualt"), "did you mean 'default'"),
    "documents of": (("docs", "list", "--collection", "nosuch"), "default, harbour"),
    "a document of": (("docs", "show", "sky.txt", "--collection", "nosuch"), "default, harbour"),
    "statistics of": (("store", "stats", "--collection", "nosuch"), "default, harbour"),
    "page on": (("ui", "--no-browser", "--device", "tpu"), "cpu, cuda or mps"),
    "page with": (("ui", "--no-browser", "--model", "defualt"), "did you mean 'default'"),
    "page of": (("up", "/no/such/folder", "--no-browser"), "/no/such/folder"),
    "demo on": (("demo", "--dtype", "int4"), "float32, bfloat16, float16"),
    "bench": (("bench", "quality", "--methods", "nosuch"), "cacheblend"),
    "bench on": (("bench", "ttft", "--device", "tpu"), "cpu, cuda or mps"),
    "bench of a shared store": (("bench", "ttft", "--remote", "redis://here"), "leave --remote out"),
    "tune": (("tune", "--minutes", "-1"), "minute"),
}


SETTINGS = {
    "METHOD": ("nosuch", "cacheblend"),
    "STORE_POLICY": ("fifo", "lru"),
    "DEVICE": ("tpu", "cuda"),
    "COLLECTION": ("elsewhere", "default, harbour"),
}


@pytest.mark.usefixtures("library")
def test_wrong_arguments_and_settings_are_refused_before_loading(without):
    """They took 50 s: the embedder, the index and the model's conversion came first."""
    cases = [(list(arguments), {}, says) for arguments, says in REFUSED.values()]
    cases += [([*ASK], {f"RAGBLEND_{name}": value}, says) for name, (value, says) in SETTINGS.items()]
    if not torch.cuda.is_available():  # a missing accelerator
        cases += [([*command, "--device", "cuda"], {}, "--device cpu") for command in (ASK, ("ingest", "."))]
    done = without([(arguments, environment) for arguments, environment, _ in cases])
    wrong = [
        (arguments, environment, code, err)
        for (arguments, environment, says), (code, _, err) in zip(cases, done, strict=True)
        if code != 2 or says not in err
    ]
    assert wrong == []


@pytest.mark.usefixtures("library")
def test_most_wrong_arguments_are_refused_before_torch_is_imported(without):
    named = ("ratio", "device", "dtype", "model", "gguf", "collection", "trace", "chat in", "documents of")
    done = without([(list(REFUSED[name][0]), {}) for name in named], (*HEAVY, "torch"))
    assert {name: code for name, (code, *_) in zip(named, done, strict=True)} == dict.fromkeys(named, 2)


def test_an_empty_library_is_reported_at_once(without):
    """It loaded embedder and model first; chat even waited for a question."""
    for code, out, err in without([([*ASK], {}), (["chat"], {})], (*HEAVY, "torch")):
        assert code == 1 and out == ""
        assert "There are no documents yet" in err and "ragblend ingest PATH" in err
