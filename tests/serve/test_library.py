"""Documents are uploaded, asked about and deleted, each key in its own collection; and what the owner sees."""

import errno
import os
import re
import shutil
import socket
import tempfile
import threading

import pytest
from servers import events
from waiting import SOON_S, until

from ragblend.app.serve.metrics import Metrics
from ragblend.app.serve.service import Limits
from ragblend.kvstore.errors import Cancelled

TRAMWAY = (
    b"The tramway of Dunlin was built in 1901 by Ada Crane. It ran from the market square to the lighthouse.\n\n"
    b"Its last carriage was sold to a farmer, who kept hens in it."
)
QUESTION = "Who built the tramway of Dunlin?"


@pytest.fixture
def ada(served):
    with served.client("ada") as client:
        yield client


@pytest.fixture
def document(ada):
    """One of ada's, which is askable."""
    queued = ada.post("/v1/documents", files={"file": ("../tramway.txt", TRAMWAY)})
    assert queued.status_code == 202 and queued.json()["queued"] == 1
    [found] = until(lambda: [d for d in ada.get("/v1/documents").json()["data"] if d["state"] == "done"])
    yield found
    ada.delete(f"/v1/documents/{found['id']}")


def test_uploads_are_listed_with_their_job_and_without_paths(served, ada, document) -> None:
    assert (document["name"], document["collection"], document["notes"]) == ("tramway.txt", "ada", [])
    jobs = ada.get("/v1/documents/jobs").json()
    assert [(job["name"], job["state"]) for job in jobs["data"]] == [("tramway.txt", "done")]
    said = ada.get("/v1/documents").text + ada.get("/v1/documents/jobs").text
    assert served.service.home not in said


def test_a_question_is_answered_with_its_sources(ada, document) -> None:
    answer = ada.post("/v1/rag/ask", json={"question": QUESTION, "max_tokens": 5}).json()
    assert [source["document"] for source in answer["sources"]] == ["tramway.txt"]
    assert answer["tokens"]["generated"] == 5
    asked = {"question": QUESTION, "max_tokens": 5, "stream": True, "collection": "ada"}
    *pieces, last = events(ada.post("/v1/rag/ask", json=asked))
    assert "".join(piece["delta"] for piece in pieces) == last["answer"] == answer["answer"]


def test_history_is_part_of_the_prompt(ada, document) -> None:
    history = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Ada Crane did."}]
    short = ada.post("/v1/rag/ask", json={"question": "When was it built?", "max_tokens": 1}).json()
    long = ada.post(
        "/v1/rag/ask", json={"question": "When was it built?", "max_tokens": 1, "history": history}
    ).json()
    assert long["tokens"]["prompt"] > short["tokens"]["prompt"]


def test_keys_do_not_see_each_others_documents(served, ada, document) -> None:
    with served.client("bob") as bob, served.client("owner-key") as chief:
        assert bob.get("/v1/documents").json()["data"] == []
        assert bob.get("/v1/documents/jobs").json()["data"] == []
        unknown = bob.delete("/v1/documents/0123456789abcdef")
        other = bob.delete(f"/v1/documents/{document['id']}")
        assert (other.status_code, other.text) == (unknown.status_code, unknown.text) == (404, unknown.text)
        hidden, missing = (bob.get("/v1/documents", params={"collection": name}) for name in ("ada", "eve"))
        assert hidden.status_code == missing.status_code == 404
        assert hidden.text == missing.text.replace("eve", "ada")
        assert bob.post("/v1/rag/ask", json={"question": QUESTION}).json()["sources"] == []
        seen = chief.get("/v1/documents", params={"collection": "ada"}).json()["data"]
        assert [each["id"] for each in seen] == [document["id"]]


def test_library_passages_are_recognised_in_any_prompt(served, document) -> None:
    """A chat program that does its own retrieval reuses the stored KV too."""
    text = TRAMWAY.decode()
    until(lambda: served.engine.finish_background() and served.service.app.jobs.overview().is_idle)
    answer = served.chat(f"{text}\n\n{QUESTION}").json()
    assert (
        answer["kv"][0]["hits"] == document["passages"]
        and answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    )
    assert served.chat(f"{text}\n\n{QUESTION}", "bob").json()["kv"][0]["chunks"] == []


def test_a_deleted_document_is_gone(ada, document) -> None:
    gone = ada.delete(f"/v1/documents/{document['id']}").json()
    assert gone["deleted"] and gone["id"] == document["id"]
    assert ada.get("/v1/documents").json()["data"] == []
    assert ada.post("/v1/rag/ask", json={"question": QUESTION}).json()["sources"] == []


