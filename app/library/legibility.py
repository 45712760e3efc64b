"""Judges whether a text is a language's: a PDF's font may map its letters to nothing, or to other letters.

Pure functions over counts of characters, words and neighbours. The thresholds lie between what 6,000 ordinary texts
in 30 languages, code, tables and PDFs have, and what such fonts give.
"""

import re
import unicodedata
from collections import Counter
from functools import cache
from itertools import pairwise

ENOUGH = 50  # visible characters, pairs of letters: of fewer nothing is said
ENOUGH_WORDS = 20
MOST_NO_TEXT = 0.1  # of visible characters: control and private-use characters, unassigned or replaced ones
MOST_CHANGES = 0.25  # of pairs of neighbouring letters: from one script to another
FEWEST_VOWELS, MOST_WITHOUT_VOWELS = 0.25, 0.15  # of the letters, and of the words, in Latin letters
MOST_GLUED = 0.5  # of letters: in runs without any space
LONGEST_WORD, FEWEST_RUNS = 40, 2  # letters; German words may be longer, but not all
FEWEST_LETTERS = 10  # different ones in a run of words; genes have four
NO_TEXT = {"Cc", "Cn", "Co", "Cs"}
REPLACED = "\ufffd"
VOWELS = set("aeiouyæøœıəɛɔ")
WORD = re.compile(r"[^\W\d_]{4,25}")
RUN = re.compile(rf"[^\W\d_]{{{LONGEST_WORD},}}")
# Scripts that one text mixes: Japanese and Korean; a letter beside its formula's or its unit's.
TOGETHER = dict.fromkeys(
    ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HALFWIDTH", "FULLWIDTH", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC"),
    "CJK",
) | dict.fromkeys(("MATHEMATICAL", "MODIFIER", "MICRO", "DOUBLE-STRUCK", "BLACK-LETTER"), "LATIN")  # fmt: skip
UNSPACED = {"CJK", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE"}


def is_garbled(text: str) -> bool:
    """Whether a text of some length is no language's. Code, tables, formulas and base64 are not called so."""
    return _has_no_text(text) or _changes_scripts(text) or _lacks_vowels(text) or _lacks_spaces(text)


def _has_no_text(text: str) -> bool:
    """As where a font has no map to Unicode, or one of its own."""
    counts = Counter(text)
    visible = sum(count for character, count in counts.items() if not character.isspace())
    lost = sum(count for character, count in counts.items() if _is_no_text(character))
    return visible >= ENOUGH and lost > MOST_NO_TEXT * visible


def _changes_scripts(text: str) -> bool:
    """As where a font's own numbers are taken for Unicode: Greek beside Arabic beside Chinese."""
    counts = Counter(pairwise(text)).items()
    pairs = Counter({pair: count for pair, count in counts if "".join(pair).isalpha()})
    changes = sum(count for (one, other), count in pairs.items() if _script(one) != _script(other))
    return pairs.total() >= ENOUGH and changes > MOST_CHANGES * pairs.total()


def _lacks_vowels(text: str) -> bool:
    """As where a font's numbers are shifted letters: `Wklv lv d whvw`."""
    words = [word for word in WORD.findall(text) if _is_plain(word) and _script(word[0]) == "LATIN"]
    letters = Counter("".join(words))
    if len(words) < ENOUGH_WORDS or 2 * letters.total() < sum(map(str.isalpha, text)):
        return False  # commands and names in a text of another script
    vowels = sum(count for letter, count in letters.items() if _base(letter) in VOWELS)
    without = sum(VOWELS.isdisjoint(map(_base, word)) for word in words)
    return vowels < FEWEST_VOWELS * letters.total() and without > MOST_WITHOUT_VOWELS * len(words)


def _lacks_spaces(text: str) -> bool:
    """As where a PDF places each letter alone, in a script that has spaces."""
    runs = [run for run in RUN.findall(text) if _script(run[0]) not in UNSPACED and _is_plain(run)]
    words = [run for run in runs if len(set(run)) >= FEWEST_LETTERS]
    is_most = sum(map(len, words)) > MOST_GLUED * sum(map(str.isalpha, text))
    return len(set(words)) >= FEWEST_RUNS and is_most


def _is_plain(word: str) -> bool:
    """Whether it is written as words are; base64 and names of code have capitals anywhere."""
    capitals = sum(map(str.isupper, word))
    return capitals <= 1 + len(word) // 10 or word.isupper()


@cache
def _is_no_text(character: str) -> bool:
    is_lost = unicodedata.category(character) in NO_TEXT and not character.isspace()
    return is_lost or character == REPLACED


@cache
def _script(letter: str) -> str:
    """Its Unicode name's first word."""
    first = unicodedata.name(letter, "?").split()[0]
    return TOGETHER.get(first, first)


@cache
def _base(letter: str) -> str:
    """A small letter without its accents."""
    return unicodedata.normalize("NFD", letter)[0].lower()
