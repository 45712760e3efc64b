"""Finding by hashes against a slow search that is obviously right, on texts made to be hard."""

import random
from itertools import pairwise

import numpy as np
import pytest

from ragblend.integrations import hashing
from ragblend.integrations.finding import MINIMUM, TextIndex, fingerprints, mark_lengths
from ragblend.integrations.hashing import Hashed, KeySet


def slow_find(known, text):
    """Every place of every text; the longest first, of equally long ones the earliest; what is still free."""
    places = []
    for each in set(known):
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
    index.add(fingerprints(texts))
    return index


def find(index, known, text):
    known = set(known)
    found = index.find(text, lambda _, start, stop: text[start:stop] if text[start:stop] in known else None)
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
    known = []
    for _ in range(chance.randint(0, 60)):
        start = chance.randrange(len(text) or 1)
        piece = text[start : start + chance.randint(MINIMUM, chance.choice([20, 40, 200]))]
        known.append(piece + chance.choice(["", "", chance.choice(letters)]))
    return [each for each in known if len(each) >= MINIMUM], text


@pytest.mark.parametrize("block", range(8))
def test_as_the_slow_search(block):
    hits = 0
    for seed in range(block * 150, block * 150 + 150):
        known, text = random_case(seed)
        index = TextIndex()
        for each in known:  # one by one: what is entered later lies within what was entered before
            index.add(fingerprints([each]))
        expected = slow_find(known, text)
        assert find(index, known, text) == expected, seed
        hits += len(expected)
    assert hits > 200


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_entering_does_not_matter(seed):
    known, text = random_case(seed)
    expected = find(index_of(known), known, text)
    random.Random(seed).shuffle(known)
    assert find(index_of(known), known, text) == expected


def test_nested_overlapping_repeated_partial():
    whole = "The harbour was dredged in 1921 by the Ems company."
    inner, tail = whole[4:31], whole[20:] + " It left the crane."
    known = [whole, inner, tail]
    index = index_of(known)
    assert find(index, known, whole) == [(0, 51)]  # not the one inside
    assert find(index, known, whole[:40]) == [(4, 31)]  # a part is no hit, but the one inside it is
    assert find(index, known, whole[:-1] + " It left the crane.") == [(4, 31)]
    assert find(index, known, whole + " It left the crane.") == [(0, 51)]  # the longer one
    assert find(index, known, f"{inner}{whole}, {whole}") == [(0, 27), (27, 78), (80, 131)]
    assert find(index, known, "") == find(index, known, whole[:15]) == []


def test_of_equally_long_ones_the_earlier():
    text = "abcdefghijklmnopqrstuvwxyz"
    known = [text[2:22], text[5:25]]
    assert find(index_of(known), known, text) == [(2, 22)]
    known = [text[5:25], text[0:19]]
    assert find(index_of(known), known, text) == [(5, 25)]


def test_a_shorter_one_takes_the_room_that_a_longer_one_leaves():
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    known = [
        text[20:52],
        text[0:24],
        text[0:18],
    ]  # the second reaches into the first: the third stands there too
    assert find(index_of(known), known, text) == [(0, 18), (20, 52)]


def test_what_is_refused_gives_way_to_what_lies_within():
    text = "abcdefghijklmnopqrstuvwxyz"
    index = index_of([text, text[3:22]])
    assert index.find(text, lambda _, start, stop: True if (start, stop) != (0, 26) else None) == [
        (3, 22, True)
    ]
    index.discard(int(fingerprints([text])[0][-1]))
    assert index.find(text, lambda *_: True) == [(3, 22, True)]
    index.add(fingerprints([text]))
    assert index.find(text, lambda *_: True) == [(0, 26, True)]


@pytest.mark.parametrize("prime", [3, 97])
def test_collisions_find_nothing_wrong(monkeypatch, prime):
    hashing._powers.cache_clear()
    monkeypatch.setattr(hashing, "_PRIME", prime)
    try:
        collided = 0
        for seed in range(60):
            known, text = random_case(seed)
            refused = []
            found = index_of(known).find(
                text,
                lambda _, start, stop, known=known, text=text, refused=refused: (
                    True if text[start:stop] in known else refused.append(start)
                ),
            )
            assert all(text[start:stop] in known for start, stop, _ in found)
            assert all(a[1] <= b[0] for a, b in pairwise(found))
            collided += len(refused)
        assert collided  # the hashes were as bad as meant
    finally:
        hashing._powers.cache_clear()


