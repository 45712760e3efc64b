"""The order of requests, by `RequestOrder` alone: time is a number, there are no threads and no device."""

import math
import random

import pytest

from ragblend.engine.scheduling.order import Claim, RequestOrder


def asks(cached=0, new=100, client="", chunks=None, **more):
    return Claim(
        True, client, chunks if chunks is not None else {"own": cached} if cached else {}, new, **more
    )


def begun(order, count=100, now=0.0):
    """Begin and end one after another; in which order."""
    found = []
    for _ in range(count):
        ticket = order.begin(now)
        if ticket is None:
            break
        found.append(ticket)
        order.remove(ticket)
    return found


@pytest.mark.parametrize(
    ("requests", "served"),
    [
        ([(0, 100)] * 5, [0, 1, 2, 3, 4]),  # nothing is known: first come, first served
        ([(0, 900), (450, 450), (800, 100)], [2, 1, 0]),  # more cached, less to compute
        (
            [(2000, 400), (500, 160)],
            [1, 0],
        ),  # by cached length over computed length the longest would be first
    ],
)
def test_the_least_to_compute_goes_first(requests, served):
    order = RequestOrder()
    tickets = [order.add(asks(cached, new)) for cached, new in requests]
    assert [tickets.index(ticket) for ticket in begun(order)] == served


def test_requests_with_common_chunks_follow_each_other():
    order = RequestOrder()
    chunks = [{"a": 100}, {"b": 100}, {"a": 100}, {"b": 100}, {"a": 100}]
    names = [
        next(iter(ticket.claim.cached))
        for ticket in [*map(order.add, (asks(chunks=c) for c in chunks))] and begun(order)
    ]
    assert names == ["a", "a", "a", "b", "b"]


def test_a_request_that_does_not_fit_waits_and_small_ones_overtake_it():
    order = RequestOrder(budget_bytes=100, window=3, most_begun=50)

    def answers(nbytes):
        order.add(asks(nbytes=nbytes))
        ticket = order.begin(0)
        if ticket is not None:
            ticket.is_prefilling = False
        return ticket

    running, large = answers(60), order.add(asks(nbytes=60))
    small = [answers(1) for _ in range(3)]
    assert None not in small and large not in small
    assert answers(1) is None  # it has been passed often enough: now it is waited for
    order.remove(running)
    assert order.begin(0) is large


def test_clients_share_the_device_fairly():
    order, served = RequestOrder(lead_s=1.0), []
    for _ in range(30):
        order.add(asks(1000, 1, client="many"))
    for number in range(3):
        order.add(asks(0, 1000, client=f"one {number}"))
    while (ticket := order.begin(0)) is not None:
        order.charge(ticket, 0.5)
        order.remove(ticket)
        served.append(ticket.claim.client)
    # Three of 0.5 s are more than the lead; then those go who have had nothing.
    assert served[:3] == ["many"] * 3 and sorted(served[3:6]) == ["one 0", "one 1", "one 2"]


def test_a_client_without_requests_saves_up_no_time():
    order = RequestOrder(lead_s=0.0)
    for _ in range(10):
        ticket = order.add(asks(client="steady"))
        assert order.begin(0) is ticket
        order.charge(ticket, 5.0)
        if _ < 9:
            order.remove(ticket)
    back = [order.add(asks(client="back")) for _ in range(5)]
    steady = [order.add(asks(client="steady")) for _ in range(5)]
    order.remove(ticket)
    first = []
    for _ in range(4):
        chosen = order.begin(0)
        order.charge(chosen, 1.0)
        order.remove(chosen)
        first.append(chosen)
    assert len(set(first) & set(back)) == len(set(first) & set(steady)) == 2


def test_a_request_served_alone_waits_for_all_and_is_not_overtaken():
    order = RequestOrder()
    first = order.add(asks())
    assert order.begin(0) is first
    first.is_prefilling = False
    alone, after = order.add(Claim()), order.add(asks(1000, 1))
    assert order.begin(0) is None
    order.remove(first)
    assert order.begin(0) is alone and order.begin(0) is None
    order.remove(alone)
    assert order.begin(0) is after


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_the_promises_are_kept(seed):
    draw = random.Random(seed)
    order, here, now = RequestOrder(100, window=8, most_begun=4), [], 0.0
    for _ in range(400):
        now += draw.random()
        chunks = {f"chunk {draw.randrange(9)}": draw.randrange(500) for _ in range(draw.randrange(4))}
        deadline = now + draw.random() * 40 if draw.random() < 0.3 else math.inf
        claim = Claim(
            draw.random() < 0.9,
            draw.choice("abc"),
            chunks,
            draw.randrange(1, 900),
            draw.randrange(140),
            deadline,
        )
        here.append(order.add(claim))
        if draw.random() < 0.7 and (ticket := order.begin(now)) is not None:
            assert ticket.claim.deadline > now
        for ticket in list(order.begun):
            order.charge(ticket, draw.random())
            ticket.is_prefilling = ticket.is_prefilling and draw.random() < 0.5
            if draw.random() < 0.4:
                order.remove(ticket)
        for ticket in order.waiting[:1]:
            if draw.random() < 0.1:  # somebody gives up
                order.remove(ticket)
        assert len(order.begun) <= 4 and sum(ticket.is_prefilling for ticket in order.begun) <= 1
        assert len(order.begun) == 1 or sum(ticket.claim.nbytes for ticket in order.begun) <= 100
        assert len(order.begun) == 1 or all(ticket.claim.shares for ticket in order.begun)
        assert (
            max((ticket.overtaken_by for ticket in order.waiting if ticket.claim.deadline > now), default=0)
            <= 8
        )
    served = begun(order, now=now) if not order.begun else []
    for _ in range(10_000):  # everybody is served, or past its deadline
        for ticket in list(order.begun):
            order.remove(ticket)
        if order.begin(now) is None:
            break
    assert all(ticket.claim.deadline <= now for ticket in order.waiting), served
