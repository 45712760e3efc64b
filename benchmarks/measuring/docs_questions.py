"""Makes questions from the user's own passages by templates, with answers from the text (`--docs`).

A *cloze* blanks a number, a name or a rare word out of one sentence. A *two-hop* question takes two sentences from
different passages that share a name, blanks the name in both, and asks for something else that is blanked in the
second, so that only the first tells which sentence is meant. No model is needed.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragblend.kvstore.errors import UsageError
from ragblend.measuring.data import Question

QUESTIONS = 60  # fewer are too few to tell methods apart
PASSAGES = 6
SHORTEST_WORDS, LONGEST_WORDS = 8, 45
MIN_LEFT_WORDS = 6  # words of a sentence beside the answer
MAX_OCCURRENCES = 2  # sentences that may contain the answer
SHORTEST_NAME = 4  # letters
NAME_GAP, ANSWER_GAP = "____", "[...]"
INSTRUCTION = "\nAnswer with the missing words alone."
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(]?[A-ZÀ-ÞА-Я0-9])|\n\s*\n")
# A number of two digits or more; a capitalised name, of one word or several, that does not begin the sentence.
_NUMBER = re.compile(r"\b\d[\d.,:]*\d\b")
_NAME = re.compile(r"(?<=[\w,;:)] )\b[A-ZÀ-Þ][\w'’-]+(?: [A-ZÀ-Þ][\w'’-]+)*")
_RARE = re.compile(r"\b[^\W\d_]{7,}\b")
_LOWER = re.compile(r"\b[a-zà-þ][\w'’-]*")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a passage, its names, and possible answers in it."""

    passage: int
    text: str
    names: tuple[str, ...]
    targets: tuple[str, ...]


def make_questions(
    documents: Sequence[Sequence[str]], count: int | None = None, passages: int | None = None, seed: int = 0
) -> list[Question]:
    """Generate `count` questions (None: QUESTIONS) with `passages` passages each (None: PASSAGES).

    documents: each one's passages in reading order. Half are two-hop questions, if the text allows. The same passages
    and seed give the same questions. Raises UsageError if nothing can be asked.
    """
    flat = [(number, text) for number, texts in enumerate(documents) for text in texts]
    texts = [text for _, text in flat]
    if len(texts) < 2:
        few = f"{len(texts)} passages are too few to ask about"
        raise UsageError(f"--docs: {few}; `ragblend ingest` more documents first")
    draw = random.Random(f"docs {seed}")
    sentences = _sentences(texts)
    made = _interleave(_two_hops(sentences, draw), _clozes(sentences, draw), count or QUESTIONS)
    if not made:
        raise UsageError(
            f"--docs: in {len(texts)} passages there is no sentence of {SHORTEST_WORDS} to {LONGEST_WORDS} words with "
            "a number, a name or a rare word to ask for; measure with --data"
        )
    owners = [owner for owner, _ in flat]
    return [
        Question(
            index,
            text,
            tuple(
                texts[place]
                for place in _choose_passages(needed, owners, passages or PASSAGES, f"{seed} {text}")
            ),
            (answer,),
            INSTRUCTION,
            (answer,),
            task,
            where=f"--docs, question {index}",
        )
        for index, (task, text, answer, needed) in enumerate(made)
    ]


Draft = tuple[str, str, str, tuple[int, ...]]  # task, question, answer, indices of the passages that it needs


def _sentences(texts: Sequence[str]) -> list[Sentence]:
    cut = [
        (place, " ".join(part.split()))
        for place, text in enumerate(texts)
        for part in _SENTENCE_END.split(text)
    ]
    kept = [each for each in dict.fromkeys(cut) if SHORTEST_WORDS <= len(each[1].split()) <= LONGEST_WORDS]
    ordinary = set(_LOWER.findall("\n".join(texts)))  # a word that also occurs in lower case is no name
    patterns = (_NUMBER, _NAME, _RARE)
    phrases = Counter(each for _, text in kept for each in {w for p in patterns for w in p.findall(text)})
    return [_sentence(place, text, phrases, ordinary) for place, text in kept]


