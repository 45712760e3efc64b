"""Keeps a conversation's KV in memory between two questions, so that it is not recomputed.

It is the KV of a fused context, so it is never stored on disk.
"""

import weakref
from dataclasses import dataclass
from itertools import takewhile

from ragblend.engine.cache import FusedCache
from ragblend.engine.model.decoder import Decoder
from ragblend.engine.plan import Span
from ragblend.engine.prompts.segments import Prompt
from ragblend.kvstore.memory import HeldChunk

TEMPLATE_TOKENS = 8  # of the chat template before a new answer; before an old one they may differ


@dataclass(frozen=True)
class _Kept:
    """A cache, the ids of the tokens whose KV it holds, and the loaded model that computed it."""

    token_ids: tuple[int, ...]
    cache: FusedCache
    decoder: "weakref.ref[Decoder]"


class Session:
    """The context of one conversation's last answer. Safe for threads; the last answer wins."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        kept = self._kept
        return len(kept.token_ids) if kept else 0

    def keep(self, token_ids: tuple[int, ...], cache: FusedCache, decoder: Decoder) -> None:
        """Hold the KV of these tokens, up to the cache's length; the caller must not change the cache any more.

        A cache with evicted tokens (`eviction.py`) is not held: another question needs the whole context.
        """
        kept = _Kept(token_ids[: cache.get_seq_length()], cache, weakref.ref(decoder))
        self._kept = None if cache.evicted_tokens else kept

    def common_tokens(self, token_ids: tuple[int, ...]) -> int:
        """How many of these tokens, from the first on, are held."""
        kept = self._kept
        return _common(kept.token_ids, token_ids) if kept else 0

    def is_of(self, token_ids: tuple[int, ...]) -> bool:
        """Whether these tokens continue the last prompt, ignoring the chat template at its end."""
        kept = self._kept
        return (
            kept is not None and self.common_tokens(token_ids) >= kept.cache.prompt_tokens - TEMPLATE_TOKENS
        )

    def fork(self) -> "Session":
        """A second conversation that begins with the same context."""
        forked = Session()
        forked._kept = self._kept
        return forked

    def forget(self) -> None:
        """Free the memory."""
        self._kept = None

    def span(self, prompt: Prompt, decoder: Decoder) -> Span | None:
        """The prompt's beginning that is held, as a span. It ends before the first chunk that is held only in part."""
        kept = self._kept
        if kept is None or kept.decoder() is not decoder:  # from another model, or from one that was closed
            return None
        length = _common(kept.token_ids, prompt.token_ids)
        length = next((start for start, stop in prompt.places if start < length < stop), length)
        if length == 0:
            return None
        geometry = decoder.geometry
        layers = [kept.cache.span(layer, 0, length) for layer in range(geometry.layers)]
        keys, values = zip(*layers, strict=True)
        held = HeldChunk(kept.token_ids[:length], 0, geometry, keys, values)
        return Span(0, length, held, exact=True, held=True)


def _common(held: tuple[int, ...], token_ids: tuple[int, ...]) -> int:
    pairs = zip(held, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