def test_what_is_refused_is_asked_for_once_a_prompt():
    asked = []
    assert index_of(["a" * 20, "a" * 30]).find("a" * 4000, lambda whole, *_: asked.append(whole)) == []
    assert len(asked) == len(set(asked)) == 2


def chain(count):
    return ["a" * n + "b" for n in range(MINIMUM, MINIMUM + count)]


@pytest.mark.parametrize(
    ("known", "unit"),
    [
        (["a" * n for n in range(MINIMUM, 1500)], "a"),
        (chain(1500), "a"),
        (chain(1500), "a" * 99 + "b"),
        (["x" * 500 + str(n) for n in range(1500)], "x" * 500 + "-"),
        ([str(n) + "x" * 500 for n in range(1500)], "x" * 500 + "-"),
        (["ab" * n + "c" for n in range(MINIMUM, 600)], "ab" * 97 + "c"),
    ],
    ids=["one letter", "never there", "now and then", "one header", "one footer", "two letters"],
)
def test_the_work_is_linear_whatever_the_text(monkeypatch, known, unit):
    hashed = []
    keys = Hashed.keys

    def counted(self, starts, lengths):
        found = keys(self, starts, lengths)
        hashed.append(found.size)
        return found

    monkeypatch.setattr(Hashed, "keys", counted)
    index = index_of(known)
    work = []
    for size in (8_000, 32_000):
        text = (unit * size)[:size]
        hashed.clear()
        found = find(index, known, text)
        work.append(sum(hashed))
        assert bool(found) == any(each in text for each in known)
        assert work[-1] < 40 * size + 20_000
    assert work[1] < 5 * work[0]


@pytest.mark.parametrize("mark_by_mark", [False, True])
def test_long_chains_of_marks(monkeypatch, mark_by_mark):
    """Hundreds of marks lie within each other, of texts that are not there, above one that is."""
    monkeypatch.setattr("ragblend.integrations.finding._ROUNDS", 10**9 if mark_by_mark else 0)
    known = [*chain(300), "a" * 20]
    for text in ("a" * 200, "c".join("a" * n for n in range(30, 90)) + "b"):
        assert find(index_of(known), known, text) == slow_find(known, text)


def test_marks():
    assert mark_lengths(1500) == (16, 1024, 1280, 1408, 1472, 1488, 1496, 1500)
    assert mark_lengths(16) == (16, 16)
    assert mark_lengths(17) == (16, 16, 17)


def test_fingerprints_do_not_depend_on_the_company():
    texts = ["".join(random.Random(n).choices("ab\ud83d\ude00\U0001f600", k=16 + n * 7)) for n in range(200)]
    together = fingerprints(texts)
    assert len(together) == 200
    assert all(np.array_equal(a, fingerprints([text])[0]) for a, text in zip(together, texts, strict=True))
    assert fingerprints([]) == []


def test_equal_substrings_have_equal_keys_and_others_do_not():
    text = "".join(random.Random(0).choices("ab\0", k=400))
    hashed, seen = Hashed(text), {}
    for length in (1, 2, 3, 7, 30):
        starts = np.arange(400 - length + 1)
        keys = hashed.keys(starts, np.array(length)).tolist()
        for start, key in zip(starts, keys, strict=True):
            assert seen.setdefault(key, text[start : start + length]) == text[start : start + length]
    assert len(seen) == len(set(seen.values()))


def test_the_thue_morse_word_does_not_collide():
    word = "".join("ab"[n.bit_count() % 2] for n in range(4096))
    complement = word.translate(str.maketrans("ab", "ba"))
    assert fingerprints([word])[0][-1] != fingerprints([complement])[0][-1]


def test_a_key_set_is_a_set():
    chance, ours, theirs = np.random.default_rng(0), KeySet(), set()
    for _ in range(30):
        keys = chance.integers(0, 20_000, 600, dtype=np.uint64)
        ours.add(keys)
        theirs.update(keys.tolist())
        gone = int(keys[0])
        ours.discard(gone)
        theirs.discard(gone)
    asked = np.arange(20_000, dtype=np.uint64)
    assert set(asked[ours.holds(asked)].tolist()) == set(ours.all().tolist()) == theirs
    assert len(ours) == len(theirs)
    assert not KeySet().holds(asked).any()


def test_the_index_grows_out_of_its_first_table():
    known = [f"{n:016d} and more" for n in range(5000)]
    index = index_of(known)
    assert find(index, known, " ".join(known[::500])) == [(n * 26, n * 26 + 25) for n in range(10)]
