"""Judges whether a text is in a language at all: a PDF's font may map its letters to nothing, or to other letters.

Pure functions over counts of characters, words and pairs of letters. The thresholds lie between the values of ordinary
texts, code, tables and PDFs in 30 languages, and those of texts from such fonts.
"""

import re
import unicodedata
from collections import Counter
from functools import cache
from itertools import pairwise

from ragblend.app.library.encodings import REPLACEMENT

MIN_COUNT = 50  # of visible characters, and of pairs of letters: a shorter text is not judged
MIN_WORDS = 20
MAX_NO_TEXT = 0.1  # of visible characters: control and private-use characters, unassigned or replaced ones
MAX_CHANGES = 0.25  # of pairs of neighbouring letters: from one script to another
MIN_VOWELS, MAX_WITHOUT_VOWELS = 0.25, 0.15  # of the letters, and of the words, in Latin letters
MAX_GLUED = 0.5  # of the letters: those in long runs without any space
LONGEST_WORD, MIN_RUNS = 40, 2  # a single German word may have more letters
MIN_LETTERS = 10  # different letters in a run of words; a DNA sequence has four
LOST_CATEGORIES = {"Cc", "Cn", "Co", "Cs"}
VOWELS = set("aeiouyæøœıəɛɔ")
WORD = re.compile(r"[^\W\d_]{4,25}")
RUN = re.compile(rf"[^\W\d_]{{{LONGEST_WORD},}}")
# Scripts that one text mixes: those of Japanese and Korean; Latin letters, and those of formulas and units.
SCRIPT_GROUPS = dict.fromkeys(
    ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HALFWIDTH", "FULLWIDTH", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC"),
    "CJK",
) | dict.fromkeys(("MATHEMATICAL", "MODIFIER", "MICRO", "DOUBLE-STRUCK", "BLACK-LETTER"), "LATIN")  # fmt: skip
WITHOUT_SPACES = {"CJK", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE"}


def is_garbled(text: str) -> bool:
    """Whether a text is in no language. False for short texts, and for code, tables, formulas and base64."""
    return _has_lost_characters(text) or _changes_scripts(text) or _lacks_vowels(text) or _lacks_spaces(text)


def _has_lost_characters(text: str) -> bool:
    """Whether many characters are not text: the font has no map to Unicode, or a private one."""
    counts = Counter(text)
    visible = sum(count for character, count in counts.items() if not character.isspace())
    lost = sum(count for character, count in counts.items() if _is_lost(character))
    return visible >= MIN_COUNT and lost > MAX_NO_TEXT * visible


def _changes_scripts(text: str) -> bool:
    """Whether scripts change often, as when a font's glyph numbers are taken for Unicode: Greek, Arabic, Chinese."""
    counts = Counter(pairwise(text)).items()
    pairs = Counter({pair: count for pair, count in counts if "".join(pair).isalpha()})
    changes = sum(count for (one, other), count in pairs.items() if _script(one) != _script(other))
    return pairs.total() >= MIN_COUNT and changes > MAX_CHANGES * pairs.total()


def _lacks_vowels(text: str) -> bool:
    """Whether Latin words lack vowels, as when a font's numbers are shifted letters: `Wklv lv d whvw`."""
    words = [word for word in WORD.findall(text) if _is_plain(word) and _script(word[0]) == "LATIN"]
    letters = Counter("".join(words))
    if len(words) < MIN_WORDS or 2 * letters.total() < sum(map(str.isalpha, text)):
        return False  # commands and names in a text of another script
    vowels = sum(count for letter, count in letters.items() if _base(letter) in VOWELS)
    without = sum(VOWELS.isdisjoint(map(_base, word)) for word in words)
    return vowels < MIN_VOWELS * letters.total() and without > MAX_WITHOUT_VOWELS * len(words)


def _lacks_spaces(text: str) -> bool:
    """Whether words have no spaces between them, in a script that has spaces: the PDF places each letter alone."""
    runs = [run for run in RUN.findall(text) if _script(run[0]) not in WITHOUT_SPACES and _is_plain(run)]
    words = [run for run in runs if len(set(run)) >= MIN_LETTERS]
    are_most_letters = sum(map(len, words)) > MAX_GLUED * sum(map(str.isalpha, text))
    return len(set(words)) >= MIN_RUNS and are_most_letters


def _is_plain(word: str) -> bool:
    """Whether it is written as words are; base64 and names of code have capitals anywhere."""
    capitals = sum(map(str.isupper, word))
    return capitals <= 1 + len(word) // 10 or word.isupper()


@cache
def _is_lost(character: str) -> bool:
    is_lost = unicodedata.category(character) in LOST_CATEGORIES and not character.isspace()
    return is_lost or character == REPLACEMENT


@cache
def _script(letter: str) -> str:
    """The script of a letter: the first word of its Unicode name, or the group of scripts that it belongs to."""
    first = unicodedata.name(letter, "?").split()[0]
    return SCRIPT_GROUPS.get(first, first)


@cache
def _base(letter: str) -> str:
    """A small letter without its accents."""
    return unicodedata.normalize("NFD", letter)[0].lower()