def test_unreadable_files_are_named(ada) -> None:
    none = ada.post("/v1/documents", files=[("file", ("a.exe", b"MZ")), ("file", ("b.txt", b""))])
    assert none.status_code == 400
    assert "a.exe" in none.json()["error"]["message"] and "b.txt" in none.json()["error"]["message"]
    some = ada.post("/v1/documents", files=[("file", ("c.txt", TRAMWAY)), ("file", ("b.txt", b""))])
    assert some.status_code == 202 and some.json()["queued"] == 1
    assert [each["name"] for each in some.json()["failed"]] == ["b.txt"]
    [found] = until(lambda: [d for d in ada.get("/v1/documents").json()["data"] if d["state"] == "done"])
    ada.delete(f"/v1/documents/{found['id']}")


@pytest.mark.parametrize(
    ("method", "path", "sent"),
    [
        ("POST", "/v1/documents?collection=default", {"files": {"file": ("a.txt", TRAMWAY)}}),
        ("POST", "/v1/documents", {"files": {"file": ("a.txt", TRAMWAY)}, "data": {"colection": "default"}}),
        ("POST", "/v1/rag/ask?collection=default", {"json": {"question": QUESTION, "max_tokens": 1}}),
        ("DELETE", "/v1/documents/none?collection=default", {}),
        ("GET", "/v1/documents?colection=default", {}),
        ("GET", "/v1/documents/jobs?colection=default", {}),
    ],
)
def test_a_collection_where_none_is_read_is_refused(ada, method, path, sent) -> None:
    """It was ignored: a document came into the key's first collection, which others may share."""
    refused = ada.request(method, path, **sent)
    assert refused.status_code == 400 and "lection: " in refused.json()["error"]["message"], refused.text
    assert refused.json()["error"]["code"] == "unknown_parameter"
    assert ada.get("/v1/documents").json()["data"] == []


@pytest.mark.parametrize(
    ("owner", "name", "nbytes", "why"),
    [
        (tempfile.SpooledTemporaryFile, "rollover", 3 << 20, errno.ENOSPC),
        (shutil, "copyfileobj", 10, errno.EDQUOT),
        (shutil, "copyfile", 10, errno.ENOSPC),
    ],
    ids=["while it comes", "at the copy, by a quota", "when it is kept"],
)
def test_an_upload_to_a_full_disk_gets_507(ada, monkeypatch, owner, name, nbytes, why) -> None:
    """It was a 500, or a 400 for a body that cannot be read."""

    def full(*_):
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(owner, name, full)
    refused = ada.post("/v1/documents", files={"file": ("a.txt", b"h" * nbytes)})
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")


def test_upload_errors_show_no_paths(served, ada, monkeypatch) -> None:
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "copyfile", refused)
    said = ada.post("/v1/documents", files={"file": ("a.txt", b"herring")})
    assert said.status_code == 400 and "Permission denied" in said.text
    assert served.service.home not in said.text


def test_an_upload_does_not_recreate_a_removed_collection(served, monkeypatch) -> None:
    """It was removed while the file was copied."""
    services, copied = served.service.app, shutil.copyfileobj
    served.add_key("emil")

    def removed_meanwhile(*given):
        services.remove_collection("emil")
        return copied(*given)

    monkeypatch.setattr(shutil, "copyfileobj", removed_meanwhile)
    with served.client("emil") as emil:
        assert emil.post("/v1/documents", files={"file": ("a.txt", TRAMWAY)}).status_code == 404
    served.known.remove("emil")
    assert "emil" not in services.workspaces.names() and services.jobs.overview().total == 0


def test_an_upload_is_admitted_before_its_body_is_read(served, ada, monkeypatch) -> None:
    """Each wrote up to 512 MiB to the disk before it was counted."""
    monkeypatch.setattr(served.service.admission, "_limits", Limits(requests_per_client=1))
    begun = served.raw("POST", "/v1/documents", {}, "transfer-encoding: chunked").replace(
        b"content-length: 2\r\n", b""
    )
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(
            begun.replace(b"application/json", b"multipart/form-data; boundary=x").removesuffix(b"{}")
        )
        until(lambda: served.service.admission.inside == 1)
        refused = ada.post("/v1/documents", files={"file": ("tramway.txt", TRAMWAY)})
        assert refused.status_code == 429 and "retry-after" in refused.headers
    until(lambda: served.service.admission.inside == 0)


def test_embeddings_equal_the_apps(served, ada) -> None:
    import base64

    import numpy as np

    told = {"model": "all-MiniLM-L6-v2", "input": ["A tram.", "A lighthouse by the sea."]}
    plain = ada.post("/v1/embeddings", json=told).json()
    packed = ada.post("/v1/embeddings", json=told | {"encoding_format": "base64", "model": ""}).json()
    assert packed["model"] == "all-MiniLM-L6-v2", "an empty name, and any case, as of the model that answers"
    assert (
        ada.post("/v1/embeddings", json=told | {"model": "ALL-minilm-L6-v2"}).json()["data"] == plain["data"]
    )
    expected = served.service.app.workspaces.first.embedder.embed_means(told["input"])
    for one, other, vector in zip(plain["data"], packed["data"], expected, strict=True):
        assert np.allclose(one["embedding"], vector)
        assert np.array_equal(np.frombuffer(base64.b64decode(other["embedding"]), "<f4"), vector)
    assert plain["usage"]["total_tokens"] == 3 + 6


