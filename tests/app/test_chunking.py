"""Cutting documents: passages fit, have all text once, and have locations."""

import pytest

from ragblend.app.library import chunking
from ragblend.app.library.chunking import cut_document
from ragblend.app.library.readers import DocumentPart
from ragblend.kvstore.errors import OversizedDocumentError


def words(text):
    return len(text.split())


def cut(parts, chunk_tokens, overlap_tokens=0, count=words):
    return cut_document("d", parts, count, chunk_tokens, overlap_tokens)


def sentences(tag, count):
    return " ".join(f"This is sentence {tag}{n} of the text." for n in range(count))


def test_passages_hold_all_text_once_and_fit():
    lengths = ("a", 20), ("b", 3), ("c", 20)
    parts = [DocumentPart(sentences(*each), f"p. {n}") for n, each in enumerate(lengths, start=1)]
    passages = cut(parts, 40)
    assert all(words(passage.text) <= 40 for passage in passages)
    assert " ".join(p.text for p in passages).split() == " ".join(part.text for part in parts).split()
    assert [passage.index for passage in passages] == list(range(len(passages)))


def test_repeated_text_is_located_in_order():
    parts = [DocumentPart("Same words here again.", f"p. {n}") for n in range(4)]
    passages = cut(parts, 5)
    assert [passage.location for passage in passages] == ["p. 0", "p. 1", "p. 2", "p. 3"]


def test_passages_without_location_are_numbered():
    passages = cut([DocumentPart(sentences("a", 10), "")], 40)
    assert [passage.location for passage in passages] == ["part 1 of 2", "part 2 of 2"]


def test_one_endless_word_is_cut():
    passages = cut([DocumentPart("x" * 500, "")], 100, count=len)
    assert "".join(passage.text for passage in passages) == "x" * 500


def test_node_ids_survive_an_edit_elsewhere():
    before = cut([DocumentPart(sentences("a", 20), "")], 40)
    after = cut([DocumentPart(sentences("a", 20).replace("a19", "zz"), "")], 40)
    assert [p.node_id for p in before[:-1]] == [p.node_id for p in after[:-1]]
    assert before[-1].node_id != after[-1].node_id


@pytest.mark.parametrize("border", ["\n\n", "\n", " ", ""])
def test_long_text_is_split_in_blocks(monkeypatch, border):
    """What is tokenized and split at once does not grow with the text, which has no sentence that ends."""
    monkeypatch.setattr(chunking, "BLOCK_CHARACTERS", 200)
    monkeypatch.setattr(chunking, "MAX_TOKEN_CHARACTERS", 2)
    texts = {page: border.join(f"word{n:03}" for n in range(page, page + 60)) for page in (0, 60)}
    parts = [DocumentPart(text, f"p. {page}") for page, text in texts.items()]
    seen = []

    def count(piece):
        seen.append(len(piece))
        return len(piece) // 4 + 1

    passages = cut(parts, 20, count=count)
    assert max(seen) <= 40
    whole, found = ("".join("".join(each.text for each in one).split()) for one in (parts, passages))
    assert found == whole
    assert {"p. 0", "p. 60"} <= {passage.location for passage in passages}
    assert all(count(passage.text) <= 20 for passage in passages)


def test_the_passages_of_one_document_are_bounded(monkeypatch):
    monkeypatch.setattr(chunking, "MAX_PASSAGES", 3)
    with pytest.raises(OversizedDocumentError, match="more than 3 passages"):
        cut([DocumentPart(sentences("a", 40), "")], 40)


def test_sentence_splitting_has_no_deadline(monkeypatch):
    """NLTK's regular expressions give up after five seconds of the clock, with an OSError that ended the whole run."""
    redos = pytest.importorskip("nltk.redos")
    monkeypatch.setattr(redos, "DEFAULT_TIMEOUT", 1e-6)
    assert len(cut([DocumentPart(sentences("a", 2000), "")], 40)) > 300
    assert redos.DEFAULT_TIMEOUT == 1e-6, "for others it is as it was"
