"""Words of no subject, by language, and the languages of a text, which these tell. Pure functions over text."""

from collections import Counter, defaultdict
from collections.abc import Set
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ragblend.app.database import split_words

ENGLISH = "english"
PROSE_SHARE = 0.1  # of the words of prose are stop words, at least; a table has fewer
READ_CHARACTERS = 800  # of a text, to tell its language
# English words of no subject: "does" is rarer in manuals than "error".
COMMON_WORDS = frozenset(
    """a an the and or but if of to in on at by for with from as is are was were be been do does did have has had will
    would can could may must should it its he she they his her their you your this that there who which what when how
    much many""".split()  # noqa: SIM905
)
# NLTK's stop words, of which LlamaIndex has a copy. Its list of Hindi in Latin letters is half English.
STOP_WORDS, NO_LISTS = "core/_static/nltk_cache/corpora/stopwords", {"README", "hinglish"}
# What its lists lack: a question may have no other word of its language.
ASKING = {
    "german": "wann wer wen wem wessen warum wieso weshalb wohin woher",
    "french": "quand combien comment pourquoi quel quelle quels quelles où qui",
    "italian": "quando quanto quanta quanti quante come dove perché quale quali",
    "portuguese": "quando quanto quantos quantas como onde porque qual quais",
    "dutch": "wanneer wie wat waar waarom hoe hoeveel welke",
}


def languages_of(text: str, least_share: float = 0.0) -> Set[str]:
    """The languages, in NLTK's names, with more of its words among their stop words than any other; {}: not known.

    least_share: of its words that must be stop words. English alone, if it is one of them. Related languages may be
    equal for a short text. Of a long text the beginning is read.
    """
    words, by_word = words_without_numbers(text[:READ_CHARACTERS]), _languages_by_word()
    found = Counter(language for word in words for language in by_word.get(word, ()))
    most = max(found.values(), default=0)
    if most == 0 or most < least_share * len(words):
        return set()
    return {ENGLISH} if found[ENGLISH] == most else {each for each, count in found.items() if count == most}


def words_without_numbers(text: str) -> list[str]:
    """The words that may tell the text's language."""
    return [word for word in split_words(text) if not word.isdigit()]


def stop_words_in(question: str) -> Set[str]:
    """The question's stop words in its languages, if these are not English (`COMMON_WORDS` has those).

    A single one tells no language: `Ada` is a name, though a stop word of Indonesian.
    """
    languages, by_word = languages_of(question) - {ENGLISH}, _languages_by_word()
    found = {word for word in split_words(question) if not languages.isdisjoint(by_word.get(word, ()))}
    return found if len(found) > 1 else set()


@cache
def _languages_by_word() -> dict[str, frozenset[str]]:
    """The languages of which each word is a stop word; empty where LlamaIndex has no lists."""
    found, package = defaultdict[str, frozenset[str]](frozenset), find_spec("llama_index")  # imports nothing
    places = package.submodule_search_locations if package is not None else None
    folders = (Path(place) / STOP_WORDS for place in places or ())
    for file in (file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())):
        for word in split_words(f"{file.read_text('utf-8')} {ASKING.get(file.name, '')}"):
            found[word] |= {file.name} - NO_LISTS
    return found
