"""Answers computed in one pass: each says what it says alone, whoever comes, goes or fails beside it."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from benches import largest_error, make_prompt, make_text
from doubles import raising
from waiting import started, until

from ragblend.engine.decoding.direct import DirectDecode
from ragblend.engine.decoding.grammar import json_grammar
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.scheduling.queue import CallbackCancel, DeviceQueue
from ragblend.kvstore.errors import Cancelled, DeviceError

TEXTS = [make_text(seed) for seed in range(6)]
KNOWN = ("llama", "llama-yarn", "qwen2", "qwen3")
SCHEMA = json_grammar({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})


# --- the queue, without a device


@dataclass(eq=False)
class Squares:
    """Passes over numbers. bad: which fail, with all that go with them; entered, go: the next one waits in it."""

    max_together: int = 8
    bad: tuple[int, ...] = ()
    seen: list[list[int]] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def run_together(self, reads):
        self.seen.append(list(reads))
        self.entered.set()
        assert self.go.wait(30)
        if set(reads) & set(self.bad):
            raise RuntimeError("bad")
        return [each * each for each in reads]


@pytest.fixture
def ask():
    """ask(passes of each, cancels): who came in that order and then wants a pass for its number; what each got."""

    def ask(*passes, cancels=(), clients=None):
        queue, found = DeviceQueue(), {}
        cancels = dict(cancels)

        def work(number):
            claim = Claim(shares=True, client=str(number))
            try:
                with queue.turn(cancels.get(number), claim=claim) as turn:
                    while len(queue.order.begun) < len(passes) and not passes[0].seen:
                        turn.between_tokens()  # all of them are at their first token
                    found[number] = turn.run_batched(passes[number], number)
            except (RuntimeError, Cancelled) as error:
                found[number] = error

        threads = []
        with queue.turn():
            for number in range(len(passes)):
                threads.append(started(work, number))
                until(lambda: queue.request_count == len(threads) + 1)
        return queue, threads, found

    def joined(*given, **more):
        queue, threads, found = ask(*given, **more)
        for each in {id(passes): passes for passes in given}.values():
            each.go.set()
        for thread in threads:
            thread.join(30)
        return queue, found

    ask.joined = joined
    return ask


def test_waiting_requests_share_the_next_pass_and_wait_for_no_others(ask):
    squares = Squares()
    queue, found = ask.joined(*[squares] * 5)
    assert found == {number: number * number for number in range(5)}
    assert sorted(number for numbers in squares.seen for number in numbers) == list(range(5))
    assert max(map(len, squares.seen)) >= 4 and not queue.request_count


def test_a_pass_takes_at_most_as_many_as_it_can(ask):
    squares = Squares(max_together=2)
    _, found = ask.joined(*[squares] * 5)
    assert found == {number: number * number for number in range(5)}
    assert max(map(len, squares.seen)) == 2


def test_other_passes_run_in_their_own_turn(ask):
    one, other = Squares(), Squares()
    _, found = ask.joined(one, other, one, other)
    assert found == {number: number * number for number in range(4)}
    assert {number % 2 for numbers in one.seen for number in numbers} == {0}
    assert {number % 2 for numbers in other.seen for number in numbers} == {1}


def test_a_failing_request_of_a_pass_fails_alone(ask, caplog):
    squares = Squares(bad=(2,))
    queue, found = ask.joined(*[squares] * 4)
    assert isinstance(found.pop(2), RuntimeError) and found == {0: 0, 1: 1, 3: 9}
    assert max(map(len, squares.seen)) > 1 and "each is computed alone" in caplog.text
    assert not queue.request_count


def test_a_request_cancelled_in_a_pass_ends_after_it(ask):
    """Its cache is written to until then: a conversation would have kept half a token of it."""
    squares, cancelled, noticed = Squares(), set(), [threading.Event() for _ in range(3)]

    def is_cancelled(number):
        if number in cancelled:
            noticed[number].set()
        return number in cancelled

    cancels = {number: CallbackCancel(partial(is_cancelled, number)) for number in range(3)}
    queue, threads, found = ask(*[squares] * 3, cancels=cancels)
    assert squares.entered.wait(30)
    (numbers,) = squares.seen
    assert len(numbers) > 1
    cancelled.update(numbers[1:])
    assert all(noticed[number].wait(30) for number in numbers[1:]) and not found
    squares.go.set()
    for thread in threads:
        thread.join(30)
    assert found[numbers[0]] == numbers[0] ** 2
    assert all(isinstance(found[number], Cancelled) for number in numbers[1:]) and not queue.request_count


def test_each_is_charged_for_its_share_of_a_pass(ask, clock, monkeypatch):
    """Whoever happened to have the device was: a client whose requests lead would have come last."""

    class OneSecond(Squares):
        def run_together(self, reads):
            found = super().run_together(reads)
            clock.now += 1.0
            return found

    charged, squares = {}, OneSecond()
    queue, threads, _ = ask(*[squares] * 4)
    charge = queue.order.charge

    def noting(ticket, seconds):
        charged[ticket.claim.client] = charged.get(ticket.claim.client, 0.0) + seconds
        charge(ticket, seconds)

    assert squares.entered.wait(30)
    monkeypatch.setattr(queue.order, "charge", noting)
    squares.go.set()
    for thread in threads:
        thread.join(30)
    assert len(squares.seen[0]) > 1
    assert charged == {str(each): 1 / len(numbers) for numbers in squares.seen for each in numbers}


# --- the layers


@pytest.mark.parametrize("kind", KNOWN)
def test_rows_of_several_requests_give_what_each_gives_alone(stored_for, kind):
    """Contexts of several lengths, one or more tokens of each, one of them thinned out, and all beyond their room."""
    engine = stored_for(kind).engine
    rows = DirectDecode(engine.runtime.decoder, {})
    prefilled = [engine.prefill(make_prompt(TEXTS[:count]), "full") for count in (1, 3, 5)]
    engine.decode(prefilled[2], max_new_tokens=2, keep_tokens=30)
    draw = random.Random(0)
    asked = [
        [[draw.randrange(5, 300) for _ in range(draw.choice((1, 1, 4)))] for _ in range(3)] for _ in range(40)
    ]
    caches, told = [each.cache for each in prefilled], []
    for is_together in (False, True):
        for cache in caches:
            cache.truncate()
        found = []
        for ids in asked:
            reads = list(zip(caches, ids, strict=True))
            found += rows.run_together(reads) if is_together else [rows.run(*read) for read in reads]
        kept = [part.clone() for cache in caches for held in cache.fused for part in (held.keys, held.values)]
        told.append((torch.cat(found), kept))
    assert largest_error(told[1][0], told[0][0]) < 1e-4
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(told[0][1], told[1][1], strict=True))


def test_a_pass_that_fails_leaves_the_caches_as_they_were(stored):
    engine = stored.engine
    rows = DirectDecode(engine.runtime.decoder, {})
    prefilled = [engine.prefill(make_prompt(TEXTS[:count]), "full") for count in (2, 3)]
    reads = [(each.cache, [7, 8]) for each in prefilled]
    for each in prefilled:
        each.cache.truncate()
    rows.run_together(reads)
    expected = [each.clone() for each in rows.run_together(reads)]
    for each in prefilled:
        each.cache.truncate(2)
    gone = raising(RuntimeError("gone"))
    held = rows.layers
    rows.layers = [*held[:2], replace(held[2], down=gone), *held[3:]]
    with pytest.raises(RuntimeError):
        rows.run_together(reads)
    rows.layers = held
    assert all(cache.get_seq_length() == cache.prompt_tokens + 2 for cache, _ in reads)
    assert all(map(torch.equal, rows.run_together(reads), expected))


# --- answers


@pytest.fixture
def rows(stored, monkeypatch):
    """The loop, taken for every answer; sizes: of its passes."""
    runtime = stored.engine.runtime
    rows, sizes = DirectDecode(runtime.decoder, {}), []
    monkeypatch.setattr(runtime.decode_selector, "current", rows)
    monkeypatch.setattr(runtime.decode_selector, "needs_measurement", False)
    run = rows.run_together
    monkeypatch.setattr(rows, "run_together", lambda reads: sizes.append(len(reads)) or run(reads))
    rows.sizes = sizes
    return rows


OPTIONS = [
    {},
    {"temperature": 1.2, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.7},
    {"grammar": SCHEMA},
    {"keep_tokens": 20},
    {"logprobs": 2},
    {"stop": ["the"]},
]


def asked_of(number):
    """(prompt, options) of one of the requests."""
    texts = [TEXTS[(number + each) % 6] for each in range(1 + number % 4)]
    return make_prompt(texts, suffix=f" Who {number}?"), {"method": "full", **OPTIONS[number % len(OPTIONS)]}


def test_an_answer_alone_has_passes_of_its_own(stored, rows):
    stored.engine.generate(make_prompt(TEXTS), "full", max_new_tokens=30)
    assert set(rows.sizes) == {1}


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_the_same_whichever_requests_run_beside_them(stored, rows, seed):
    """Twelve requests begin, end and are cancelled at random, at most eight of them at once."""
    engine, draw, told = stored.engine, random.Random(seed), []
    lengths = [draw.randrange(12, 40) for _ in range(12)]
    cancelled = {number: draw.randrange(1, 12) for number in draw.sample(range(12), 4)}
    begins = sorted(draw.randrange(60) for _ in range(12))

    def ask(number, cancels=True):
        prompt, options = asked_of(number)
        cancel, pieces = threading.Event(), []

        def on_text(piece):
            pieces.append(piece)
            told.append(number)
            if cancels and len(pieces) == cancelled.get(number):
                cancel.set()

        try:
            given = {"max_new_tokens": lengths[number], "on_text": on_text, "cancel": cancel}
            return engine.generate(prompt, **given, **options).token_ids
        except Cancelled:
            return "".join(pieces)

    alone = [ask(number, cancels=False) for number in range(12)]
    rows.sizes.clear()
    told.clear()
    with ThreadPoolExecutor(12) as pool:
        work = []
        for number, begin in enumerate(begins):
            until(lambda begin=begin: len(told) >= begin or all(each.done() for each in work))
            work.append(pool.submit(ask, number))
        together = [each.result(60) for each in work]
    texts = [engine.tokenizer.decode(ids, skip_special_tokens=True) for ids in alone]
    for number, found in enumerate(together):
        if isinstance(found, str):
            assert number in cancelled and texts[number].startswith(found.rstrip("\ufffd"))
        else:
            assert found == alone[number]
    assert max(rows.sizes) >= 3 and engine.runtime.queue.request_count == 0


def test_an_unread_stream_blocks_no_other_request(stored, rows):
    engine = stored.engine
    prompt, options = asked_of(0)
    expected = engine.generate(prompt, max_new_tokens=20, **options).text
    unread = engine.stream(make_prompt(TEXTS), "full", max_new_tokens=1500)
    for _ in range(3):
        assert "".join(engine.stream(prompt, max_new_tokens=20, **options)) == expected
    assert 2 in rows.sizes
    unread.close()
    assert not engine.runtime.queue.request_count


def ask_four(engine, tokens=30):
    """Four answers at once, and the errors of those that failed."""

    def ask(number):
        prompt, options = asked_of(number)
        try:
            return engine.generate(prompt, max_new_tokens=tokens, on_text=lambda _: None, **options).token_ids
        except DeviceError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        with engine.runtime.queue.turn():
            work = [pool.submit(ask, number) for number in range(4)]
            until(lambda: engine.runtime.queue.request_count == 5)
        return [each.result(60) for each in work]


def test_a_pass_that_fails_once_is_retried(stored, rows, monkeypatch):
    """All four of it would have been told that the device failed, in the middle of their answers."""
    engine, left = stored.engine, [3]
    expected = [
        engine.generate(asked_of(n)[0], max_new_tokens=30, **asked_of(n)[1]).token_ids for n in range(4)
    ]
    run = rows.run_together

    def failing(reads):
        if len(reads) > 1 and left.pop() if left else False:
            raise MemoryError("gone")
        return run(reads)

    monkeypatch.setattr(rows, "run_together", failing)
    assert ask_four(engine) == expected and not left and 4 in rows.sizes


def test_a_device_that_keeps_failing_is_reported_to_each_request(stored, rows, monkeypatch):
    """Each has shown a word already; what is asked next is answered by the model that is there."""
    engine, run = stored.engine, rows.run_together

    def failing(reads):
        if rows.sizes.count(4) > 1:
            raise RuntimeError("gone")
        return run(reads)

    monkeypatch.setattr(rows, "run_together", failing)
    found = ask_four(engine)
    assert all(isinstance(each, DeviceError) and "in the middle" in str(each) for each in found)
    assert not engine.runtime.queue.request_count
