"""Finding known passages in a prompt's token ids, whatever template and tokenizer call they came through.

A passage was tokenized alone and stands in the prompt between other text, so that a token at its edge may have become
another (`.` before a blank line is one token with it in many vocabularies). Hence its inner tokens are looked for, and
what agrees beside them is added. Token ids are looked for as texts of one character each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ragblend.integrations.finding import MINIMUM, TextIndex, known
from ragblend.kvstore.nodes import NodeIndex, Scope

EDGE = 8  # tokens on each side that may have become others
ALIKE = 16  # nodes of one passage that are looked at: a text may have thousands
_LARGEST = 0x110000  # of characters: no vocabulary is larger
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """Tokens start..stop of a prompt are a passage's from its token `skipped` on; whole: all of the passage's.

    node_id: whose it is; None where the client named the tokens alone.
    """

    start: int
    stop: int
    whole: Ids
    skipped: int
    node_id: str | None = None


class PassageFinder:
    """The passages of one collection and tokenizer. Not safe for threads."""

    def __init__(self, nodes: NodeIndex, scope: Scope) -> None:
        self._nodes, self._scope = nodes, scope
        self._forget()

    def _forget(self) -> None:
        self._index, self._names = TextIndex(), dict[int, list[str]]()
        self._seen: tuple[int, int, int] | None = None
        self._number: int | None = None
        self._room = 0  # for how many more, before what was deleted or changed is worth forgetting

    def find(self, token_ids: Sequence[int]) -> list[Match]:
        """The known passages in a prompt: disjoint, ascending, the longest first chosen."""
        self._refresh()
        text, found = _text(token_ids), list[Match]()

        def confirm(hashed: int, start: int, stop: int) -> Match | None:
            matches = (_match(token_ids, ids, start, stop, name) for name, ids in self._alike(hashed))
            return max(filter(None, matches), key=lambda match: match.stop - match.start, default=None)

        for _, _, match in self._index.find(text, confirm):
            before = (
                found[-1].stop if found else 0
            )  # edges of two passages may both agree with what is between them
            late = max(0, before - match.start)
            found.append(replace(match, start=match.start + late, skipped=match.skipped + late))
        return found

    def name_of(self, ids: Ids) -> str | None:
        """The node of just this passage; None if there is none."""
        self._refresh()
        core = _core(ids)
        if len(core) < MINIMUM or not (text := _text(core)):
            return None
        (each,) = known([text])
        return next((name for name, found in self._alike(each.whole) if found == ids), None)

    def _alike(self, hashed: int) -> Iterator[tuple[str, Ids]]:
        """Nodes whose inner tokens have that hash, and their tokens."""
        names = self._names.get(hashed, ())
        there = ((name, ids) for name in names if (ids := self._nodes.get(self._scope, name)))
        return islice(there, ALIKE)

    def _refresh(self) -> None:
        """Read what was entered since, by whomever. What was deleted is noticed when it is found."""
        seen = self._nodes.changes()
        if seen == self._seen:
            return
        if self._room < 0 or (self._seen and seen[0] != self._seen[0]):
            self._forget()
        self._seen, first = seen, self._number is None
        self._number, new = self._nodes.entered(self._scope, self._number)
        self._room += 1000 + len(new) if first else -len(new)
        entered = [(name, _core(ids)) for name in new if (ids := self._nodes.get(self._scope, name))]
        entered = [(name, core) for name, core in entered if len(core) >= MINIMUM]
        hashes = known(_text(core) for _, core in entered)
        self._index.add(hashes)
        for (name, _), each in zip(entered, hashes, strict=True):
            self._names.setdefault(each.whole, []).append(name)


def _edge(length: int) -> int:
    return max(0, min(EDGE, (length - MINIMUM) // 2))


def _core(ids: Ids) -> Ids:
    edge = _edge(len(ids))
    return ids[edge : len(ids) - edge]


def _match(prompt: Sequence[int], whole: Ids, start: int, stop: int, node_id: str) -> Match | None:
    """Where the passage stands whose inner tokens may be at start..stop; None if they are not."""
    edge = _edge(len(whole))
    if tuple(prompt[start:stop]) != _core(whole):
        return None
    first, last, skipped, end = start, stop, edge, len(whole) - edge
    while skipped and first and prompt[first - 1] == whole[skipped - 1]:
        first, skipped = first - 1, skipped - 1
    while end < len(whole) and last < len(prompt) and prompt[last] == whole[end]:
        last, end = last + 1, end + 1
    return Match(first, last, whole, skipped, node_id)


def _text(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids)) if max(ids, default=0) < _LARGEST else ""
