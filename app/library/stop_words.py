"""Stop words by language, and the languages of a text, recognised by its stop words. Pure functions over text."""

from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ragblend.app.database import split_words

ENGLISH = "english"
# Prose has at least this share of stop words, and so many words per line. A table has fewer, in many languages.
PROSE_SHARE, PROSE_LINE = 0.1, 6
READ_CHARACTERS = 800  # of a text, to tell its language
# English stop words that a search ignores: by its rarity in manuals, "does" would count more than "error".
COMMON_WORDS = frozenset(
    """a an the and or but if of to in on at by for with from as is are was were be been do does did have has had will
    would can could may must should it its he she they his her their you your this that there who which what when how
    much many""".split()  # noqa: SIM905
)
# NLTK's lists of stop words, a copy of which is in LlamaIndex. The list of Hindi in Latin letters is half English.
STOP_WORDS, NOT_LANGUAGES = "core/_static/nltk_cache/corpora/stopwords", {"README", "hinglish"}
# Missing in its lists: a question may have no other stop word.
MORE_STOP_WORDS = {
    "german": "wann wer wen wem wessen warum wieso weshalb wohin woher",
    "french": "quand combien comment pourquoi quel quelle quels quelles où qui",
    "italian": "quando quanto quanta quanti quante come dove perché quale quali",
    "portuguese": "quando quanto quantos quantas como onde porque qual quais",
    "dutch": "wanneer wie wat waar waarom hoe hoeveel welke",
}


def languages_of(text: str) -> Set[str]:
    """The languages, by NLTK's names, that have the most of the text's words as stop words; empty if none has any.

    Only English, if it is one of them. For a short text several related languages may be equal. Only the beginning of
    the text is read.
    """
    return _languages_of_words(words_without_numbers(text[:READ_CHARACTERS]))


def languages_of_prose(text: str) -> Set[str]:
    """As `languages_of`; also empty for a text that is not prose, such as a table."""
    words, by_word = prose_words(text), _languages_by_word()
    found = _languages_of_words(words)
    share = sum(not found.isdisjoint(by_word.get(word, ())) for word in words)
    return found if share >= PROSE_SHARE * len(words) else set()


def stop_word_share(text: str) -> float:
    """The share of a text's words that are stop words of any language."""
    words, by_word = words_without_numbers(text), _languages_by_word()
    return sum(word in by_word for word in words) / max(len(words), 1)


def prose_words(text: str) -> list[str]:
    """The words of a text's beginning, without numbers; [] if it has fewer words per line than prose."""
    read = text[:READ_CHARACTERS]
    lines, words = sum(1 for line in read.splitlines() if line.strip()), words_without_numbers(read)
    return words if len(words) >= PROSE_LINE * lines else []


def _languages_of_words(words: Sequence[str]) -> Set[str]:
    by_word = _languages_by_word()
    found = Counter(language for word in words for language in by_word.get(word, ()))
    highest = max(found.values(), default=0)
    best = {language for language, count in found.items() if count == highest}
    return {ENGLISH} if ENGLISH in best else best


def words_without_numbers(text: str) -> list[str]:
    """The words that may tell the text's language."""
    return [word for word in split_words(text) if not word.isdigit()]


def stop_words_in(question: str) -> Set[str]:
    """The question's stop words in its languages, other than English (`COMMON_WORDS` has those).

    Empty if there is only one, which does not show a language: `Ada` is a name, and a stop word of Indonesian.
    """
    languages, by_word = languages_of(question) - {ENGLISH}, _languages_by_word()
    found = {word for word in split_words(question) if not languages.isdisjoint(by_word.get(word, ()))}
    return found if len(found) > 1 else set()


@cache
def _languages_by_word() -> dict[str, frozenset[str]]:
    """For each stop word its languages; empty if LlamaIndex is not installed with its lists."""
    found, package = defaultdict[str, frozenset[str]](frozenset), find_spec("llama_index")  # imports nothing
    places = package.submodule_search_locations if package is not None else None
    folders = (Path(place) / STOP_WORDS for place in places or ())
    for file in (file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())):
        for word in split_words(f"{file.read_text('utf-8')} {MORE_STOP_WORDS.get(file.name, '')}"):
            found[word] |= {file.name} - NOT_LANGUAGES
    return found
