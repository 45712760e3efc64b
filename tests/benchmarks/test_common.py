"""What the benchmarks share: work in turns."""

from benchmarks.common import in_turns


def test_ways_alternate_and_rounds_that_warm_up_do_not_count():
    done: list[str] = []
    ways = {name: lambda name=name: done.append(name) or len(done) for name in "ab"}
    assert in_turns(ways, rounds=2, warm=1) == {"a": [3, 5], "b": [4, 6]}
    assert done == list("ababab")
