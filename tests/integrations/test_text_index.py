"""The search by hashes against a slow search that is obviously right, on adversarial texts."""

import random
from itertools import pairwise

import pytest

from ragblend.integrations import text_index
from ragblend.integrations.text_index import MIN_TEXT_CHARS, HashedText, TextIndex, hash_texts


def slow_find(texts, text):
    """Every occurrence of every text that is still free; the longest first, of equally long ones the earliest."""
    places = []
    for each in set(texts):
        at = text.find(each)
        while at >= 0:
            places.append((-len(each), at))
            at = text.find(each, at + 1)
    free, taken = [True] * len(text), []
    for length, start in sorted(places):
        if all(free[start : start - length]):
            free[start : start - length] = [False] * -length
            taken.append((start, start - length))
    return sorted(taken)


def index_of(texts):
    index = TextIndex()
    index.add(hash_texts(texts))
    return index


def find(index, texts, text):
    texts = set(texts)
    found = index.find(text, lambda _, start, stop: text[start:stop] if text[start:stop] in texts else None)
    assert all(text[start:stop] == said for start, stop, said in found)
    return [(start, stop) for start, stop, _ in found]


def random_case(seed):
    """A text over two or three letters, often periodic, and pieces of it, some with a wrong last letter."""
    chance = random.Random(seed)
    letters = "ab"[: chance.choice([1, 2, 2])] + chance.choice(
        ["", "c", "\U0001f600", "\ud800", "\0", "e\u0301"]
    )
    text = "".join(chance.choices(letters, k=chance.randint(0, 300)))
    if chance.random() < 0.5:
        text = (text[: chance.randint(1, 20)] * 300)[:300]
    texts = []
    for _ in range(chance.randint(0, 60)):
        start = chance.randrange(len(text) or 1)
        piece = text[start : start + chance.randint(MIN_TEXT_CHARS, chance.choice([20, 40, 200]))]
        texts.append(piece + chance.choice(["", "", chance.choice(letters)]))
    return [each for each in texts if len(each) >= MIN_TEXT_CHARS], text


@pytest.mark.parametrize("block", range(4))
def test_it_finds_what_the_slow_search_finds(block, monkeypatch):
    monkeypatch.setattr(
        text_index, "_BATCH", 1 << 5 * (block % 4)
    )  # candidates checked together: all, or few
    hits = 0
    for seed in range(block * 150, block * 150 + 150):
        texts, text = random_case(seed)
        index = TextIndex()
        for each in texts:  # one by one: later texts are parts of earlier ones
            index.add(hash_texts([each]))
        expected = slow_find(texts, text)
        assert find(index, texts, text) == expected, seed
        random.Random(seed).shuffle(texts)
        assert find(index_of(texts), texts, text) == expected, seed
        hits += len(expected)
    assert hits > 200


def test_a_refused_text_leaves_room_for_those_within_it():
    text = "abcdefghijklmnopqrstuvwxyz"
    index = index_of([text, text[3:22]])
    assert index.find(text, lambda _, start, stop: True if (start, stop) != (0, 26) else None) == [
        (3, 22, True)
    ]
    asked = []  # once a prompt
    assert index_of(["a" * 20, "a" * 30]).find("a" * 4000, lambda whole, *_: asked.append(whole)) == []
    assert len(asked) == len(set(asked)) == 2


@pytest.mark.parametrize("prime", [3, 97])
def test_hash_collisions_give_no_wrong_text(monkeypatch, prime):
    text_index._power_table.cache_clear()
    monkeypatch.setattr(text_index, "_PRIME", prime)
    try:
        collided = 0
        for seed in range(60):
            texts, text = random_case(seed)
            refused = []
            found = index_of(texts).find(
                text,
                lambda _, start, stop, texts=texts, text=text, refused=refused: (
                    True if text[start:stop] in texts else refused.append(start)
                ),
            )
            assert all(text[start:stop] in texts for start, stop, _ in found)
            assert all(a[1] <= b[0] for a, b in pairwise(found))
            collided += len(refused)
        assert collided  # else nothing was tested
    finally:
        text_index._power_table.cache_clear()


@pytest.mark.parametrize(
    ("texts", "unit"),
    [
        (["a" * n for n in range(MIN_TEXT_CHARS, 5000)], "a"),
        (["a" * n + "b" for n in range(MIN_TEXT_CHARS, 5000)], "a"),
        ([str(n) + "x" * 500 for n in range(1500)], "x" * 500 + "-"),
    ],
    ids=["one letter", "never there", "one footer"],
)
def test_the_work_is_bounded_for_any_text(monkeypatch, texts, unit):
    hashed = []
    keys = HashedText.keys

    def counted(self, starts, lengths):
        found = keys(self, starts, lengths)
        hashed.append(found.size)
        return found

    monkeypatch.setattr(HashedText, "keys", counted)
    monkeypatch.setattr(text_index, "_MAX_CANDIDATES", 1 << 19)
    index = index_of(texts)
    hashed.clear()
    text = (unit * 32_000)[:32_000]
    found = find(index, texts, text)
    assert sum(hashed) < (1 << 20) + len(text)
    assert bool(found) == any(each in text for each in texts)
