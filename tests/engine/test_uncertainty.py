"""Before an uncertain figure or name the answer continues from a full prefill, once."""

from dataclasses import replace

import pytest
import torch
from benches import make_prompt, make_text

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.decoding.uncertainty import UncertaintyCheck
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


WORDS = Words(
    " Ferry",
    " is",
    " Felix",
    " carries",
    " 41",
    ".",
    "[",
    "2",
    "]",
    " metres",
    " Orbeck",
    "4",
    " 339",
    " Elin",
)
IDS = {word: number for number, word in enumerate(WORDS.words)}
ASKED = (IDS[" Orbeck"], IDS[" Ferry"])


@pytest.mark.parametrize(
    ("before", "token", "sure", "wanted"),
    [
        ([" carries"], " 41", 0.5, True),
        ([" carries"], " 41", 0.9, False),  # it is sure
        ([], " 41", 0.5, True),
        ([" is"], " Felix", 0.5, True),
        ([], " Felix", 0.5, False),  # every sentence begins so
        ([" is", "."], " Felix", 0.5, False),
        ([" is"], " Orbeck", 0.5, False),  # the question has it
        ([" is"], " metres", 0.5, False),
        ([" metres", "["], "2", 0.5, False),  # a citation
        ([" metres", "[", "2", "]"], "4", 0.5, True),
    ],
)
def test_which_tokens_are_uncertain(before, token, sure, wanted):
    chunk, question = Chunk("x", token_ids=(IDS[" is"],)), Literal("", ASKED)
    look = UncertaintyCheck(WORDS, Prompt([chunk, question]), 0.7)
    rival = " 339" if token.strip().isdigit() else " Elin"
    logits = probabilities(**{token: sure, rival: 1 - sure})
    assert look.needs_full_prefill(IDS[token], logits, [IDS[each] for each in before]) is wanted


def test_choosing_between_a_figure_and_a_word_is_not_uncertain():
    """A model that answers "41" or "The ferry ..." has one figure in mind."""
    look = UncertaintyCheck(WORDS, Prompt([Literal("", ASKED)]), 0.7)
    assert not look.needs_full_prefill(
        IDS[" 41"], probabilities(**{" 41": 0.5, " is": 0.45, " 339": 0.05}), []
    )
    assert look.needs_full_prefill(IDS[" 41"], probabilities(**{" 41": 0.5, " is": 0.2, " 339": 0.3}), [])


def probabilities(**given):
    """Logits of the words with these probabilities."""
    found = torch.full((len(WORDS.words),), 1e-9)
    for word, p in given.items():
        found[IDS[word]] = p
    return found.log()


class Unsure(UncertaintyCheck):
    """Of the third token, whatever it is."""

    def needs_full_prefill(self, token, logits, before):
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
    monkeypatch.setattr(type(engine.runtime.choice.current), "guessed_tokens", guessed, raising=False)
    result = engine.generate(prompt, method="probe-shift:sure=0.5", max_new_tokens=8)
    assert result.report.read_again_at == 2
    assert list(result.token_ids) == exact_behind(fresh, prompt, fused.token_ids[:2], len(result.token_ids))


def test_sessions_do_not_hold_rejected_tokens(fresh, monkeypatch):
    """Guesses that the second look turned down stood in it under the ids of what was said."""
    engine, prompt, session = fresh.engine, make_prompt(TEXTS), Session()
    engine.encode(TEXTS)
    monkeypatch.setattr("ragblend.engine.decoding.loop.UncertaintyCheck", Unsure)
    with engine.stream(prompt, method="probe-shift:sure=0.5", session=session, max_new_tokens=8) as stream:
        result = stream.result
    assert result.report.read_again_at == 2
    assert session.tokens == len(result.prompt.token_ids) + 2


def test_exact_prompts_are_not_prefilled_again(fresh, monkeypatch):
    engine = fresh.engine
    engine.encode(TEXTS)
    monkeypatch.setattr("ragblend.engine.decoding.loop.UncertaintyCheck", Unsure)
    for method, ratio in (("full", 0.15), ("exact", 0.15), ("probe-shift", 1.0), ("reuse", 0.15)):
        result = engine.generate(make_prompt(TEXTS), method=method, ratio=ratio, max_new_tokens=4)
        assert result.report.read_again_at is None, method
    assert METHODS["auto"].sure == METHODS["probe-shift"].sure > 0 == METHODS["epic"].sure


def test_a_prefilled_prompt_can_be_decoded_again(fresh, monkeypatch):
    """The other cache is the answer's own: what is measured behind the prompt afterwards is still the method's."""
    engine = fresh.engine
    engine.encode(TEXTS)
    prefilled = engine.prefill(make_prompt(TEXTS), method="probe-shift")
    before = engine.continue_logits(prefilled, (5, 6, 7))
    monkeypatch.setattr("ragblend.engine.decoding.loop.UncertaintyCheck", Unsure)
    first, again = (engine.decode(prefilled, max_new_tokens=6) for _ in range(2))
    assert first.token_ids == again.token_ids and again.report.read_again_at == 2
    assert torch.equal(engine.continue_logits(prefilled, (5, 6, 7)), before)
    assert engine.decode(replace(prefilled, sure=0.0), max_new_tokens=6).report.read_again_at is None
