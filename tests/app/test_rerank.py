"""The reranker: it orders passages by its own scores, and its failures are named errors."""

import json
import shutil
import threading

import pytest
from app_fakes import make_cross_encoder, write_files

from ragblend.app.answering.conversation import Conversations
from ragblend.app.answering.rerank import BATCH_PAIRS, CrossEncoder
from ragblend.app.answering.retrieval import CANDIDATES_PER_RESULT, search, search_in_stages
from ragblend.app.library.ingest import ingest
from ragblend.kvstore.errors import (
    Cancelled,
    CorruptModelError,
    DeviceError,
    ModelError,
    ModelNotFoundError,
    SettingsError,
    TokenizerMissingError,
    UnsupportedModelError,
)

COLOURS = ["red", "blue", "green", "white", "black", "yellow", "brown", "grey", "golden", "rusty"]
PLACES = ["quay", "harbour", "mole", "yard"]
TEXTS = [f"The {colour} boat lies at the {place}." for place in PLACES for colour in COLOURS]
QUESTION = "Which boat lies at the harbour?"


@pytest.fixture
def folder(tmp_path):
    return make_cross_encoder(tmp_path / "reranker", [*TEXTS, QUESTION])


@pytest.fixture
def boats(tmp_path):
    """A file a text."""
    return write_files(tmp_path / "boats", TEXTS)


