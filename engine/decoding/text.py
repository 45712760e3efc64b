"""Incremental detokenizing: whole characters only, cut before a stop string or after the first sentence."""

import re
from collections.abc import Sequence
from typing import Any

# Chinese, Japanese, Arabic, Urdu, Hindi, Armenian, Ethiopic: a sentence ends here even if no blank follows.
FULL_STOPS = "。！？｡؟۔।॥։።"
# Also the marks that open a quotation in English and close one in German, Danish or Polish.
QUOTES = r"\"'”’“‘»«›‹」』》〉】）)*_"
_MONTHS = "Januar Jänner Februar März April Mai Juni Juli August September Oktober November Dezember".split()  # noqa: SIM905


def _word_or_beginning(word: str) -> str:
    """A pattern of the word, or of its beginning at the end of the text."""
    return rf"(?:\Z|{word[0]}{_word_or_beginning(word[1:])})" if word else ""


_MONTH = "|".join(map(_word_or_beginning, _MONTHS))
_AFTER_DAY = r"(?:(?<=(?<![\w.,:])\d)|(?<=(?<![\w.,:])\d\d))"  # a number of one or two digits
_DAY = rf"{_AFTER_DAY}\.[ \u00a0]++(?:[a-zß-öø-ÿ]|{_MONTH})"  # `31. Dezember`, `3. maj`, or not decided yet
_MAY_BE_DAY = re.compile(rf"(?<={_AFTER_DAY}\.)[ \u00a0]++(?:{_MONTH})\Z")
# Not the dot of an abbreviation, an initial, a day or a decimal; quotes and citations after it belong to the sentence.
SENTENCE_END = re.compile(
    r"(?:(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\bN[or])(?<!\bvs)(?<!\be\.g)(?<!\bi\.e)(?<!\b[A-HJ-Z])"
    rf"(?<![.!?…])(?!{_DAY})[.!?…]++(?:[{QUOTES}]|[ \u00a0\u202f]»(?=\s|$))*+(?=\s|$|\[\d)"
    rf"|[{FULL_STOPS}]++[{FULL_STOPS}.!?…{QUOTES}]*+)"
    r"(?:[ \t]*\[\d{1,4}(?:\s*[,;]\s*\d{1,4})*\])*"
)
_MAY_CITE = re.compile(r"[ \t]*(\[[\d\s,;]*)?")  # after a sentence: may be the beginning of a citation
_BRACKET = re.compile(rf"(?<=[.!?…{FULL_STOPS}])[{QUOTES}]*\[\Z")
_UNFINISHED = "�"  # a tokenizer's output for part of a character
REDECODED_IDS = 32  # the last ids, decoded again for each new one; earlier ids cannot change their text


class TextStream:
    """Turns token ids into text. Text that may begin a stop string is held back until that is decided."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), one_sentence: bool = False) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(s for s in stop if s)
        self._one_sentence = one_sentence
        # The text is `_head`, followed by the text of `_ids` without its first `_cut` characters.
        self._head, self._cut = "", 0
        self._ids: list[int] = []
        self._returned_chars = 0
        self.stopped = False

    def feed(self, token_id: int) -> str:
        """The new text that is final with this token; often empty."""
        self._ids.append(token_id)
        if len(self._ids) % (2 * REDECODED_IDS) == 0:
            self._drop_ids()
        return self._advance(final=False)

    def finish(self) -> str:
        """The remaining text."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        text = self._text
        end = self._final_chars(text, final)
        piece, self._returned_chars = text[self._returned_chars : end], max(self._returned_chars, end)
        return piece

    @property
    def _text(self) -> str:
        return self._head + self._decoded(self._ids)[self._cut :]

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _drop_ids(self) -> None:
        """Move the text of all but the last ids to `_head`, if the last ids alone give the same text.

        Decoding all ids for each token would take ten seconds in an answer of 8,000. One more id is kept than needed,
        because the first word of a decoded text may lose its blank.
        """
        kept, text = self._ids[-REDECODED_IDS - 1 :], self._text
        cut = len(self._decoded(kept[:1]))
        end = self._decoded(kept)[cut:]
        if text.endswith(end):
            self._head, self._cut, self._ids = text[: len(text) - len(end)], cut, kept

    def _final_chars(self, text: str, final: bool) -> int:
        """How many characters of the text are final; sets `stopped` if the answer ends there. final: no id follows."""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        sentence_end = _first_sentence(text.rstrip(_UNFINISHED)) if self._one_sentence else None
        may_continue = (
            sentence_end is not None and not final and _MAY_CITE.fullmatch(text, sentence_end) is not None
        )
        if sentence_end is not None and (found or not may_continue):
            found.append(sentence_end)
        if found:
            self.stopped = True
            return min(found)
        if final:
            return len(text)
        end = len(text.rstrip(_UNFINISHED))
        if sentence_end is not None:
            end = sentence_end
        elif self._one_sentence and _BRACKET.search(text):
            end -= 1
        elif self._one_sentence and (day := _MAY_BE_DAY.search(text)):
            end = day.start()
        for stop in self._stop:
            for length in range(min(len(stop) - 1, end), 0, -1):
                if text[:end].endswith(stop[:length]):
                    end -= length
                    break
        return end


def _first_sentence(text: str) -> int | None:
    """The end of the first sentence or line that has a letter; None until something follows it."""
    word = re.search(r"[^\W\d]", text)
    if word is None:
        return None
    ends = (match.end() for match in SENTENCE_END.finditer(text, word.start()))
    found = [end for end in (next(ends, -1), text.find("\n", word.start())) if 0 <= end < len(text)]
    return min(found, default=None)


def decode_text(
    tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str] = (), one_sentence: bool = False
) -> str:
    """The text of all ids, cut before the first stop string or after the first sentence."""
    stream = TextStream(tokenizer, stop, one_sentence)
    stream._ids = list(token_ids)
    return stream.finish()
