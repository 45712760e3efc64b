"""Filler text for generated tasks: plain sentences without figures, and invented keys and names.

Made from small lists by a seeded generator, so that texts of any length can be made offline, and nothing in them can be
mistaken for an answer: sentences have no digits, no capitals except the first letter, and none of the keys and names.
"""

import itertools
import random
from collections.abc import Iterator

WHO = (
    "the baker", "an old ferryman", "the new schoolteacher", "a retired surveyor", "the beekeeper's sister",
    "a quiet lodger", "the postman", "a travelling clockmaker", "the choir's conductor", "a young gardener",
    "the night porter", "the librarian", "a cautious engineer", "the miller's apprentice",
    "a visiting botanist", "the carpenter", "the shepherd", "a patient nurse",
)  # fmt: skip
DID = (
    "mended a fence", "carried two baskets of pears", "swept the stairs", "wrote a long letter",
    "painted the shutters green", "waited for the rain to stop", "sorted a drawer full of buttons",
    "listened to the wireless", "looked for a lost umbrella", "planted a row of beans", "counted the boats",
    "borrowed a ladder", "told the same story again", "polished the brass handles",
    "boiled a kettle of tea", "drew a map of the footpaths", "fed the ducks", "repaired a rusty bicycle",
)  # fmt: skip
WHERE = (
    "behind the chapel", "near the mill pond", "in the covered market", "on the way to the station",
    "beside the orchard wall", "at the end of the lane", "above the harbour", "under the stone bridge",
    "in the reading room", "by the garden gate", "next to the bakery", "on the windy side of the hill",
)  # fmt: skip
WHEN = (
    "before breakfast", "after the first frost", "while the bells were ringing", "as the tide went out",
    "on a slow afternoon", "when the last bus had gone", "during the harvest", "late in the evening",
    "once the shops had closed", "in the early spring",
)  # fmt: skip
THEN = (
    "and nobody thought it strange", "although the light was poor", "because there was nothing else to do",
    "and then went home", "which took longer than expected", "to everyone's quiet satisfaction",
    "without saying why", "as had been agreed",
)  # fmt: skip
ADJECTIVES = (
    "amber", "brisk", "calm", "dusky", "eager", "faint", "gentle", "hollow", "ivory", "jolly", "keen",
    "lofty", "mellow", "narrow", "olive", "proud", "rapid", "silver", "tidy", "upright", "vivid", "woolly",
    "young", "zesty",
)  # fmt: skip
NOUNS = (
    "anchor", "badger", "candle", "daisy", "ember", "falcon", "garnet", "hammer", "island", "jacket",
    "kettle", "lantern", "meadow", "needle", "otter", "pebble", "quarry", "ribbon", "saddle", "thimble",
    "urn", "violin", "walnut", "yarrow",
)  # fmt: skip
ONSETS = ("b", "br", "d", "dr", "f", "g", "k", "kr", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "z")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ei")
CODAS = ("l", "n", "r", "s", "nd", "rt", "lm", "sk", "x")


def sentences(draw: random.Random) -> Iterator[str]:
    """Endless sentences; few are repeated."""
    while True:
        words = [draw.choice(part) for part in (WHO, DID, WHERE, WHEN)]
        if draw.random() < 0.5:
            words.append(draw.choice(THEN))
        yield " ".join(words).capitalize() + "."


class Notes:
    """Sentences that are never repeated: each contains its number."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self._numbers, self._sentences = draw, itertools.count(1), sentences(draw)

    def passage(self, count: int) -> str:
        """A passage of `count` sentences."""
        chosen = itertools.islice(self._sentences, count)
        return " ".join(f"{each[:-1]}, says note {next(self._numbers)}." for each in chosen)

    def question(self) -> str:
        return f"Question {next(self._numbers)}: who was seen?"


def keys(draw: random.Random, count: int) -> list[str]:
    """Different keys, such as `calm-lantern`."""
    return draw.sample([f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS], count)


def numbers(draw: random.Random, count: int) -> list[str]:
    """Different numbers of seven digits."""
    return [str(number) for number in draw.sample(range(10**6, 10**7), count)]


def names(draw: random.Random, count: int) -> list[str]:
    """Different invented names, such as `Dravolm`."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = (draw.choice(ONSETS) + draw.choice(VOWELS) for _ in range(2))
        found[("".join(syllables) + draw.choice(CODAS)).capitalize()] = None
    return list(found)
