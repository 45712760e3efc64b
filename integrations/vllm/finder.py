"""Finds known passages in a prompt's token ids, with any template and tokenizer call.

A passage was tokenized alone, but has other text around it in the prompt, so tokens at its edges may differ (in many
vocabularies `.` and a following blank line are one token). So it searches the inner tokens, and then extends the match
at both ends. The search is `TextIndex`, with a character for each token id.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ragblend.integrations.text_index import MIN_TEXT_CHARS, TextIndex, hash_texts
from ragblend.kvstore.nodes import NodeIndex, Scope

EDGE = 8  # tokens at each end that may differ
ALIKE = 16  # limit of checked nodes with one text, of which there may be thousands
_LARGEST = 0x110000  # number of Unicode characters; vocabularies are smaller
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """Tokens start..stop of a prompt are those of a passage from its token `skipped` on; whole: all of its tokens.

    node_id: the passage's; None where the client named the tokens only.
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
        self._clear()

    def _clear(self) -> None:
        self._index, self._names = TextIndex(), dict[int, list[str]]()
        self._version: tuple[int, int, int] | None = None
        self._last_entry: int | None = None
        self._room = 0  # entries until the index is rebuilt without deleted and changed passages

    def find(self, token_ids: Sequence[int]) -> list[Match]:
        """The known passages in a prompt: disjoint, ascending, chosen longest first."""
        self._refresh()
        text, found = _text(token_ids), list[Match]()

        def confirm(hashed: int, start: int, stop: int) -> Match | None:
            matches = (_match(token_ids, ids, start, stop, name) for name, ids in self._alike(hashed))
            return max(filter(None, matches), key=lambda match: match.stop - match.start, default=None)

        for _, _, match in self._index.find(text, confirm):
            # The edges of two passages may both match the tokens between them.
            overlap = max(0, (found[-1].stop if found else 0) - match.start)
            found.append(replace(match, start=match.start + overlap, skipped=match.skipped + overlap))
        return found

    def name_of(self, ids: Ids) -> str | None:
        """The node with exactly these tokens; None if there is none."""
        self._refresh()
        core = _core(ids)
        if len(core) < MIN_TEXT_CHARS or not (text := _text(core)):
            return None
        (each,) = hash_texts([text])
        return next((name for name, found in self._alike(each.whole) if found == ids), None)

    def _alike(self, hashed: int) -> Iterator[tuple[str, Ids]]:
        """Nodes whose inner tokens have that hash, and their tokens."""
        names = self._names.get(hashed, ())
        existing = ((name, ids) for name in names if (ids := self._nodes.get(self._scope, name)))
        return islice(existing, ALIKE)

    def _refresh(self) -> None:
        """Index passages that any process has entered since. Deleted ones are detected when they are found."""
        version = self._nodes.data_version()
        if version == self._version:
            return
        if self._room < 0 or (self._version and version[0] != self._version[0]):
            self._clear()
        self._version, is_first = version, self._last_entry is None
        self._last_entry, new = self._nodes.changed_since(self._scope, self._last_entry)
        self._room += 1000 + len(new) if is_first else -len(new)
        entered = [(name, _core(ids)) for name in new if (ids := self._nodes.get(self._scope, name))]
        entered = [(name, core) for name, core in entered if len(core) >= MIN_TEXT_CHARS]
        hashes = hash_texts(_text(core) for _, core in entered)
        self._index.add(hashes)
        for (name, _), each in zip(entered, hashes, strict=True):
            self._names.setdefault(each.whole, []).append(name)


def _edge(length: int) -> int:
    return max(0, min(EDGE, (length - MIN_TEXT_CHARS) // 2))


def _core(ids: Ids) -> Ids:
    edge = _edge(len(ids))
    return ids[edge : len(ids) - edge]


def _match(prompt: Sequence[int], whole: Ids, start: int, stop: int, node_id: str) -> Match | None:
    """The passage around its inner tokens at start..stop; None if they are not there."""
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
