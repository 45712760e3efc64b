"""What is decided without vLLM: whether fusing pays, whose cached blocks a prompt may find, and slots.

A block that was fused must never reach another prompt: which rows were computed depends on the question. Its hash is
salted, therefore, with all that its KV depends on: how it was fused, and the whole prompt with its passages. So the
same question finds its blocks again, and a conversation that goes on finds those of its beginning, because prompts
that were fused lately are remembered and lend their salt to what begins with them. What is fused itself has its own
salt all the same: under a lent one another prompt with that beginning would find it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ragblend.engine.prompts.segments import Chunk, Literal, Prompt, Segment
from ragblend.integrations.vllm.finder import Match
from ragblend.integrations.vllm.settings import Wish
from ragblend.kvstore.keys import pack_tokens

# Fusing computes some rows of all layers in smaller pieces, and reads and writes the others: it must save this share.
GAIN = 0.3
MOST_ENCODED = 8  # passages of a prompt that says `encode`: everybody else waits for that step
REMEMBERED = 512  # prompts whose beginning a later one may go on from


@dataclass(frozen=True)
class Plan:
    """One prompt's passages and what they are worth. stored: of each passage whether there is KV of it.

    goes_on: it is hashed as the prompt that it goes on from, of which vLLM has so much that the rest is vLLM's own.
    """

    wish: Wish
    matches: tuple[Match, ...]
    stored: tuple[bool, ...]
    tokens: int
    goes_on: bool = False

    @property
    def stored_tokens(self) -> int:
        pairs = zip(self.matches, self.stored, strict=True)
        return sum(match.stop - match.start for match, there in pairs if there)

    @property
    def computed_tokens(self) -> float:
        """Rows that fusing computes, averaged over layers."""
        return self.tokens - self.stored_tokens * (1 - self._ratio)

    @property
    def _ratio(self) -> float:
        fixed = self.wish.policy.fixed_ratio
        return self.wish.ratio if fixed is None else fixed

    @property
    def encoded(self) -> list[Match]:
        """The passages that are encoded before it is read."""
        pairs = zip(self.matches, self.stored, strict=True)
        return [match for match, there in pairs if not there][:MOST_ENCODED] if self.wish.encode else []

    @property
    def step_rows(self) -> float:
        """Rows of all layers that the step computes in which it is fused: of passages that are encoded, and its own."""
        return self.computed_tokens + self._ratio * sum(len(match.whole) for match in self.encoded)

    def saves(self, computed_tokens: int) -> bool:
        """Whether fusing, from the first token on, is less work where vLLM has the first so many tokens' KV."""
        return self.step_rows <= (1 - GAIN) * (self.tokens - computed_tokens)

    def pays(self, computed_tokens: int, minimum_tokens: int) -> bool:
        """Whether to fuse there: it saves, or somebody asked for it."""
        is_much = self.stored_tokens >= minimum_tokens or bool(self.wish.encode)
        wanted = is_much and (self.wish.asked or self.saves(computed_tokens))
        return self.tokens - computed_tokens > 1 and (bool(self.encoded) or wanted)

    def without(self, lost: Iterable[int]) -> "Plan":
        """The same where these passages have no KV."""
        gone = set(lost)
        return replace(self, stored=tuple(there and i not in gone for i, there in enumerate(self.stored)))


def prompt_of(token_ids: Sequence[int], matches: Sequence[Match], collection: str) -> Prompt:
    """The engine's prompt: passages as chunks, and what is between them as it is."""
    segments, at = list[Segment](), 0
    for match in matches:
        segments.append(Literal("", tuple(token_ids[at : match.start])))
        ids = tuple(token_ids[match.start : match.stop])
        whole = None if ids == match.whole else match.whole  # of parts there are no paths
        part = Chunk(None, match.node_id, ids, collection, match.node_id is not None, whole, match.skipped)
        segments.append(part)
        at = match.stop
    return Prompt([*segments, Literal("", tuple(token_ids[at:]))])


def marked(token_ids: Sequence[int], matches: Sequence[Match]) -> list[int]:
    """Each token id with what its KV depends on besides: where passages begin, and which of these are parts of others.

    Of a prompt's beginning they are the beginning.
    """
    marks = [0] * len(token_ids)
    for match in matches:
        marks[match.start : match.stop] = [1] * (match.stop - match.start)
        marks[match.start] = 2 if len(match.whole) == match.stop - match.start else 3
    return [4 * token_id + mark for token_id, mark in zip(token_ids, marks, strict=True)]


class Salts:
    """The salts of prompts that were fused lately, for those that begin with one of them."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._known: OrderedDict[tuple[int, bytes], str] = OrderedDict()

    def of(
        self, token_ids: Sequence[int], said: str, goes_on: Callable[[str], bool] = lambda lent: True
    ) -> tuple[str, bool]:
        """The salt of a prompt, its tokens `marked`, that is fused as `said`, and whether it is another's; remembered.

        That of the longest known beginning if `goes_on` says so of it, else its own.
        """
        packed = pack_tokens(token_ids)
        digest = hashlib.sha256(said.encode("utf-8", "surrogatepass") + b"\0")
        at, found = 0, None
        for length in sorted({length for length, _ in self._known if length <= len(token_ids)}):
            digest.update(packed[4 * at : 4 * length])
            at = length
            if salt := self._known.get((length, digest.digest())):
                found = (length, digest.digest()), salt
        digest.update(packed[4 * at :])
        own, salt = (len(token_ids), digest.digest()), f"ragblend-{digest.hexdigest()}"
        is_lent = found is not None and found[1] != salt and goes_on(found[1])
        if found is not None:
            self._known.move_to_end(found[0])
            salt = found[1] if is_lent else salt
        self._known[own] = salt
        self._known.move_to_end(own)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return salt, is_lent


def slots_of(blocks: Sequence[int], size: int, start: int, stop: int) -> tuple[list[int], list[int]]:
    """Positions of start..stop that have a block, and the slot of each; block 0 is none (outside a sliding window)."""
    positions = np.arange(start, stop)
    of_blocks = np.asarray(blocks, dtype=np.int64)[positions // size]
    kept = of_blocks != 0
    slots = of_blocks[kept] * size + positions[kept] % size
    return positions[kept].tolist(), slots.tolist()
