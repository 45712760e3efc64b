"""Before an uncertain figure or name the answer continues from a full prefill, once."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from benches import make_prompt, make_text

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.decoding.grammar import json_grammar
from ragblend.engine.decoding.passage_view import PassageView
from ragblend.engine.decoding.uncertainty import UncertaintyCheck
from ragblend.engine.prompts.passage_match import matching_passage, with_passage_alone
from ragblend.engine.prompts.session import Session
from ragblend.engine.selection import METHODS

TEXTS = [make_text(seed) for seed in range(3)]


class Words:
    """A tokenizer of whole words, each its own token."""

    def __init__(self, *words):
        self.words = words

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)

    def convert_ids_to_tokens(self, token):
        return self.words[token]


SAID = " Ferry| is| Felix| carries| 41|.|[|2|]| metres| Orbeck|4| 339| Elin"
WORDS = Words(*SAID.split("|"))
IDS = {word: number for number, word in enumerate(WORDS.words)}
ASKED = (IDS[" Orbeck"], IDS[" Ferry"])


def probabilities(**given):
    """The words with these probabilities."""
    return [(IDS[word], p) for word, p in given.items()]


def between(token, sure=0.5):
    """The token with that probability, and another figure or name with the rest."""
    return {token: sure, " 339" if token.strip().isdigit() else " Elin": 1 - sure}


@pytest.mark.parametrize(
    ("before", "token", "given", "wanted"),
    [
        ([" carries"], " 41", between(" 41"), True),
        ([" carries"], " 41", between(" 41", 0.9), False),  # it is sure
        ([], " 41", between(" 41"), True),
        ([" is"], " Felix", between(" Felix"), True),
        ([], " Felix", between(" Felix"), False),  # every sentence begins so
        ([" is", "."], " Felix", between(" Felix"), False),
        ([" is"], " Orbeck", between(" Orbeck"), False),  # the question has it
        ([" is"], " metres", between(" metres"), False),
        ([" metres", "["], "2", between("2"), False),  # a citation
        ([" metres", "[", "2", "]"], "4", between("4"), True),
        # A model that answers "41" or "The ferry ..." has one figure in mind.
        ([], " 41", {" 41": 0.5, " is": 0.45, " 339": 0.05}, False),
        ([], " 41", {" 41": 0.5, " is": 0.2, " 339": 0.3}, True),
        # Within a number its end is a choice too.
        ([" 41"], "4", {"4": 0.6, " metres": 0.4}, True),  # 41 or 414 metres?
        ([" 41"], " metres", {" metres": 0.4, "4": 0.6}, True),
        ([" 41"], " metres", {" metres": 0.3, ".": 0.3, " is": 0.39, "4": 0.01}, False),  # it ends, somehow
        ([" is"], " metres", {" metres": 0.4, "4": 0.6}, False),
        (["[", "2"], "]", {"]": 0.6, "4": 0.4}, False),  # a citation
    ],
)
def test_which_tokens_are_uncertain(before, token, given, wanted):
    chunk, question = Chunk("x", token_ids=(IDS[" is"],)), Literal("", ASKED)
    check = UncertaintyCheck(WORDS, Prompt([chunk, question]), 0.7)
    said = [IDS[each] for each in before]
    assert check.needs_full_prefill(IDS[token], lambda: probabilities(**given), said) is wanted


@pytest.mark.parametrize(("ends", "wanted"), [(0.9, False), (0.01, True)])
def test_passage_alone_contradicts_the_end_of_a_number(ends, wanted):
    prompt = Prompt([ELSEWHERE, FERRY, ELSEWHERE, Literal("", ASKED)])
    alone = probabilities(**{".": ends, "4": 1 - ends})
    check = UncertaintyCheck(WORDS, prompt, 0.98, lambda prompt: lambda answer: alone)
    given = probabilities(**{" metres": 0.6, "4": 0.4})
    assert check.needs_full_prefill(IDS[" metres"], lambda: given, [IDS[" 41"]]) is wanted


ELSEWHERE = Chunk("other", token_ids=(IDS[" is"], IDS[" metres"], IDS["."]) * 9)
FERRY = Chunk("ferry", token_ids=(IDS[" Orbeck"], IDS[" Ferry"], IDS[" carries"], IDS[" 41"]))


@pytest.mark.parametrize(
    ("alone", "confidence", "wanted"),
    [
        ({" 41": 0.05, " 339": 0.95}, 0.9, False),  # its passage does not rule it out
        ({" 41": 0.05, " 339": 0.95}, 0.5, True),  # but the whole prompt nearly chose the other
        ({" 41": 0.3, " 339": 0.7}, 0.5, False),
        ({" 41": 0.01, " 339": 0.36, "4": 0.33, "2": 0.3}, 0.5, False),  # nor is it sure of another
        ({" 41": 0.01, " 339": 0.99}, 0.5, True),
        ({"4": 0.4, " 339": 0.6}, 0.5, True),
        ({" is": 0.99, " 339": 0.01}, 0.5, False),  # it has no figure
        ({" 41": 0.01, " 339": 0.99}, 0.9, True),  # confident, and wrong
        ({" 41": 0.01, " 339": 0.99}, 0.99, False),
    ],
)
def test_passage_alone_contradicts_a_figure(alone, confidence, wanted):
    asked = []

    def view_of(prompt):
        asked.append([segment.text for segment in prompt.chunks])
        return lambda answer: probabilities(**alone)

    prompt = Prompt([ELSEWHERE, Literal("", (IDS["."],)), FERRY, ELSEWHERE, Literal("", ASKED)])
    check = UncertaintyCheck(WORDS, prompt, 0.98, view_of)
    likely = probabilities(**{" 41": confidence, " 339": 1 - confidence})
    for _ in range(2):
        assert check.needs_full_prefill(IDS[" 41"], lambda: likely, [IDS[" carries"]]) is wanted
    assert asked == ([["ferry"]] if confidence < 0.98 else []), "opened once, and only where it is needed"


def test_passage_alone_is_not_read_where_that_is_most_of_the_prompt():
    prompt = Prompt([FERRY, Literal("", ASKED)])
    check = UncertaintyCheck(WORDS, prompt, 0.98, lambda prompt: pytest.fail("read"))
    for confidence, wanted in ((0.7, True), (0.9, False)):
        likely = probabilities(**{" 41": confidence, " 339": 1 - confidence})
        assert check.needs_full_prefill(IDS[" 41"], partial(tuple, likely), [IDS[" carries"]]) is wanted


INVOICE, OTHER_INVOICE = (8, 0, 3, 1, 7), (8, 7, 3, 1, 0, 3, 1, 7, 0, 1)


@pytest.mark.parametrize(
    ("passages", "question", "wanted"),
    [
        ((ELSEWHERE.token_ids, FERRY.token_ids), ASKED, 1),
        ((ELSEWHERE.token_ids, FERRY.token_ids), (IDS[" metres"],), 0),
        ((ELSEWHERE.token_ids, FERRY.token_ids), (IDS[" Felix"],), None),
        (((), ()), ASKED, None),  # the answer ended with a division by zero
        # By its digits in order: alone they are in every passage, and the other one has them more often.
        ((OTHER_INVOICE, (*INVOICE, 9, 9)), INVOICE, 1),
    ],
)
def test_matching_passage(passages, question, wanted):
    first, second = (Chunk("text", token_ids=ids) for ids in passages)
    prompt = Prompt([Literal("", (1,)), first, Literal("", (2,)), second, Literal("", question)])
    assert matching_passage(prompt) == wanted
    if wanted is not None:
        alone = with_passage_alone(prompt, wanted)
        assert alone.chunks == [prompt.chunks[wanted]]
        assert alone.token_ids == (1, *prompt.chunks[wanted].token_ids, *question)


def test_earlier_turns_of_a_conversation_stay_beside_the_passage_alone():
    turn = Literal("", tuple(range(10)) * 2)
    prompt = Prompt([Literal("", (1,)), ELSEWHERE, turn, FERRY, Literal("", ASKED)])
    assert with_passage_alone(prompt, 1).segments == (prompt.segments[0], turn, FERRY, prompt.segments[-1])


def test_view_of_a_passage_alone_is_exact(engine):
    """What is stored for a passage is right where it directly follows the instructions."""
    begin = Literal("", engine.runtime.canonical_prefix)
    prompt = engine.tokenize(Prompt([begin, *make_prompt(TEXTS, prefix="").segments]))
    prefilled = engine.prefill(prompt, method="probe-shift")
    alone = with_passage_alone(prompt, 1)
    with engine.runtime.queue.turn() as turn:
        view = PassageView(engine.runtime.decoder, prefilled.prefill_other(alone, turn))
        found = [view.logits(answer) for answer in ((), (5,), (5, 6, 7))]
        assert prefilled.prefill_other(alone, turn).report.tokens.reused == len(alone.chunks[0].token_ids)
    for answer, logits in zip(((), (5,), (5, 6, 7)), found, strict=True):
        ids = torch.tensor([[*alone.token_ids, *answer]])
        wanted = engine.runtime.loaded.model(ids).logits[0, -1]
        assert (logits - wanted).abs().max() < 1e-4


@pytest.fixture
def engine(fresh):
    """It has the passages."""
    fresh.engine.encode(TEXTS)
    return fresh.engine


class Unsure(UncertaintyCheck):
    """Of the third token, whatever it is."""

    def needs_full_prefill(self, token, likely, before):
        return len(before) == 2


def exact_behind(bench, prompt, begun, count):
    """The model's own greedy tokens behind a prompt and the beginning of an answer."""
    ids = [*bench.engine.tokenize(prompt).token_ids, *begun]
    found = []
    while len(begun) + len(found) < count:
        logits = bench.engine.runtime.loaded.model(torch.tensor([[*ids, *found]])).logits[0, -1]
        found.append(int(logits.argmax()))
    return [*begun, *found]


