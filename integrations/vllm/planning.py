"""Decisions that need no vLLM: whether fusing pays, which cached blocks a prompt may reuse, and slots.

A fused block must never be reused by another prompt: which rows were computed depends on the question. So its hash is
salted with everything that its KV depends on: the method, and the whole prompt with its passages. The same question
then reuses its blocks, and a continued conversation those of its beginning, because recently fused prompts are
remembered and lend their salt to prompts that begin with them. A prompt that is itself fused gets its own salt, because
with a lent one another prompt with the same beginning would reuse its blocks.

If some blocks of a repeated question are not cached any more, it is fused again. vLLM never computes them over the
fused rows, because the answer would differ from the first one.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ragblend.engine.prompts.segments import Chunk, Literal, Prompt, Segment
from ragblend.integrations.vllm.finder import Match
from ragblend.integrations.vllm.settings import RequestOptions
from ragblend.kvstore.keys import pack_tokens

# Fusing computes rows in smaller pieces, and loads and writes KV, so it must save at least this share of the rows.
MIN_SAVED_SHARE = 0.3
MAX_ENCODED = 8  # limit for a request with `encode`: all other requests wait for that step
MAX_REMEMBERED = 512  # prompts that a later one may continue


@dataclass(frozen=True)
class FusionPlan:
    """One prompt's passages, and the savings of fusing them.

    stored: the space that has each passage's KV, or None; tokens: of the prompt; continued_tokens: length of the
    earlier prompt whose salt it has, because so much of that one is cached that vLLM computes the rest; 0: it has its
    own salt.
    """

    options: RequestOptions
    matches: tuple[Match, ...]
    stored: tuple[str | None, ...]
    tokens: int
    continued_tokens: int = 0

    @property
    def stored_tokens(self) -> int:
        pairs = zip(self.matches, self.stored, strict=True)
        return sum(match.stop - match.start for match, space in pairs if space is not None)

    @property
    def computed_tokens(self) -> float:
        """Rows that fusing computes, averaged over layers."""
        return self.tokens - self.stored_tokens * (1 - self._ratio)

    @property
    def _ratio(self) -> float:
        fixed = self.options.policy.fixed_ratio
        return self.options.ratio if fixed is None else fixed

    @property
    def to_encode(self) -> list[Match]:
        """The passages that are encoded before the prompt is fused."""
        if not self.options.encode:
            return []
        pairs = zip(self.matches, self.stored, strict=True)
        return [match for match, space in pairs if space is None][:MAX_ENCODED]

    @property
    def step_rows(self) -> float:
        """Rows computed in its step: its own, and those of passages to encode."""
        return self.computed_tokens + self._ratio * sum(len(match.whole) for match in self.to_encode)

    def saves_rows(self, computed_tokens: int) -> bool:
        """Whether fusing the whole prompt is less work than computing it where vLLM has the first tokens' KV."""
        return self.step_rows <= (1 - MIN_SAVED_SHARE) * (self.tokens - computed_tokens)

    def should_fuse(self, computed_tokens: int, minimum_tokens: int) -> bool:
        """Whether fusing saves work, or the request demands it."""
        is_enough = self.stored_tokens >= minimum_tokens or bool(self.options.encode)
        is_wanted = is_enough and (self.options.chose_method or self.saves_rows(computed_tokens))
        return bool(self.to_encode) or (self.tokens - computed_tokens > 1 and is_wanted)

    def prompt(self, token_ids: Sequence[int]) -> Prompt:
        """The engine's prompt: passages as chunks of the space that has or will have their KV."""
        spaces = [space or self.options.space for space in self.stored]
        return prompt_of(token_ids, self.matches, spaces)


def prompt_of(token_ids: Sequence[int], matches: Sequence[Match], spaces: Sequence[str]) -> Prompt:
    """The engine's prompt: passages as chunks, and the tokens between them as literals."""
    segments, at = list[Segment](), 0
    for match, space in zip(matches, spaces, strict=True):
        segments.append(Literal("", tuple(token_ids[at : match.start])))
        ids = tuple(token_ids[match.start : match.stop])
        whole = None if ids == match.whole else match.whole  # a path consists of whole passages only
        part = Chunk(None, match.node_id, ids, space, match.node_id is not None, whole, match.skipped)
        segments.append(part)
        at = match.stop
    return Prompt([*segments, Literal("", tuple(token_ids[at:]))])


def mark_boundaries(token_ids: Sequence[int], matches: Sequence[Match]) -> list[int]:
    """Each token id combined with a mark: in no passage, in one, or the first of a whole passage or of a part of one.

    Marking the beginning of a prompt gives the beginning of the marked prompt.
    """
    marks = [0] * len(token_ids)
    for match in matches:
        marks[match.start : match.stop] = [1] * (match.stop - match.start)
        marks[match.start] = 2 if len(match.whole) == match.stop - match.start else 3
    return [4 * token_id + mark for token_id, mark in zip(token_ids, marks, strict=True)]


class SaltCache:
    """The salts of recently fused prompts, for prompts that begin with one of them."""

    def __init__(self, max_prompts: int = MAX_REMEMBERED) -> None:
        self._max_prompts = max_prompts
        # By length and digest of a prompt's tokens: its salt, and the length of the prompt first fused with it.
        self._known: OrderedDict[tuple[int, bytes], tuple[str, int]] = OrderedDict()

    def salt_of(
        self,
        token_ids: Sequence[int],
        fused_by: str,
        continues: Callable[[str, int], bool] = lambda lent_salt, tokens: True,
    ) -> tuple[str, int]:
        """The salt of a prompt, and the length of the prompt that lends it (0: it is its own); remembers it.

        token_ids: from `mark_boundaries`; fused_by: the method, and all else that the KV depends on. The salt is that
        of the longest remembered beginning if `continues(that salt, its length)`, else the prompt's own.
        """
        packed = pack_tokens(token_ids)
        digest = hashlib.sha256(fused_by.encode("utf-8", "surrogatepass") + b"\0")
        at, found = 0, None
        for length in sorted({length for length, _ in self._known if length <= len(token_ids)}):
            digest.update(packed[4 * at : 4 * length])
            at = length
            if known_salt := self._known.get((length, digest.digest())):
                found = (length, digest.digest()), known_salt
        digest.update(packed[4 * at :])
        own, salt = (len(token_ids), digest.digest()), f"ragblend-{digest.hexdigest()}"
        lent_tokens = 0
        if found is not None:
            self._known.move_to_end(found[0])
            lent_salt, length = found[1]
            if lent_salt != salt and continues(lent_salt, length):
                salt, lent_tokens = lent_salt, length
        self._known[own] = salt, lent_tokens or len(token_ids)
        self._known.move_to_end(own)
        while len(self._known) > self._max_prompts:
            self._known.popitem(last=False)
        return salt, lent_tokens


def slots_of(blocks: Sequence[int], size: int, start: int, stop: int) -> tuple[list[int], list[int]]:
    """Positions in start..stop that have a block, and the slot of each; block 0 is null (outside a window)."""
    positions = np.arange(start, stop)
    block_ids = np.asarray(blocks, dtype=np.int64)[positions // size]
    has_block = block_ids != 0
    slots = block_ids[has_block] * size + positions[has_block] % size
    return positions[has_block].tolist(), slots.tolist()
