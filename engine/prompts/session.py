"""A conversation's context, kept in memory between two questions: what the model has read need not be read again.

It is a fused context going on, as in any chat, so nothing of it may be stored: only chunks that were encoded alone may.
"""

import weakref
from dataclasses import dataclass
from itertools import takewhile

from ragblend.engine.cache import FusedCache
from ragblend.engine.model.decoder import Decoder
from ragblend.engine.plan import Span
from ragblend.engine.prompts.segments import Prompt
from ragblend.kvstore.memory import HeldChunk

TEMPLATE_TOKENS = 8  # that stand before an answer, and not where it is repeated


@dataclass(frozen=True)
class _Kept:
    """A cache, the ids of the tokens whose KV it holds, and the loaded model that made it."""

    token_ids: tuple[int, ...]
    cache: FusedCache
    decoder: "weakref.ref[Decoder]"


class Session:
    """What was read and written last in one conversation. Safe for threads; the last answer wins."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        kept = self._kept
        return len(kept.token_ids) if kept else 0

    def keep(self, token_ids: tuple[int, ...], cache: FusedCache, decoder: Decoder) -> None:
        """Hold the KV of these tokens, as far as the cache goes; nobody else may change that cache from now on.

        What was thinned out after the first token is no context to go on from, so of that nothing is held.
        """
        kept = _Kept(token_ids[: cache.get_seq_length()], cache, weakref.ref(decoder))
        self._kept = None if cache.evicted_tokens else kept

    def common_tokens(self, token_ids: tuple[int, ...]) -> int:
        """How many of these, from the first on, it holds."""
        kept = self._kept
        return _common(kept.token_ids, token_ids) if kept else 0

    def is_of(self, token_ids: tuple[int, ...]) -> bool:
        """Whether these go on from the prompt that was answered last, but for what a template ends a prompt with."""
        kept = self._kept
        return (
            kept is not None and self.common_tokens(token_ids) >= kept.cache.prompt_tokens - TEMPLATE_TOKENS
        )

    def fork(self) -> "Session":
        """Another conversation with the same beginning: what is held is lent, and each goes on by itself."""
        forked = Session()
        forked._kept = self._kept
        return forked

    def forget(self) -> None:
        """Let go of the memory."""
        self._kept = None

    def span(self, prompt: Prompt, decoder: Decoder) -> Span | None:
        """The beginning of the prompt that is held, up to a chunk that begins inside it and does not end there."""
        kept = self._kept
        if kept is None or kept.decoder() is not decoder:  # another model's, or one that was closed since
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
