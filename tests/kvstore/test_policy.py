"""Eviction order and amount, as pure functions."""

import random

from ragblend.kvstore.policy import Entry, choose_victims, least_recently_used


def test_longest_unused_goes_first_and_ties_are_settled():
    entries = [Entry("c", 1, 2.0), Entry("b", 1, 1.0), Entry("a", 1, 2.0)]
    assert [entry.digest for entry in least_recently_used(entries)] == ["b", "a", "c"]


def test_only_what_is_needed_is_chosen():
    seeded = random.Random(5)
    for _ in range(200):
        order = [Entry(str(i), seeded.randint(1, 9), float(i)) for i in range(seeded.randint(0, 8))]
        excess = seeded.randint(-3, 40)
        victims = choose_victims(order, excess)
        assert victims == order[: len(victims)]
        freed = sum(entry.nbytes for entry in victims)
        assert freed >= excess or victims == order
        assert not victims or freed - victims[-1].nbytes < excess