def _sentence(place: int, text: str, phrases: Counter[str], ordinary: set[str]) -> Sentence:
    names = [
        name
        for name in dict.fromkeys(_NAME.findall(text))
        if len(name) >= SHORTEST_NAME and not any(word.lower() in ordinary for word in name.split())
    ]
    likely = [each for each in (*_NUMBER.findall(text), *names) if phrases[each] <= MAX_OCCURRENCES]
    rare = [word for word in _RARE.findall(text) if phrases[word] == 1 and word.islower()]
    fit = (
        each for each in likely or rare[:1] if len(_replace_phrase(text, each, "").split()) >= MIN_LEFT_WORDS
    )
    return Sentence(place, text, tuple(names), tuple(dict.fromkeys(fit)))


def _clozes(sentences: Sequence[Sentence], draw: random.Random) -> Iterator[Draft]:
    """Yield one cloze per sentence, alternating between passages, so that no document dominates."""
    for sentence in _round_robin(sentences, draw):
        if sentence.targets:
            answer = sentence.targets[0] if len(sentence.targets) == 1 else draw.choice(sentence.targets)
            asked = _replace_phrase(sentence.text, answer, ANSWER_GAP)
            text = f'What is missing at {ANSWER_GAP} in this sentence of the text?\n"{asked}"'
            yield "docs cloze", text, answer, (sentence.passage,)


def _two_hops(sentences: Sequence[Sentence], draw: random.Random) -> Iterator[Draft]:
    by_name: dict[str, list[Sentence]] = defaultdict(list)
    for sentence in sentences:
        for name in sentence.names:
            by_name[name].append(sentence)
    shared = [name for name, found in by_name.items() if len({each.passage for each in found}) > 1]
    draw.shuffle(shared)
    for name in shared:
        made = _two_hop(name, by_name[name], draw)
        if made is not None:
            yield made


def _two_hop(name: str, found: Sequence[Sentence], draw: random.Random) -> Draft | None:
    pairs = [
        (first, second, target)
        for first in found
        for second in found
        if first.passage != second.passage
        for target in second.targets
        if target not in first.text and target not in name and name not in target
    ]
    if not pairs:
        return None
    first, second, answer = draw.choice(pairs)
    hint = _replace_phrase(first.text, name, NAME_GAP)
    asked = _replace_phrase(_replace_phrase(second.text, answer, ANSWER_GAP), name, NAME_GAP)
    text = f'The same name is left out at {NAME_GAP} in both of these sentences of the text.\n"{hint}"\n"{asked}"\n'
    return "docs two-hop", f"{text}What is missing at {ANSWER_GAP}?", answer, (first.passage, second.passage)


def _replace_phrase(text: str, phrase: str, mark: str) -> str:
    return re.sub(rf"(?<!\w){re.escape(phrase)}(?!\w)", lambda _: mark, text)


def _round_robin(sentences: Sequence[Sentence], draw: random.Random) -> Iterator[Sentence]:
    by_passage: dict[int, list[Sentence]] = defaultdict(list)
    for sentence in sentences:
        by_passage[sentence.passage].append(sentence)
    queues = list(by_passage.values())
    draw.shuffle(queues)
    for queue in queues:
        draw.shuffle(queue)
    for turn in range(max(map(len, queues), default=0)):
        yield from (queue[turn] for queue in queues if turn < len(queue))


def _interleave(first: Iterator[Draft], second: Iterator[Draft], count: int) -> list[Draft]:
    """Alternate between both until there are `count` or both have ended; no question twice."""
    made: dict[str, Draft] = {}
    sources = [first, second]
    while sources and len(made) < count:
        for source in list(sources):
            found = next(source, None)
            if found is None:
                sources.remove(source)
            elif len(made) < count:
                made.setdefault(found[1], found)
    return list(made.values())


def _choose_passages(needed: tuple[int, ...], owners: Sequence[int], passages: int, seed: str) -> list[int]:
    """The passages of a question, shuffled: the needed ones and others, preferably of the same documents."""
    draw = random.Random(seed)
    others = [place for place in range(len(owners)) if place not in needed]
    draw.shuffle(others)
    near = {owners[place] for place in needed}
    others.sort(key=lambda place: owners[place] not in near)
    chosen = [*needed, *others][: max(passages, len(needed))]
    draw.shuffle(chosen)
    return chosen
