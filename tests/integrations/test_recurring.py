"""Text that recurs in a later prompt is found in whole sentences, whatever is around it, and nothing else is."""

import random

import pytest

from ragblend.integrations.recurring import MAX_PASSAGE_CHARS, MIN_PASSAGE_CHARS, RecurringText

ROPE = (
    "Rope is sold by the fathom at the north quay, tarred or plain, and the chandler cuts it himself.\n" * 2
)
BELL = (
    "The bell is rung by hand when the causeway closes.\n\nIts ringer may keep a goat on the chapel green.\n"
    * 2
)
LAMP = "The lamp in the chapel burns seal oil, which the bishop sends every autumn in a blue jar.\n" * 2
HEAD = "You are careful.\n\n"


def prompt(*passages: str, question: str) -> str:
    return HEAD + "\n\n".join(passages) + f"\n\nQuestion: {question}\nAnswer:"


def recalled(memory: RecurringText, text: str, ends_with_question: bool = True) -> list[str]:
    return [text[start:stop] for start, stop in memory.recall([text], ends_with_question)[0]]


def test_passages_are_found_between_other_neighbours_and_in_another_order() -> None:
    memory = RecurringText()
    assert recalled(memory, prompt(ROPE, BELL, question="What is sold?")) == []
    assert recalled(memory, prompt(LAMP, BELL, question="Who rings?")) == [BELL.rstrip()]
    assert recalled(memory, prompt(BELL, ROPE, LAMP, question="Who?")) == [
        each.rstrip() for each in (BELL, ROPE, LAMP)
    ]


def test_neighbouring_passages_are_found_separately_and_after_a_word_of_the_template() -> None:
    rope, lamp = (" ".join(each.split("\n")) for each in (ROPE, LAMP))
    memory = RecurringText()
    for _ in range(2):
        found = recalled(memory, prompt(f"Context: {rope}", lamp, question="Who?"))
    assert found == [rope.strip(), lamp.strip()]
    sources = prompt(f"Source 1: {lamp}", f"Source 2: {rope}", question="Who?")
    assert recalled(memory, sources) == [lamp.strip(), rope.strip()]


def test_repetition_within_one_prompt_does_not_count() -> None:
    memory = RecurringText()
    assert recalled(memory, ROPE * 1000) == []
    assert "\n".join(recalled(memory, ROPE * 1000, ends_with_question=False)) == (ROPE * 1000).rstrip()


LONG = (
    "Tell me at great length, with all that you know about it, where the rope is sold and who cuts it there? "
    * 2
)
LEDGERS = "Say at great length who it is that keeps the ledgers of the harbour, " * 3 + "and where they lie"
SHORT_ROPE = ROPE.partition("\n")[0] + " It floats, and it is never lent to anybody from the south side."


@pytest.mark.parametrize(
    ("prompts", "ends_with_question", "expected"),
    [
        ([prompt(question=LONG)] * 2, True, []),
        ([prompt(question=LONG)] * 2, False, [f"{LONG}\nAnswer:"]),
        ([f"{HEAD}{LEDGERS}?\nAnswer in German.", f"{HEAD}{LEDGERS}?\n\nAnswer in French."], True, []),
        ([f"{HEAD}{LEDGERS}.\nAnswer:"] * 2, True, []),
        ([f"{HEAD}{SHORT_ROPE}\n\nQuestion: {each}?" for each in ("What", "Who")], True, [SHORT_ROPE]),
        ([f"{HEAD}{SHORT_ROPE}\n\nQuestion: Who cuts it?"] * 2, True, []),
    ],
    ids=[
        "question",
        "no question",
        "question and order",
        "order",
        "before another question",
        "before the same",
    ],
)
def test_a_repeated_question_is_no_passage(prompts, ends_with_question, expected) -> None:
    memory = RecurringText()
    assert recalled(memory, prompts[0], ends_with_question) == []
    assert recalled(memory, prompts[1], ends_with_question) == expected


def test_a_text_without_newlines_is_recognised_by_its_sentences_unless_one_changed() -> None:
    memory, line = RecurringText(), ROPE.replace("\n", " ")
    assert recalled(memory, line, ends_with_question=False) == []
    assert recalled(memory, line.replace("tarred", "dry"), ends_with_question=False) == []
    assert recalled(memory, f"It floats. {line}It sinks.", ends_with_question=False) == [line.rstrip()]


def test_a_long_run_is_cut_between_lines_and_a_short_one_is_ignored() -> None:
    memory = RecurringText()
    many = "\n".join(f"Line {number} of a book that nobody would call a passage." for number in range(2_000))
    for text in (many, "Short, but the same twice.\n"):
        assert recalled(memory, text, ends_with_question=False) == []
    pieces = recalled(memory, many, ends_with_question=False)
    assert max(map(len, pieces)) <= MAX_PASSAGE_CHARS
    assert "\n".join(pieces) == many
    assert recalled(memory, "Short, but the same twice.\n", ends_with_question=False) == []


def test_the_oldest_sentences_are_forgotten_above_the_limit() -> None:
    memory = RecurringText(sentences=1_000)
    recalled(memory, ROPE)
    for number in range(2_000):
        recalled(memory, f"The {number}th letter is about herring.\n{LAMP if number % 9 == 0 else ''}")
    assert recalled(memory, ROPE, ends_with_question=False) == []
    assert recalled(memory, LAMP, ends_with_question=False) == [LAMP.rstrip()]


@pytest.mark.parametrize("seed", range(20))
def test_everything_found_was_in_an_earlier_prompt(seed: int) -> None:
    """Disjoint, ascending, long enough and in whole sentences, whatever the prompts are."""
    chosen, memory, before = random.Random(seed), RecurringText(), list[str]()
    for _ in range(8):
        text, at = "".join(chosen.choices([ROPE, BELL, LAMP, "x\n", "\n", "   \n", "no end"], k=5)), 0
        for start, stop in memory.recall([text], False)[0]:
            assert at <= start
            assert MIN_PASSAGE_CHARS <= stop - start <= MAX_PASSAGE_CHARS
            assert text[start - 1 : start] in ("", "\n", " ")
            assert text[stop : stop + 1] in ("", "\n", " ")
            assert any(text[start:stop] in earlier for earlier in before)
            at = stop
        before.append(text)


@pytest.mark.parametrize("text", ["", "\n", "\n\n\n", "a", "\ud800 lone\n" * 40])
def test_any_text_is_accepted(text: str) -> None:
    memory = RecurringText()
    assert memory.recall([text, ""], True) == [[], []]
    assert all(not found or "lone" in text for found in memory.recall([text, text], True))
