"""One bit of library.sqlite flips: nothing that is read afterwards is silently another thing."""

from collections import Counter

from fault_library import make_library, read_all, verdict_on

from ragblend.app.library import Library


def test_no_flipped_bit_changes_what_is_read(tmp_path, count):
    """Of 400 flips 214 silently changed a text, an embedding, a path or a state."""
    sound = tmp_path / "library.sqlite"
    make_library(sound)
    truth = read_all(sound)
    library = Library(sound)
    nodes = [
        part.node_id
        for name in library.collections()
        for document in library.documents(name)
        for part in library.passages_of(document.id)
    ]
    for node, passage in library.passages(nodes).items():
        truth |= {f"passage {node}": repr(passage), f"owner {node}": passage.document_id}
    library.close()
    assert len(nodes) == 72
    seeds = range(count(400, 80))
    verdicts = Counter(verdict_on(sound, tmp_path / "flipped.sqlite", truth, nodes, seed) for seed in seeds)
    silent = {verdict: n for verdict, n in verdicts.items() if verdict not in ("harmless", "named")}
    print(dict(verdicts))
    assert silent == {}
    assert verdicts["named"] > len(seeds) / 4 and verdicts["harmless"], (
        "the flips hit something, and not always"
    )