@pytest.fixture
def embedding(served, monkeypatch):
    """What is sent for a text of minutes, an event when it is begun, and what each such call ended with."""
    embedder = served.service.app.workspaces.first.embedder
    embed, begun, ended = embedder.embed_means, threading.Event(), []

    def watched(texts, *more):
        begun.set()
        try:
            return embed(texts, *more)
        except Cancelled as error:
            ended.append(error)
            raise

    monkeypatch.setattr(embedder, "embed_means", watched)
    return {"model": embedder.name, "input": ["harbour " * 128_000]}, begun, ended


def test_disconnecting_cancels_an_embedding_and_a_timeout_a_waiting_question(
    served, ada, document, embedding
) -> None:
    """The embedding continued without a client and was not counted, and a question's timeout did not hold behind it."""
    body, begun, ended = embedding
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(served.raw("POST", "/v1/embeddings", body))
        assert begun.wait(SOON_S)
        late = ada.post("/v1/rag/ask", json={"question": QUESTION, "max_tokens": 1, "timeout": 0.2})
        assert late.status_code == 408 and not ended and served.service.admission.inside == 1
    until(lambda: served.service.admission.inside == 0)
    assert len(ended) == 1


def test_a_cancelled_question_is_counted_until_its_search_ends(served, document, monkeypatch) -> None:
    """A client that asks and disconnects again and again could run any number of searches."""
    conversations, going, goes_on = served.service.app.conversations, threading.Event(), threading.Event()
    answer, cancels = conversations.answer, []

    def slow(*given):
        cancels.append(given[1].cancel)
        going.set()
        assert goes_on.wait(SOON_S)
        return answer(*given)

    monkeypatch.setattr(conversations, "answer", slow)
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(served.raw("POST", "/v1/rag/ask", {"question": QUESTION, "max_tokens": 1}))
        assert going.wait(SOON_S)
    until(lambda: cancels[0].is_set())
    assert served.service.admission.inside == 1
    goes_on.set()
    until(lambda: served.service.admission.inside == 0)


def test_embeddings_have_the_answers_time_limit(served, ada, embedding, monkeypatch) -> None:
    monkeypatch.setattr(served.service, "limits", Limits(answer_s=0.2))
    body, _, ended = embedding
    late = ada.post("/v1/embeddings", json=body)
    assert (late.status_code, late.json()["error"]["code"], len(ended)) == (504, "timeout", 1)


def test_a_failed_start_is_cleared_by_the_first_answer(served, monkeypatch) -> None:
    """Health stayed failed, and a supervisor would have ended a working server."""
    with served.client("") as anybody, served.client("bob") as bob:
        assert anybody.get("/healthz").json() == {"status": "ok"}
        monkeypatch.setattr(served.service.startup, "problem", "The disk was full.")
        assert bob.post("/v1/rag/ask", json={"question": QUESTION}).json()["tokens"]["prompt"] == 0
        assert anybody.get("/healthz").status_code == 503, "nothing was found, so the model was not asked"
        assert served.chat(max_tokens=1).status_code == 200 and anybody.get("/healthz").status_code == 200


def test_metrics_of_a_long_run_have_all_digits() -> None:
    """With six digits, sums stood still after a day, and the uptime after twelve."""
    metrics = Metrics()
    metrics.observe("ttft_seconds", 123456.75)
    text = metrics.text({"uptime_seconds": 1234567.5})
    assert "ragblend_ttft_seconds_sum 123456.75\n" in text
    assert "ragblend_uptime_seconds 1234567.5\n" in text


def test_metrics_in_prometheus_format(served) -> None:
    def counted():
        with served.client("owner-key") as chief:
            text = chief.get("/metrics").text
        assert all(
            re.fullmatch(r"# TYPE ragblend_\w+ \w+|ragblend_\w+(\{.*\})? -?[\d.e+-]+", line)
            for line in text.splitlines()
        )
        return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    before = counted()
    answer = served.chat("Count this.", max_tokens=7).json()
    with served.client("bob") as bob:
        bob.post("/v1/rag/ask", json={"question": QUESTION})  # nothing is found: no token is read
    after = counted()

    def more(name):
        return float(after[name]) - float(before.get(name, 0))

    assert more('ragblend_tokens_total{kind="generated"}') == 7
    assert more('ragblend_tokens_total{kind="fresh"}') == answer["kv"][0]["fresh"] > 0
    assert more('ragblend_requests_total{route="/v1/chat/completions",status="200"}') == 1
    assert more("ragblend_ttft_seconds_count") == 1 == more('ragblend_ttft_seconds_bucket{le="+Inf"}')
    assert float(after["ragblend_requests_inside"]) == 0
    assert 'ragblend_store_hits_total{tier="disk"}' in after
