"""Text that comes back in a later prompt: found in whole sentences, whatever stands around it, and nothing else."""

import random

import pytest

from ragblend.integrations.recurring import LEAST, MOST, RecurringText

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


def recalled(memory: RecurringText, text: str, is_asking: bool = True) -> list[str]:
    return [text[start:stop] for start, stop in memory.recall([text], is_asking)[0]]


def test_it_is_found_between_other_neighbours_and_in_another_order() -> None:
    memory = RecurringText()
    assert recalled(memory, prompt(ROPE, BELL, question="What is sold?")) == []
    assert recalled(memory, prompt(LAMP, BELL, question="Who rings?")) == [BELL.rstrip()]
    assert recalled(memory, prompt(BELL, ROPE, LAMP, question="Who?")) == [
        each.rstrip() for each in (BELL, ROPE, LAMP)
    ]


def test_passages_that_stood_together_come_back_apart_and_behind_a_word_of_the_template() -> None:
    rope, lamp = (" ".join(each.split("\n")) for each in (ROPE, LAMP))
    memory = RecurringText()
    for _ in range(2):
        found = recalled(memory, prompt(f"Context: {rope}", lamp, question="Who?"))
    assert found == [rope.strip(), lamp.strip()]
    sources = prompt(f"Source 1: {lamp}", f"Source 2: {rope}", question="Who?")
    assert recalled(memory, sources) == [lamp.strip(), rope.strip()]


def test_what_is_repeated_within_one_prompt_did_not_come_back() -> None:
    memory = RecurringText()
    assert recalled(memory, ROPE * 1000) == []
    assert "\n".join(recalled(memory, ROPE * 1000, is_asking=False)) == (ROPE * 1000).rstrip()


def test_the_question_is_read_anew_unless_something_follows_it() -> None:
    long = (
        "Tell me at great length, with all that you know about it, where the rope is sold and who cuts it there? "
        * 2
    )
    for is_asking, expected in ((True, []), (False, [f"{long}\nAnswer:"])):
        memory = RecurringText()
        assert recalled(memory, prompt(question=long), is_asking) == []
        assert recalled(memory, prompt(question=long), is_asking) == expected


def test_a_passage_right_before_the_question_is_one_when_another_question_follows() -> None:
    rope, memory = (
        ROPE.partition("\n")[0] + " It floats, and it is never lent to anybody from the south side.",
        RecurringText(),
    )
    asked = [
        f"{HEAD}{rope}\n\nQuestion: {question}?"
        for question in ("What is sold", "Who cuts it", "Who cuts it")
    ]
    assert [recalled(memory, each) for each in asked] == [[], [rope], []]


def test_a_long_question_that_is_asked_again_is_no_passage() -> None:
    long = "Say at great length who it is that keeps the ledgers of the harbour, " * 3 + "and where they lie"
    for ends in (("?\nAnswer in German.", "?\n\nAnswer in French."), (".\nAnswer:", ".\nAnswer:")):
        memory = RecurringText()
        assert [recalled(memory, f"{HEAD}{long}{end}") for end in ends] == [[], []]


def test_a_text_without_a_newline_is_known_by_its_sentences_and_a_changed_sentence_is_another() -> None:
    memory, line = RecurringText(), ROPE.replace("\n", " ")
    assert recalled(memory, line, is_asking=False) == []
    assert recalled(memory, line.replace("tarred", "dry"), is_asking=False) == []
    assert recalled(memory, f"It floats. {line}It sinks.", is_asking=False) == [line.rstrip()]


def test_a_long_run_is_cut_between_lines_and_a_short_one_is_left() -> None:
    memory = RecurringText()
    many = "\n".join(f"Line {number} of a book that nobody would call a passage." for number in range(2_000))
    for text in (many, "Short, but the same twice.\n"):
        assert recalled(memory, text, is_asking=False) == []
    pieces = recalled(memory, many, is_asking=False)
    assert max(map(len, pieces)) <= MOST
    assert "\n".join(pieces) == many
    assert recalled(memory, "Short, but the same twice.\n", is_asking=False) == []


def test_of_more_than_it_may_remember_the_older_goes() -> None:
    memory = RecurringText(sentences=1_000)
    recalled(memory, ROPE)
    for number in range(2_000):
        recalled(memory, f"The {number}th letter is about herring.\n{LAMP if number % 9 == 0 else ''}")
    assert recalled(memory, ROPE, is_asking=False) == []
    assert recalled(memory, LAMP, is_asking=False) == [LAMP.rstrip()]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_stood_in_an_earlier_prompt(seed: int) -> None:
    """Disjoint, ascending, long enough, in whole sentences, and in a prompt before; whatever the prompts are."""
    chosen, memory, before = random.Random(seed), RecurringText(), list[str]()
    for _ in range(8):
        text, at = "".join(chosen.choices([ROPE, BELL, LAMP, "x\n", "\n", "   \n", "no end"], k=5)), 0
        for start, stop in memory.recall([text], False)[0]:
            assert at <= start
            assert LEAST <= stop - start <= MOST
            assert text[start - 1 : start] in ("", "\n", " ")
            assert text[stop : stop + 1] in ("", "\n", " ")
            assert any(text[start:stop] in earlier for earlier in before)
            at = stop
        before.append(text)


@pytest.mark.parametrize("text", ["", "\n", "\n\n\n", "a", "\ud800 lone\n" * 40])
def test_any_text_may_come(text: str) -> None:
    memory = RecurringText()
    assert memory.recall([text, ""], True) == [[], []]
    assert all(not found or "lone" in text for found in memory.recall([text, text], True))
