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

# The chat template's tokens before a new answer; it may write others before the same answer in the history.
TEMPLATE_TOKENS = 8


@dataclass(frozen=True)
class _HeldKV:
    """A cache, the token ids whose KV it holds, and the loaded model that computed it."""

    token_ids: tuple[int, ...]
    cache: FusedCache
    decoder: "weakref.ref[Decoder]"


class Session:
    """The KV of one conversation's last prompt and answer. Thread-safe; of two answers at once the later is held."""

    def __init__(self) -> None:
        self._held: _HeldKV | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        held_kv = self._held
        return len(held_kv.token_ids) if held_kv else 0

    def keep(self, token_ids: tuple[int, ...], cache: FusedCache, decoder: Decoder) -> None:
        """Hold the KV of these tokens, up to the cache's length; the caller must not change the cache any more.

        A cache with evicted tokens (`eviction.py`) is not held: another question needs the whole context.
        """
        held_kv = _HeldKV(token_ids[: cache.get_seq_length()], cache, weakref.ref(decoder))
        self._held = None if cache.evicted_tokens else held_kv

    def common_tokens(self, token_ids: tuple[int, ...]) -> int:
        """How many of these tokens, from the first on, are held."""
        held_kv = self._held
        return _common(held_kv.token_ids, token_ids) if held_kv else 0

    def is_continued_by(self, token_ids: tuple[int, ...]) -> bool:
        """Whether these tokens continue the last prompt, ignoring the chat template at its end."""
        held_kv = self._held
        return (
            held_kv is not None
            and self.common_tokens(token_ids) >= held_kv.cache.prompt_tokens - TEMPLATE_TOKENS
        )

    def fork(self) -> "Session":
        """A second conversation that begins with the same context."""
        forked = Session()
        forked._held = self._held
        return forked

    def forget(self) -> None:
        """Free the memory."""
        self._held = None

    def span(self, prompt: Prompt, decoder: Decoder) -> Span | None:
        """The prompt's beginning that is held, as a span. It ends before the first chunk that is held only in part."""
        held_kv = self._held
        if held_kv is None or held_kv.decoder() is not decoder:  # another model, or one that was closed
            return None
        length = _common(held_kv.token_ids, prompt.token_ids)
        length = next((start for start, stop in prompt.places if start < length < stop), length)
        if length == 0:
            return None
        geometry = decoder.geometry
        layers = [held_kv.cache.span(layer, 0, length) for layer in range(geometry.layers)]
        keys, values = zip(*layers, strict=True)
        held = HeldChunk(held_kv.token_ids[:length], 0, geometry, keys, values)
        return Span(0, length, held, exact=True, held=True)


def _common(held: tuple[int, ...], token_ids: tuple[int, ...]) -> int:
    pairs = zip(held, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