@pytest.mark.parametrize("guessed", [0, 4])
def test_after_an_uncertain_token_the_answer_is_full_prefills(fresh, monkeypatch, guessed):
    engine, prompt = fresh.engine, make_prompt(TEXTS)
    engine.encode(TEXTS)
    fused = engine.generate(prompt, method="probe-shift:sure=0", max_new_tokens=8)
    assert fused.report.read_again_at is None
    monkeypatch.setattr("ragblend.engine.decoding.loop.UncertaintyCheck", Unsure)
    monkeypatch.setattr(
        type(engine.runtime.decode_selector.current), "guessed_tokens", guessed, raising=False
    )
    result = engine.generate(prompt, method="probe-shift:sure=0.5", max_new_tokens=8)
    assert result.report.read_again_at == 2
    assert list(result.token_ids) == exact_behind(fresh, prompt, fused.token_ids[:2], len(result.token_ids))


def test_a_forced_end_is_whole_where_its_tokens_are_uncertain(engine, monkeypatch):
    """The token is chosen twice; the way to the end went on by one each time, so that a quote was missing."""
    grammar = json_grammar({"type": "array", "items": {"type": "string"}})
    for uncertain in range(10, 16):

        class UnsureThere(UncertaintyCheck):
            def needs_full_prefill(self, token, likely, before, at=uncertain):
                return len(before) == at

        monkeypatch.setattr("ragblend.engine.decoding.loop.UncertaintyCheck", UnsureThere)
        options = {"method": "probe-shift:sure=0.5", "grammar": grammar, "max_new_tokens": 16}
        result = engine.generate(make_prompt(TEXTS), **options)
        assert json.loads(result.text) and len(result.token_ids) == 16, f"uncertain of token {uncertain}"


