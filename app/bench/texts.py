"""Chunks of exactly so many tokens, cut from real words: random ids would attend like no real text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine


def cut_texts(engine: "Engine", source: str, chunks: int, tokens: int) -> list[str]:
    """`chunks` different texts that the model's tokenizer makes exactly `tokens` tokens of.

    Goes through the words of `source` in order, and round again from another word where they end. Raises
    UsageError if the words do not give such texts.
    """
    words = source.split()
    texts: dict[str, None] = {}  # ordered, without repeats: two equal chunks would share one stored KV
    start = 0
    for _ in range(50 * chunks):
        if len(texts) == chunks or not words:
            break
        text = _cut(engine, words, start, tokens)
        if text is not None:
            texts[text] = None
        start = (start + (len(text.split()) if text else 1)) % len(words)
    if len(texts) < chunks:
        raise UsageError(
            f"no {chunks} different texts of {tokens} tokens can be cut from {len(words)} words; pass --data"
        )
    return list(texts)


def _cut(engine: "Engine", words: Sequence[str], start: int, tokens: int) -> str | None:
    """The text from word `start` on, or None if no cut of it gives exactly `tokens` tokens."""
    # One word is at least one token, so `tokens` words are enough, and they may go round the end of the
    # source.
    text = " ".join(words[(start + place) % len(words)] for place in range(tokens))
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    # A cut may fall inside a character or a merge; a text that does not come back the same is tried
    # elsewhere.
    cut = engine.tokenizer.decode(ids[:tokens])
    return cut if engine.count_tokens(cut) == tokens else None
