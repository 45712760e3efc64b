"""`/v1/rerank` sorts documents by the cross-encoder's scores, and says so if there is none."""

import math

import pytest
from app_fakes import make_cross_encoder
from servers import serving

from ragblend.app.answering.rerank import CrossEncoder

QUERY = "Which boat lies at the harbour?"
TEXTS = [
    f"The {colour} boat lies at the {place}."
    for colour, place in zip(
        ("red", "blue", "green", "rusty"), ("quay", "harbour", "mole", "yard"), strict=True
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_cross_encoder(tmp_path_factory.mktemp("models") / "ranker", [*TEXTS, QUERY])


@pytest.fixture(scope="module")
def reranking(home_of, tiny_folder, folder):
    with serving(home_of(), tiny_folder, reranker=str(folder)) as found:
        yield found


def post(served, **change):
    body = {"model": "ranker", "query": QUERY, "documents": TEXTS} | change
    with served.client() as client:
        return client.post("/v1/rerank", json=body)


def test_documents_are_sorted_by_the_cross_encoders_scores(reranking, folder) -> None:
    with CrossEncoder(str(folder), "cpu") as encoder:
        expected = [1 / (1 + math.exp(-score)) for score in encoder.scores(QUERY, TEXTS)]
    answer = post(reranking, documents=[{"text": TEXTS[0]}, *TEXTS[1:]]).json()
    results = answer["results"]
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(expected, reverse=True))
    for each in results:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]])
        assert each["document"] == {"text": TEXTS[each["index"]]}
    assert answer["model"] == "ranker" and answer["usage"]["total_tokens"] > 4 * len(TEXTS)
    best = post(reranking, top_n=2, return_documents=False, model="Ranker").json()["results"]
    assert [each["index"] for each in best] == [each["index"] for each in results[:2]]
    assert all(each.keys() == {"index", "relevance_score"} for each in best)
    with reranking.client() as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]][-1] == "ranker"
        assert client.get("/v1/models/ranker").status_code == 200


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"model": "jina-reranker-v2"}, 404, "the reranker is 'ranker'"),
        ({"documents": []}, 400, "documents"),
        ({"documents": [{"image": "x"}]}, 400, "documents.0"),
        ({"top_n": 0}, 400, "top_n"),
        ({"query": None}, 400, "query"),
    ],
)
def test_invalid_requests_are_named(reranking, change, status, named) -> None:
    answer = post(reranking, **change)
    assert answer.status_code == status and named in answer.json()["error"]["message"]


def test_without_a_reranker_the_way_to_one_is_named(served) -> None:
    answer = post(served)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "no_reranker" and "`reranker` in the settings" in error["message"]


def test_a_reranker_that_is_gone_shows_no_path(home_of, tiny_folder, folder) -> None:
    with serving(home_of(), tiny_folder, reranker=str(folder)) as served:
        served.service.app.workspaces.change(reranker=str(folder.parent / "gone"))
        answer = post(served, model="gone")
        assert answer.status_code == 503 and str(folder.parent) not in answer.text
