"""Finds known passages in a prompt's token ids, with any template and tokenizer call.

A passage was tokenized alone, but has other text around it in the prompt, so tokens at its edges may differ (in many
vocabularies `.` and a following blank line are one token). So its inner tokens are searched for, and the match is then
extended at both ends. `TextIndex` searches, with one character for each token id.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ragblend.integrations.text_index import MIN_TEXT_CHARS, TextIndex, hash_texts
from ragblend.kvstore.nodes import NodeIndex, Scope

EDGE_TOKENS = 8  # at each end, which may differ
MAX_SAME_TEXT = 16  # nodes with one text that are checked; there may be thousands
_CODE_POINTS = 0x110000  # of Unicode; vocabularies are smaller
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """Tokens start..stop of a prompt that equal those of a passage from its token `skipped` on.

    whole: all tokens of the passage; node_id: the passage's, None if the client gave only the span of its tokens.
    """

    start: int
    stop: int
    whole: Ids
    skipped: int
    node_id: str | None = None


class PassageFinder:
    """Finds the passages of one collection and tokenizer. Not thread-safe."""

    def __init__(self, nodes: NodeIndex, scope: Scope) -> None:
        self._nodes, self._scope = nodes, scope
        self._clear()

    def _clear(self) -> None:
        self._index, self._node_ids = TextIndex(), dict[int, list[str]]()
        self._version: tuple[int, int, int] | None = None
        self._last_change: int | None = None  # the last number from `NodeIndex.changed_since`
        self._changes_left = 0  # until the index is built again, without deleted and changed passages

    def find(self, token_ids: Sequence[int]) -> list[Match]:
        """The known passages in a prompt: disjoint, ascending, chosen longest first."""
        self._refresh()
        text, found = _text(token_ids), list[Match]()

        def confirm(hashed: int, start: int, stop: int) -> Match | None:
            matches = (
                _match(token_ids, ids, start, stop, node_id) for node_id, ids in self._nodes_with_hash(hashed)
            )
            return max(filter(None, matches), key=lambda match: match.stop - match.start, default=None)

        for _, _, match in self._index.find(text, confirm):
            # The edges of two adjacent passages may both match the tokens between their inner tokens.
            overlap = max(0, (found[-1].stop if found else 0) - match.start)
            found.append(replace(match, start=match.start + overlap, skipped=match.skipped + overlap))
        return found

    def node_id_of(self, ids: Ids) -> str | None:
        """The id of a node with exactly these tokens; None if there is none."""
        self._refresh()
        core = _core(ids)
        if len(core) < MIN_TEXT_CHARS or not (text := _text(core)):
            return None
        (each,) = hash_texts([text])
        return next((node_id for node_id, found in self._nodes_with_hash(each.whole) if found == ids), None)

    def _nodes_with_hash(self, hashed: int) -> Iterator[tuple[str, Ids]]:
        """Ids and tokens of the nodes whose inner tokens have that hash."""
        node_ids = self._node_ids.get(hashed, ())
        existing = ((node_id, ids) for node_id in node_ids if (ids := self._nodes.get(self._scope, node_id)))
        return islice(existing, MAX_SAME_TEXT)

    def _refresh(self) -> None:
        """Index the passages that any process has added since the last call. Deleted ones are ignored when found."""
        version = self._nodes.data_version()
        if version == self._version:
            return
        if self._changes_left < 0 or (self._version and version[0] != self._version[0]):
            self._clear()
        self._version, is_first = version, self._last_change is None
        self._last_change, new = self._nodes.changed_since(self._scope, self._last_change)
        self._changes_left += 1000 + len(new) if is_first else -len(new)
        entered = [(name, _core(ids)) for name in new if (ids := self._nodes.get(self._scope, name))]
        entered = [(name, core) for name, core in entered if len(core) >= MIN_TEXT_CHARS]
        hashes = hash_texts(_text(core) for _, core in entered)
        self._index.add(hashes)
        for (name, _), each in zip(entered, hashes, strict=True):
            self._node_ids.setdefault(each.whole, []).append(name)


def _edge(length: int) -> int:
    return max(0, min(EDGE_TOKENS, (length - MIN_TEXT_CHARS) // 2))


def _core(ids: Ids) -> Ids:
    """The inner tokens of a passage."""
    edge = _edge(len(ids))
    return ids[edge : len(ids) - edge]


def _match(prompt: Sequence[int], whole: Ids, start: int, stop: int, node_id: str) -> Match | None:
    """The match of a passage around its inner tokens at start..stop; None if these differ."""
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
    """A character for each token id; empty if an id is too large."""
    return "".join(map(chr, ids)) if max(ids, default=0) < _CODE_POINTS else ""
