"""A hanging model ends the process; a slow, loading or idle one does not."""

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import httpx
import pytest
from app_fakes import make_cross_encoder
from servers import serving
from waiting import SOON_S, until

from ragblend.app.serve.watchdog import EX_TEMPFAIL, watch
from ragblend.app.workspace import Workspace, Workspaces
from ragblend.integrations.embeddings import BUNDLED, Embedder

LIMIT_S = 0.5
SERVER_OF_AN_EMBEDDER_THAT_HANGS = """
import sys, time
from transformers.models.bert.modeling_bert import BertModel
from ragblend.app.cli.main import main
BertModel.forward = lambda *_, **__: time.sleep(600)
main(sys.argv[1:])
"""


@contextmanager
def hanging(monkeypatch, model):
    """Each call of that model, or kind of model, until the end; an event when the first one is made."""
    begun, comes_back, forward = threading.Event(), threading.Event(), model.forward

    def hang(*given, **named):
        begun.set()
        assert comes_back.wait(SOON_S)
        return forward(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", hang)
        try:
            yield begun
        finally:
            comes_back.set()


@contextmanager
def watching(queues, limit_s=LIMIT_S):
    """The statuses that the process would have ended with."""
    ended = []
    stopped = watch(queues, limit_s, ended.append)
    try:
        yield ended
    finally:
        stopped.set()


@pytest.mark.parametrize("what", ["an answer", "a passage", "what is measured after it"])
def test_a_hanging_device_ends_the_process(served, monkeypatch, what) -> None:
    served.chat()
    assert served.engine.finish_background(SOON_S)
    runtime = served.engine.runtime

    def measure(_):
        runtime.decode_selector.needs_measurement = True
        runtime.measure_decoding()

    work = {
        "an answer": served.chat,
        "a passage": lambda text: served.engine.encode([text]),
        "what is measured after it": measure,
    }
    asked = threading.Thread(target=work[what], args=("Is it there?",))
    assert runtime.queue.stalled_s == 0, "nobody has the device"
    with hanging(monkeypatch, runtime.loaded.model.model.layers[1]) as begun:
        asked.start()
        assert begun.wait(SOON_S)
        with watching(lambda: [runtime.queue]) as ended:
            until(lambda: ended)
    asked.join(SOON_S)
    assert ended == [EX_TEMPFAIL]


def test_loading_a_model_is_not_a_hang(served) -> None:
    """Loading and converting a model holds the device without completing a layer."""
    served.chat()
    with served.engine.runtime.queue.turn():
        assert served.engine.runtime.queue.stalled_s == 0


@pytest.mark.parametrize("what", ["the embedder", "a reranker"])
def test_a_hanging_embedder_or_reranker_ends_the_process(
    home_of, tiny_folder, tmp_path, monkeypatch, what
) -> None:
    """Only the answering model's queue was watched."""
    from transformers import BertForSequenceClassification, BertModel

    texts = ["The ferry leaves at seven.", "The ferry is painted blue."]
    with serving(home_of(), tiny_folder) as served, served.client("owner-key") as client:
        reranker = make_cross_encoder(tmp_path / "reranker", texts)
        served.service.app.workspaces.change(reranker=str(reranker))
        files = [("file", (f"{number}.txt", text)) for number, text in enumerate(texts)]
        assert client.post("/v1/documents", files=files).json()["queued"] == 2
        until(lambda: [d["state"] for d in client.get("/v1/documents").json()["data"]] == ["done"] * 2)
        workspace = served.service.app.workspaces.first
        question = {"question": "When does the ferry leave?", "max_tokens": 2}
        assert client.post("/v1/rag/ask", json=question).status_code == 200
        until(lambda: not any(queue.stalled_s for queue in workspace.queues))
        kind = BertModel if what == "the embedder" else BertForSequenceClassification
        asked = threading.Thread(target=client.post, args=("/v1/rag/ask",), kwargs={"json": question})
        with hanging(monkeypatch, kind) as begun:
            asked.start()
            assert begun.wait(SOON_S)
            with watching(lambda: workspace.queues) as ended:
                until(lambda: ended)
        asked.join(SOON_S)
        assert ended == [EX_TEMPFAIL]


def test_every_embedder_is_watched_and_the_registry_is_not_read(tmp_path, monkeypatch) -> None:
    """Those of other collections were not, and a registry that could not be read ended the watchdog."""
    with Workspaces.open(tmp_path / "home") as workspaces:
        monkeypatch.setattr(Workspace, "engine", SimpleNamespace(queues=()))
        monkeypatch.setattr(Workspaces, "library", None)
        of_another = workspaces.embedder("another").queue
        assert of_another in workspaces.first.queues


def test_a_server_with_a_hanging_embedder_exits(home_of, tiny_folder) -> None:
    options = ("--home", str(home_of()), "--model", str(tiny_folder), "--port", "0", "--hang", "1", "--json")
    command = [sys.executable, "-c", SERVER_OF_AN_EMBEDDER_THAT_HANGS, "serve", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = json.loads(process.stdout.readline())["url"]
        told = {"model": BUNDLED, "input": "A lighthouse by the sea."}
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url}/embeddings", json=told, timeout=SOON_S)
        assert process.wait(SOON_S) == EX_TEMPFAIL
        assert "integrations/embeddings.py" in process.stderr.read(), "it says where it was"
    finally:
        process.kill()
        process.communicate()


def test_each_batch_of_a_long_ingest_counts_as_progress(monkeypatch) -> None:
    """Each forward pass is progress, even if all together take longer than the limit."""
    from transformers import BertModel

    embedder, forward, passes = Embedder(dtype="float32"), BertModel.forward, []

    def timed(*given, **named):
        begun, stalled_s = time.monotonic(), embedder.queue.stalled_s
        result = forward(*given, **named)
        passes.append((begun, stalled_s))
        return result

    embedder.load()
    monkeypatch.setattr(BertModel, "forward", timed)
    embedder.embed_passages([f"text number {number}" for number in range(96)])  # two batches, three passes
    assert len(passes) > 1
    for (before, _), (begun, stalled_s) in pairwise(passes):
        assert stalled_s < begun - before, "the pass before was counted as progress"