def plain(folder, question, texts, **how):
    """What transformers says by itself, one pair at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        pairs = [tokenizer([question], [text], return_tensors="pt", **how) for text in texts]
        return [model(**pair).logits.item() for pair in pairs]


def test_scores_are_those_of_transformers(folder):
    texts = [*TEXTS, "", TEXTS[0] * 2]
    assert len(texts) > 2 * BATCH_PAIRS
    scores = CrossEncoder(str(folder), "cpu").scores(QUESTION, texts)
    assert scores == pytest.approx(plain(folder, QUESTION, texts), abs=1e-4)
    assert CrossEncoder(str(folder), "cpu").scores(QUESTION, []) == []


def test_only_the_passage_is_truncated(folder):
    """A pair is cut to 62 tokens, three of which are its own."""
    encoder, filler = CrossEncoder(str(folder), "cpu"), "boat " * 60
    long, other_end = f"{TEXTS[0]} {filler}", f"{TEXTS[0]} {filler} golden yard"
    expected = plain(folder, QUESTION, [long], truncation="only_second", max_length=62)
    assert encoder.scores(QUESTION, [long, other_end]) == pytest.approx(expected * 2, abs=1e-4)
    assert encoder.scores(f"{QUESTION} golden", [long]) != pytest.approx(expected, abs=1e-4)
    for question in ("Which boat? " * 60, "boat " * 59):  # too long by itself, and with a pair's own tokens
        (score,) = encoder.scores(question, [TEXTS[0]])
        assert score != encoder.scores(question, [TEXTS[19]])[0], "a question leaves the passage room"


def test_a_tokenizer_may_have_a_limit_of_its_own(folder):
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 40}))
    expected = plain(folder, QUESTION, ["boat " * 60], truncation="only_second", max_length=40)
    assert CrossEncoder(str(folder), "cpu").scores(QUESTION, ["boat " * 60]) == pytest.approx(
        expected, abs=1e-4
    )


def test_device_failure_is_reported(folder, monkeypatch):
    from transformers import BertForSequenceClassification

    def full(*_, **__):
        raise RuntimeError("out of memory")

    encoder = CrossEncoder(str(folder), "cpu")
    encoder.load()
    with monkeypatch.context() as patched:
        patched.setattr(BertForSequenceClassification, "forward", full)
        with pytest.raises(DeviceError, match=r"on cpu: the device failed \(out of memory\)"):
            encoder.scores(QUESTION, TEXTS)
    assert len(encoder.scores(QUESTION, TEXTS)) == len(TEXTS)


@pytest.fixture
def asked(monkeypatch):
    """The questions and texts that a cross-encoder was asked about."""
    asked, real = [], CrossEncoder.scores

    def scores(self, question, texts, cancel=None):
        asked.append((question, list(texts)))
        return real(self, question, texts, cancel)

    monkeypatch.setattr(CrossEncoder, "scores", scores)
    return asked


def best_first(folder, question, texts):
    scores = dict(zip(texts, plain(folder, question, texts), strict=True))
    return sorted(texts, key=lambda text: -scores[text])


def test_reranker_orders_the_best_passages(open_workspace, folder, boats, asked):
    """Each text is scored once; the shown scores are still cosines."""
    (boats / "again.txt").write_text(TEXTS[10])  # which is among the nearest
    workspace = open_workspace()
    ingest(workspace, [boats])
    fused = search([workspace], QUESTION, 3)
    assert asked == []
    first, last = search_in_stages([open_workspace(reranker=str(folder))], QUESTION, 3)
    ((question, texts),) = asked
    assert (question, len(texts), first) == (QUESTION, CANDIDATES_PER_RESULT * 3 - 1, fused)
    assert [source.text for source in fused] == texts[:3] and texts.count(TEXTS[10]) == 1
    assert [source.text for source in last] == best_first(folder, QUESTION, texts)[:3] != texts[:3]
    cosines = dict(sorted((source.text, source.score) for source in search([workspace], QUESTION, 40)))
    assert [source.score for source in last] == [cosines[source.text] for source in last]


def test_results_of_both_wordings_alternate(open_workspace, folder, boats, asked, monkeypatch):
    monkeypatch.setattr("ragblend.app.answering.retrieval.MIN_OF_BEFORE", 0.0)
    workspace = open_workspace(reranker=str(folder))
    ingest(workspace, [boats])
    ways = ["Is it golden?", f"{QUESTION} Is it golden?"]
    found = search([workspace], ways[0], 2, previous=QUESTION)
    texts = asked[0][1]
    assert asked == [(way, texts) for way in ways] and len(texts) == CANDIDATES_PER_RESULT * 2
    orders = [best_first(folder, way, texts) for way in ways]
    assert orders[0][:2] != orders[1][:2]
    in_turn = dict.fromkeys(text for place in zip(*orders, strict=True) for text in place)
    assert [source.text for source in found] == list(in_turn)[:2]


def test_reranking_can_be_cancelled(open_workspace, folder, boats):
    workspace, cancel = open_workspace(reranker=str(folder)), threading.Event()
    ingest(workspace, [boats])
    stages = search_in_stages([workspace], QUESTION, 3, cancel=cancel)
    next(stages)
    cancel.set()
    with pytest.raises(Cancelled):
        next(stages)


def without_head(folder):
    """As an embedder is."""
    from transformers import BertModel

    BertModel.from_pretrained(folder).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_labels": 1}))


def with_three_labels(folder):
    shutil.rmtree(folder)
    make_cross_encoder(folder, TEXTS, 3)


def with_few_words(folder):
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder)
    model.resize_token_embeddings(5)
    model.save_pretrained(folder)


def without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def cut_off(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (with_three_labels, UnsupportedModelError, "it has 3 labels, and a cross-encoder has one"),
        (without_head, CorruptModelError, "weights are missing"),
        (with_few_words, CorruptModelError, "it cannot be used"),
        (without_tokenizer, TokenizerMissingError, "copy the tokenizer's files next to the weights"),
        (cut_off, CorruptModelError, "Fetch it again"),
        (lambda folder: (folder / "config.json").write_text("{"), CorruptModelError, "Fetch it again"),
        (lambda folder: (folder / "config.json").unlink(), ModelNotFoundError, "no config.json"),
    ],
)
def test_other_models_are_refused_as_reranker(folder, damage, error, words):
    damage(folder)
    with pytest.raises(error, match=words) as caught:
        CrossEncoder(str(folder), "cpu").scores(QUESTION, TEXTS)
    assert str(folder) in str(caught.value) and "eranker" in str(caught.value)


def test_answers_work_again_without_a_damaged_reranker_and_with_a_sound_one(open_workspace, boats, folder):
    cut_off(folder)
    workspace = open_workspace(reranker=str(folder))
    ingest(workspace, [boats])
    talks = Conversations(workspace.workspaces)
    with pytest.raises(CorruptModelError, match="reranker"):
        talks.answer(QUESTION)
    workspace.workspaces.change(reranker="")
    assert talks.answer(QUESTION).whole().sources
    shutil.rmtree(folder)
    make_cross_encoder(folder, [*TEXTS, QUESTION])
    workspace.workspaces.change(reranker=str(folder))
    assert talks.answer(QUESTION).whole().sources


@pytest.mark.parametrize("name", ["/no/such/folder", "somebody/nothing", "default-model"])
def test_missing_reranker_is_refused_before_loading(open_workspace, name):
    """Also a hub id when the hub is not reachable."""
    workspace = open_workspace(reranker=name)
    for refused in (workspace.check_engine, workspace.reranker.load):
        with pytest.raises(ModelNotFoundError, match="reranker") as caught:
            refused()
        assert name in str(caught.value)


@pytest.mark.parametrize("name", [" ", "default", "a.gguf", "folder/A.GGUF"])
def test_language_model_cannot_be_a_reranker(open_workspace, name):
    with pytest.raises(SettingsError, match="reranker"):
        open_workspace(reranker=name)


def test_reranker_is_shared_and_replaced_on_change(workspaces, folder):
    workspaces.create("other")
    assert workspaces.first.reranker is None
    workspaces.change(reranker=str(folder))
    shared = workspaces.first.reranker
    view = workspaces.with_settings(workspaces.settings)
    assert shared is workspaces.of("other").reranker is view.first.reranker
    workspaces.change(top_k=3)
    assert workspaces.first.reranker is not shared
    assert workspaces.with_settings(workspaces.settings.changed({"reranker": ""})).first.reranker is None


def test_command_line_accepts_a_reranker(cli, told, folder, boats, monkeypatch):
    cli("ingest", boats)
    plain_ones = told("ask", QUESTION, "--top-k", "3")["sources"]
    monkeypatch.chdir(folder.parent)
    ones = told("ask", QUESTION, "--top-k", "3", "--reranker", folder.name)["sources"]
    assert [each["text"] for each in ones] != [each["text"] for each in plain_ones]
    assert told("ask", QUESTION, "--top-k", "3", "--reranker", "")["sources"] == plain_ones
    assert cli("ask", QUESTION, "--reranker", "default") == 2
    with pytest.raises(ModelError):
        CrossEncoder("not/here", None).load()