def test_sessions_do_not_hold_rejected_tokens(engine, monkeypatch):
    """Guesses that the second look turned down stood in it under the ids of what was said."""
    prompt, session = make_prompt(TEXTS), Session()
    monkeypatch.setattr("ragblend.engine.decoding.loop.UncertaintyCheck", Unsure)
    with engine.stream(prompt, method="probe-shift:sure=0.5", session=session, max_new_tokens=8) as stream:
        result = stream.result
    assert result.report.read_again_at == 2
    assert session.tokens == len(result.prompt.token_ids) + 2


def test_exact_prompts_are_not_prefilled_again(engine, monkeypatch):
    monkeypatch.setattr("ragblend.engine.decoding.loop.UncertaintyCheck", Unsure)
    for method, ratio in (("full", 0.15), ("exact", 0.15), ("probe-shift", 1.0), ("reuse", 0.15)):
        result = engine.generate(make_prompt(TEXTS), method=method, ratio=ratio, max_new_tokens=4)
        assert result.report.read_again_at is None, method
    assert METHODS["auto"].sure == METHODS["probe-shift"].sure > 0 == METHODS["epic"].sure


def test_a_prefilled_prompt_can_be_decoded_again(engine, monkeypatch):
    """The other cache is the answer's own: what is measured behind the prompt afterwards is still the method's."""
    prefilled = engine.prefill(make_prompt(TEXTS), method="probe-shift")
    before = engine.continue_logits(prefilled, (5, 6, 7))
    monkeypatch.setattr("ragblend.engine.decoding.loop.UncertaintyCheck", Unsure)
    first, again = (engine.decode(prefilled, max_new_tokens=6) for _ in range(2))
    assert first.token_ids == again.token_ids and again.report.read_again_at == 2
    assert torch.equal(engine.continue_logits(prefilled, (5, 6, 7)), before)
    assert engine.decode(replace(prefilled, sure=0.0), max_new_tokens=6).report.read_again_at is None
