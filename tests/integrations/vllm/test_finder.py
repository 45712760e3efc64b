"""Passages are found in token ids, also with other tokens at their edges."""

import random

import pytest

from ragblend.integrations.vllm.finder import EDGE_TOKENS, PassageFinder
from ragblend.kvstore.nodes import NodeIndex, Scope

SCOPE = Scope("default", "t" * 64)


@pytest.fixture
def nodes(tmp_path):
    with NodeIndex.open(tmp_path / "nodes.sqlite") as made:
        yield made


def ids_of(seed: int, length: int = 60) -> tuple[int, ...]:
    chosen = random.Random(seed)
    return tuple(chosen.randrange(1000, 200_000) for _ in range(length))


def enter(nodes, *passages, scope=SCOPE):
    nodes.put_many(scope, [(f"n{n}", ids, None) for n, ids in enumerate(passages)])


def test_whole_passages_are_found_anywhere(nodes):
    first, second = ids_of(1), ids_of(2, 300)
    enter(nodes, first, second)
    prompt = [7, 8, *second, 9, *first, 5, *first[:30], 6]
    found = PassageFinder(nodes, SCOPE).find(prompt)
    assert [(m.start, m.stop, m.whole, m.skipped) for m in found] == [
        (2, 302, second, 0),
        (303, 363, first, 0),
    ]


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (3, 2), (EDGE_TOKENS, EDGE_TOKENS)])
def test_tokens_at_the_edges_may_differ(nodes, before, after):
    passage = ids_of(3)
    enter(nodes, passage)
    inner = passage[before : len(passage) - after]
    [match] = PassageFinder(nodes, SCOPE).find([1, 2, 3, *inner, 4])
    assert (match.start, match.stop, match.skipped, match.whole) == (3, 3 + len(inner), before, passage)


def test_a_node_is_found_by_exactly_its_tokens(nodes):
    passage, short = ids_of(4), ids_of(5, 8)
    enter(nodes, passage, short)
    finder = PassageFinder(nodes, SCOPE)
    assert finder.node_id_of(passage) == "n0"
    for other in (passage[1:], (*passage, 7), short, (), (0x110000,) * 60):
        assert finder.node_id_of(other) is None
    enter(nodes, ids_of(6))  # under the same name
    assert finder.node_id_of(passage) is None and finder.node_id_of(ids_of(6)) == "n0"


@pytest.mark.parametrize(
    ("prompt", "scope"),
    [
        ([1, *ids_of(4)[EDGE_TOKENS + 1 :], 2], SCOPE),
        ([*ids_of(4)[:30], 7, *ids_of(4)[31:]], SCOPE),
        ([0x110000, *ids_of(4)], SCOPE),
        (ids_of(4), Scope("others", SCOPE.tokenizer)),
    ],
    ids=["cut edge", "changed inside", "id beyond all characters", "another collection"],
)
def test_other_texts_and_collections_are_not_found(nodes, prompt, scope):
    enter(nodes, ids_of(4), scope=scope)
    assert not PassageFinder(nodes, SCOPE).find(prompt)


def test_neighbouring_passages_with_equal_edges_do_not_overlap(nodes):
    one, two = ids_of(5), ids_of(6)
    two = (*one[-2:], *two[2:])
    enter(nodes, one, two)
    found = PassageFinder(nodes, SCOPE).find([*one, *two[2:]])
    assert [(m.start, m.stop, m.skipped) for m in found] == [(0, 60, 0), (60, 118, 2)]


def test_entered_changed_and_deleted_nodes_are_noticed(nodes):
    old, new = ids_of(7), ids_of(8)
    finder = PassageFinder(nodes, SCOPE)
    assert not finder.find(old)
    enter(nodes, old)
    assert len(finder.find(old)) == 1
    enter(nodes, new)  # under the same node id
    assert not finder.find(old) and len(finder.find(new)) == 1
    nodes.delete("default", ["n0"])
    assert not finder.find(new)


class Watched(NodeIndex):
    """Counts the nodes that are read."""

    reads = 0

    def get(self, scope, node_id):
        self.reads += 1
        return super().get(scope, node_id)


def test_after_a_commit_only_new_nodes_are_read(tmp_path):
    """Every commit of an ingest that ran beside the requests had the whole collection read."""
    strange, path = ids_of(999), tmp_path / "nodes.sqlite"
    with Watched.open(path) as nodes, NodeIndex.open(path) as other:
        finder = PassageFinder(nodes, SCOPE)

        def reads() -> int:
            before = nodes.reads
            assert not finder.find(strange)
            return nodes.reads - before

        enter(other, *map(ids_of, range(300)))
        assert reads() == 300
        enter(other, ids_of(300), scope=Scope("other", SCOPE.tokenizer))
        assert reads() == 0
        other.put_many(
            SCOPE, [("n300", ids_of(301), None), ("n0", ids_of(0), None), ("n1", ids_of(302), None)]
        )
        assert reads() <= 3, "two, or three where the commit came between"
        for turn in range(1, 6):  # the index holds five times the nodes
            enter(other, *(ids_of(1000 * turn + n) for n in range(300)))
            assert reads() == 300
        enter(other, ids_of(7000))
        assert reads() == 301, "and is rebuilt"


def test_ids_that_are_no_characters_are_found_too(nodes):
    """55,296 to 57,343 are halves of surrogate pairs, and occur in large vocabularies."""
    passage = tuple(range(55_290, 55_340)) + tuple(range(57_330, 57_350))
    enter(nodes, passage)
    assert len(PassageFinder(nodes, SCOPE).find([56_000, *passage, 57_000])) == 1
