"""From token ids to text while they come: whole characters only, and nothing from a stop string on."""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "�"  # what a tokenizer prints for part of a character


class TextStream:
    """Feeds ids, hands out text. Text that may be the beginning of a stop string is held back until that is clear."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(s for s in stop if s)
        self._ids: list[int] = []
        self._given = 0
        self.stopped = False

    def feed(self, token_id: int) -> str:
        """The text that has become certain with this token; often empty."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """The rest."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        end = self._end_of(text, final)
        piece, self._given = text[self._given : end], max(self._given, end)
        return piece

    def _end_of(self, text: str, final: bool) -> int:
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return min(found)
        if final:
            return len(text)
        end = len(text.rstrip(_UNFINISHED))
        for stop in self._stop:
            for length in range(min(len(stop) - 1, end), 0, -1):
                if text[:end].endswith(stop[:length]):
                    end -= length
                    break
        return end


def text_of(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text of all ids, cut before the first stop string."""
    stream = TextStream(tokenizer, stop)
    stream._ids = list(token_ids)
    return stream.finish()
