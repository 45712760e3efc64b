"""Requests of all kinds to one vLLM with the connector: what is fused, what is not, and that no answer is wrong."""

import math
from dataclasses import replace

import pytest
from vllm_helpers import QUESTION, flip_byte, passage, report_of

TEXTS = [passage(number) for number in range(6)]
OFF = [{"off": True}]


def first(output) -> dict[int, float]:
    """Log-probabilities of the first token."""
    return {i: each.logprob for i, each in output.outputs[0].logprobs[0].items()}


def same(one, two, tolerance: float = 1e-4) -> bool:
    """Whether two answers have the same first distribution and the same tokens."""
    a, b = first(one), first(two)
    near = all(abs(math.exp(a[i]) - math.exp(b[i])) < tolerance for i in a)
    return near and one.outputs[0].token_ids == two.outputs[0].token_ids


def is_as_engine(server, output, texts, question=QUESTION) -> bool:
    """Whether the first token's probabilities are the built-in engine's."""
    read = server.engine.prefill(server.prompt(texts, question), method="probe-shift", ratio=0.25)
    expected = read.logits.softmax(-1).tolist()
    return all(abs(math.exp(p) - expected[i]) < 1e-4 for i, p in first(output).items())


def new_cache(server) -> None:
    server.llm.reset_prefix_cache()


@pytest.fixture
def empty(server):
    """The server with an empty prefix cache."""
    new_cache(server)
    return server


@pytest.fixture
def step_tokens(empty, monkeypatch):
    """Sets how many tokens the connector fuses in one step."""
    scheduler = empty.core.scheduler.connector._scheduler
    make = type(scheduler._settings)
    return lambda tokens: monkeypatch.setattr(
        scheduler, "_settings", make(minimum_tokens=32, step_tokens=tokens)
    )


# --- fused blocks and vLLM's prefix cache


def test_a_repeated_question_and_the_next_turn_reuse_their_own_blocks(empty):
    ids = empty.ids(TEXTS[:4])
    [once] = empty.ask([ids])
    [again] = empty.ask([ids])
    assert same(once, again) and report_of(again)["cached_tokens"] == len(ids) - 1 == again.num_cached_tokens
    whole_blocks = (len(ids) - 1) // 32 * 32
    [turn] = empty.ask([[*ids, *once.outputs[0].token_ids, 9, 8, 7]])
    assert turn.kv_transfer_params is None and turn.num_cached_tokens >= whole_blocks


def probabilities(output) -> list[dict[int, float]]:
    """Of all tokens, at each token of the answer."""
    return [{i: math.exp(each.logprob) for i, each in found.items()} for found in output.outputs[0].logprobs]


@pytest.mark.parametrize("lost", [0, 2], ids=["all blocks", "all but two"])
def test_the_same_question_twice_is_answered_alike(empty, monkeypatch, lost):
    """vLLM computed the last, not full block over fused ones, and blocks behind evicted ones."""
    side, given = empty.core.scheduler.connector._scheduler, list[int]()
    allocated = side.allocated
    monkeypatch.setattr(
        side, "allocated", lambda request, blocks, tokens: (given.extend(blocks[0]), allocated(request, blocks, tokens))
    )  # fmt: skip
    for number in range(3):
        ids = empty.ids([TEXTS[(number + n) % 6] for n in range(4)], f"Who left in storm {number}?")
        [once] = empty.ask([ids])
        empty.core.scheduler.kv_cache_manager.evict_blocks(set(given[len(given) - lost :]))
        [again] = empty.ask([ids])
        given.clear()
        assert once.outputs[0].token_ids == again.outputs[0].token_ids
        for one, other in zip(probabilities(once), probabilities(again), strict=True):
            assert one == pytest.approx(other, abs=1e-6)


def test_fused_blocks_are_not_reused_by_other_prompts(empty):
    """Neither by a plain request for the same prompt, nor by another question after the same passages."""
    ids, other = empty.ids(TEXTS[:4]), empty.ids(TEXTS[:4], "Who never came back when the mole broke?")
    [alone] = empty.ask([ids], OFF)
    new_cache(empty)
    fused, plain, asked = empty.ask([ids, ids, other], [None, *OFF, None])
    assert plain.num_cached_tokens == 0 and same(plain, alone) and not same(fused, alone)
    assert asked.num_cached_tokens == len(other) - 1
    assert is_as_engine(empty, asked, TEXTS[:4], "Who never came back when the mole broke?")


def test_exact_blocks_are_preferred_to_fusing(empty):
    ids = empty.ids(TEXTS[:4])
    [exact] = empty.ask([ids], OFF)
    [later] = empty.ask([ids])
    assert later.kv_transfer_params is None and same(exact, later)


def test_a_fused_second_turn_is_not_reused_by_another_one(empty):
    first_turn = empty.ids(TEXTS[:2])
    second, other = (
        [*first_turn, *empty.ids([TEXTS[n] for n in (5, 3, 2, 4)], question)]
        for question in ("Who never came back when the mole broke?", QUESTION)
    )
    empty.ask([first_turn])
    [alone] = empty.ask([other])
    new_cache(empty)
    for ids in (first_turn, second):
        assert empty.ask([ids])[0].kv_transfer_params is not None
    [after] = empty.ask([other])
    assert after.kv_transfer_params is not None and same(after, alone)


# --- several at once


def test_simultaneous_requests_are_answered_as_single_ones(empty):
    orders = [[TEXTS[(start + n) % 6] for n in range(3 + start % 2)] for start in range(6)]
    prompts = [empty.ids(order) for order in orders]
    params = [None if n % 3 else OFF[0] for n in range(6)]
    alone = []
    for ids, options in zip(prompts, params, strict=True):
        new_cache(empty)
        alone += empty.ask([ids], [options])
    new_cache(empty)
    together = empty.ask(prompts, params)
    assert all(map(same, together, alone))
    assert [each.kv_transfer_params is None for each in together] == [each is not None for each in params]


def test_several_answers_to_one_prompt_have_its_distribution(empty):
    ids = empty.ids(TEXTS[:4])
    [one] = empty.ask([ids])
    new_cache(empty)
    [several] = empty.ask([ids], n=3, temperature=1.0, seed=1)
    for output in several.outputs:
        found = {i: math.exp(each.logprob) for i, each in output.logprobs[0].items()}
        assert all(abs(found[i] - math.exp(p)) < 1e-4 for i, p in first(one).items())


def test_prompts_above_a_steps_tokens_wait_for_the_next_step(empty, monkeypatch, step_tokens):
    from ragblend.integrations.vllm.scheduler import ConnectorScheduler

    steps, take_work = [], ConnectorScheduler.take_work

    def counted(self, idle):
        work = take_work(self, idle)
        steps.append(len(work.prompts))
        return work

    monkeypatch.setattr(ConnectorScheduler, "take_work", counted)
    prompts = [empty.ids([TEXTS[n], *TEXTS[:3]]) for n in (3, 4, 5)]
    step_tokens(len(prompts[0]) + len(prompts[1]))
    outputs = empty.ask(prompts)
    assert [count for count in steps if count] == [2, 1]
    assert all("error" not in report_of(output) for output in outputs)


def test_a_prompt_that_computes_more_than_a_steps_tokens_is_read_by_vllm(empty, step_tokens):
    ids = empty.ids(TEXTS[:4])
    step_tokens(len(ids) // 2)
    fused, whole = empty.ask([ids, ids], [{}, {"method": "recompute", "label": "whole"}])
    assert report_of(fused)["hits"] == 4, "that one saves"
    assert whole.kv_transfer_params is None and whole.outputs[0].token_ids
    [asked] = empty.ask([[5, 6, 7]], [{"report": "whole"}])
    assert "in pieces" in report_of(asked)["report"]["warning"]


# --- passages of a prompt


def test_a_passage_with_another_token_at_its_edge_is_used(empty):
    ids = empty.ids(TEXTS[:4])
    at = ids.index(empty.passage_ids(TEXTS[0])[0])
    [output] = empty.ask([[*ids[:at], 44, *ids[at + 1 :]]])
    assert report_of(output)["missing_tokens"] == 0 and report_of(output)["reused_tokens"] > 100


def test_exact_and_auto_use_paths_that_the_engine_has_stored(empty):
    prompt = empty.prompt(TEXTS[:3])
    for _ in range(2):  # a path is stored when it is asked for twice
        empty.engine.generate(prompt, method="exact", max_new_tokens=1)
        assert empty.engine.finish_background(120)
    known = prompt.places[-1][1]
    ids, spans = list(prompt.token_ids), [list(place) for place in prompt.places]
    [own] = empty.ask([ids], OFF)
    for method in ("exact", "auto"):
        new_cache(empty)
        [output] = empty.ask([ids], [{"method": method, "spans": spans}])
        assert report_of(output)["reused_tokens"] == known - prompt.places[0][0], method
        assert report_of(output)["recomputed_tokens"] == 0 and same(output, own), method
    other = empty.ids([TEXTS[n] for n in (4, 5, 3)])
    [own] = empty.ask([other], OFF)
    new_cache(empty)
    [output] = empty.ask([other], [{"method": "exact"}])
    assert same(output, own), "an order that was never asked for is computed"


def test_named_spans_are_used(empty):
    ids = empty.ids(TEXTS[:4])
    start, length = len(empty.engine.runtime.canonical_prefix), len(empty.passage_ids(TEXTS[0]))
    [output] = empty.ask([ids], [{"spans": [[start, start + length]], "method": "reuse"}])
    assert report_of(output)["reused_tokens"] == length


def test_a_report_is_kept_for_a_request_with_its_label(empty):
    """As `VllmEngine` asks for it: for an answer of one token, and for one that was not fused, too."""
    ids = empty.ids(TEXTS[1:5])

    def fetch(label):
        return report_of(*empty.ask([[5]], [{"report": label}], max_tokens=1))

    empty.ask([ids], [{"label": "a"}], max_tokens=1)
    about = fetch("a")
    assert about["refusal"] is None and about["method"] == "probe-shift"
    assert about["model"]["weights"] == empty.engine.runtime.fingerprint.weights
    report = about["report"]
    assert report["hits"] == 4 and sum(count for _, count in report["served"]) == len(ids)
    assert fetch("a")["report"] is None, "once"
    empty.ask([ids], [{"label": "c"}], max_tokens=1)
    cached = fetch("c")["report"]
    assert cached["cached_tokens"] == len(ids) - 1 and cached["method"] == "probe-shift"
    empty.ask([ids], [{"label": "b", "collection": "theirs"}], max_tokens=1)
    assert "theirs" in fetch("b")["report"]["warning"]


# --- passages without KV


def test_encode_of_a_request_decides_whether_a_passage_is_encoded(empty):
    text = passage(78)
    ids, prefix = empty.passage_ids(text), empty.engine.runtime.canonical_prefix
    options = {"spans": [[len(prefix), len(prefix) + len(ids)]]}
    empty.ask([[*prefix, *ids, 5]], [options | {"encode": False}])
    empty.idle()
    assert not empty.is_stored(text)
    new_cache(empty)
    [output] = empty.ask([[*prefix, *ids, 5]], [options | {"encode": True, "method": "reuse"}])
    assert report_of(output)["missing_tokens"] == 0 and empty.is_stored(text)


def test_only_some_passages_of_one_prompt_are_encoded(empty):
    """All requests wait for that step."""
    from ragblend.integrations.vllm.planning import MAX_ENCODED

    store, ids = empty.engine.runtime.store, empty.ids([passage(90)], "x")
    before = store.stats().entries
    options = {"spans": [[start, start + 2] for start in range(10, 50, 2)], "encode": True, "method": "reuse"}
    [output] = empty.ask([ids], [options])
    assert report_of(output)["missing_tokens"] == 2 * (20 - MAX_ENCODED)
    assert store.stats().entries - before == MAX_ENCODED


def test_a_known_passage_without_kv_is_encoded_when_idle(empty):
    texts = [passage(77), *TEXTS[:3]]
    empty.engine.enter(texts[:1], ["p77"])
    [output] = empty.ask([empty.ids(texts)])
    assert report_of(output)["missing_tokens"] > 0
    empty.idle()
    assert empty.is_stored(texts[0])
    new_cache(empty)
    [output] = empty.ask([empty.ids(texts[::-1])])
    assert report_of(output)["missing_tokens"] == 0
    assert is_as_engine(empty, output, texts[::-1])


def test_a_passage_that_would_take_too_long_is_not_encoded_when_idle(empty, monkeypatch):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker, text = get_kv_transfer_group()._worker, passage(93)
    monkeypatch.setattr(worker, "_seconds_per_token", 0.1)
    empty.engine.enter([text], ["p93"])
    for seconds in (1, 1000):
        monkeypatch.setattr(worker, "_settings", replace(worker._settings, encode_seconds=seconds))
        new_cache(empty)
        empty.ask([empty.ids([text, *TEXTS[:3]])])
        empty.idle()
        assert empty.is_stored(text) == (seconds == 1000)


@pytest.mark.parametrize("is_waiting", [False, True])
def test_kv_encoded_by_vllm_is_deleted_with_its_passage(empty, is_waiting):
    text, name = passage(80 + is_waiting), f"p{80 + is_waiting}"
    empty.engine.enter([text], [name])
    empty.ask([empty.ids([text, *TEXTS[:3]])])
    if is_waiting:
        empty.engine.forget([name])
        empty.idle()
    else:
        empty.idle()
        assert empty.is_stored(text)
        assert empty.engine.forget([name]) > 0
    assert not empty.is_stored(text)


def test_named_passages_are_encoded_under_their_nodes_and_unknown_ones_only_on_request(empty):
    """They were encoded without a node, so deleting them left their KV; and so was any text of a client."""
    known, unknown = passage(90), passage(91)
    empty.engine.enter([known], ["p90"])
    prompt = empty.prompt([known, unknown, *TEXTS[:3]])
    ids, spans = list(prompt.token_ids), [list(place) for place in prompt.places]
    empty.ask([ids], [{"spans": spans}])
    empty.idle()
    assert empty.is_stored(known) and not empty.is_stored(unknown)
    assert empty.engine.forget(["p90"]) > 0 and not empty.is_stored(known)
    new_cache(empty)
    empty.ask([ids], [{"spans": spans, "encode": True}])
    assert empty.is_stored(known) and empty.is_stored(unknown)


def test_nothing_is_encoded_while_vllm_is_paused(empty):
    """It may be given other weights, whose KV would be stored as these weights'."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler, text = empty.core.scheduler, passage(92)
    empty.engine.enter([text], ["p92"])
    empty.ask([empty.ids([text, *TEXTS[:3]])])
    for state in PauseState.PAUSED_NEW, PauseState.PAUSED_ALL:
        scheduler.set_pause_state(state)
        empty.idle()
        assert not empty.is_stored(text) and not scheduler.has_requests()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.has_requests()
    empty.idle()
    assert empty.is_stored(text)


def test_spans_of_one_client_do_not_affect_others(empty):
    """Spans that cut a prompt into pieces without context made KV that all others' same prompt then got."""
    ids = empty.ids(TEXTS[:4])
    [cold] = empty.ask([ids])
    new_cache(empty)
    spans = [[start, start + 2] for start in range(12, 76, 2)]
    [odd] = empty.ask([ids], [{"spans": spans, "encode": True}])
    assert report_of(odd)["reused_tokens"] > 0 and not same(odd, cold)
    longer = [*ids, *empty.ids([])[-12:]]
    plain, continued = empty.ask([ids, longer])
    assert same(plain, cold) and report_of(plain)["hits"] == 4
    new_cache(empty)
    assert same(continued, empty.ask([longer])[0])


# --- cache salts


@pytest.mark.parametrize("is_entered", [True, False], ids=["a document's passage", "a client's own"])
def test_what_one_salt_has_encoded_is_no_hit_for_another(empty, monkeypatch, is_entered):
    """`hits` and the time told B what A had asked about."""
    text, side = passage(95 + is_entered), empty.core.scheduler.connector._scheduler
    if is_entered:
        empty.engine.enter([text], ["salted"])
    prompt = empty.prompt([text, *TEXTS[:3]])
    ids, spans = list(prompt.token_ids), [list(place) for place in prompt.places]
    options = {} if is_entered else {"spans": spans, "encode": True}

    def misses(salt, **options):
        new_cache(empty)
        [output] = empty.ask([ids], [{"spans": spans, "encode": False} | options], salt=salt)
        return report_of(output)["misses"]

    runtime = empty.engine.runtime
    own = runtime.key_of(
        runtime.canonical_prefix, empty.passage_ids(text), side._settings.space_of("default", "a")
    )
    empty.ask([ids], [options], salt="a")
    empty.idle()
    assert runtime.store.contains(own) and not empty.is_stored(text)
    assert [misses(salt) for salt in ("a", "b", None)] == [0, 1, 1]
    monkeypatch.setattr(side, "_settings", replace(side._settings, shared=("default",)))
    assert misses("a", encode=True) == 0 == misses("b") == misses(None), "the operator shares the collection"
    if is_entered:
        assert empty.is_stored(text) and empty.engine.forget(["salted"])
        assert not empty.is_stored(text) and not runtime.store.contains(own), "with its document"


def test_a_report_is_read_with_its_requests_salt_only(empty):
    ids = empty.ids(TEXTS[:4])
    empty.ask([ids], [{"label": "mine"}], salt="a", max_tokens=1)

    def fetch(salt):
        [output] = empty.ask([[5]], [{"report": "mine"}], salt=salt, max_tokens=1)
        return report_of(output)["report"]

    assert [fetch(salt) for salt in ("b", None)] == [None, None]
    assert fetch("a")["hits"] == 4


# --- damage, failures and aborted requests


def test_a_damaged_passage_is_computed_in_place(empty):
    texts = [passage(50), *TEXTS[1:3], TEXTS[5]]
    empty.engine.encode(texts[:1], ["p50"])
    [stored] = (file for file in empty.files() if empty.key_of(texts[0]).digest in file.name)
    flip_byte(stored)
    [output] = empty.ask([empty.ids(texts)])
    assert report_of(output)["missing_tokens"] == len(empty.passage_ids(texts[0]))
    assert report_of(output)["reused_tokens"] > 0


def test_a_prompt_that_cannot_be_fused_is_computed_by_vllm(empty, fail_fusing):
    ids = empty.ids(TEXTS[:4])
    [own] = empty.ask([ids], OFF)
    new_cache(empty)
    fail_fusing()
    one, _ = empty.ask([ids, empty.ids(TEXTS[2:5])])
    assert same(one, own)
    assert one.kv_transfer_params == {"ragblend": {"error": "MemoryError: no room"}}
    fail_fusing(lambda request: False)
    new_cache(empty)
    assert "error" not in report_of(*empty.ask([ids])), "and the server goes on"


def test_a_prompt_that_fails_once_is_computed_in_the_same_step(empty, monkeypatch, fail_fusing):
    """vLLM may have scheduled a next token before it is told of a failure, so its blocks must have KV."""
    from ragblend.integrations.vllm.worker import ConnectorWorker

    failed, take = set(), ConnectorWorker.take_failed_blocks
    monkeypatch.setattr(
        ConnectorWorker, "take_failed_blocks", lambda side: (failed.update(found := take(side)), found)[1]
    )
    ids = empty.ids(TEXTS[:4])
    [own] = empty.ask([ids], OFF)
    new_cache(empty)
    fail_fusing(lambda request: request.policy.name != "full")
    one, next_one = empty.ask([ids, ids])
    assert same(one, own) and one.num_cached_tokens == len(ids) - 1 and not failed
    assert same(next_one, own) and next_one.num_cached_tokens == len(ids) - 1, "in a step of its own"
    assert one.kv_transfer_params == {"ragblend": {"error": "MemoryError: no room"}}


@pytest.fixture
def shorter(monkeypatch):
    """Sets the longest prompt that is computed in full where fusing failed."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return lambda tokens: monkeypatch.setattr(get_kv_transfer_group()._worker, "_step_tokens", tokens)


def test_a_long_prompt_that_fails_is_left_to_vllm_at_once(empty, fail_fusing, shorter):
    ids = empty.ids(TEXTS[2:6])
    tried = fail_fusing()
    shorter(len(ids) // 2)
    [lost] = empty.ask([ids])
    [own] = empty.ask([ids], OFF)
    assert tried == ["probe-shift"] and same(lost, own)


def test_unwritten_blocks_of_an_aborted_request_are_not_reused(empty, fail_fusing):
    """vLLM looks for failed blocks among the requests that still run."""
    from vllm import SamplingParams

    order, question = [TEXTS[n] for n in (4, 1, 0, 3)], "What was lost?"
    ids = empty.ids(order, question)

    def abort(request):
        running = [each.request_id for each in empty.core.scheduler.running]
        empty.core.aborts_queue.put_nowait(running)
        return True

    fail_fusing(abort)
    llm = empty.llm.llm_engine
    llm.add_request("gone", {"prompt_token_ids": ids}, SamplingParams(max_tokens=5))
    empty.idle()
    fail_fusing(lambda request: False)
    llm.abort_request(["gone"], internal=False)
    llm.step()
    [later] = empty.ask([ids])
    assert later.kv_transfer_params is not None and is_as_engine(empty, later, order, question)


def test_a_request_does_not_wait_for_blocks_that_a_failed_one_may_never_compute(empty, fail_fusing, shorter):
    """The failed one has them taken back and computes them again, step by step: it may be aborted before the end."""
    from vllm import SamplingParams

    llm, ids = empty.llm.llm_engine, empty.ids([TEXTS[n] for n in (2, 0, 4, 1)])
    [own] = empty.ask([ids], OFF)
    new_cache(empty)
    fail_fusing()
    shorter(len(ids) // 2)
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=-1, ignore_eos=True)
    for name in ("gone", "stays"):
        llm.add_request(name, {"prompt_token_ids": ids}, sampling)
    llm.step()
    started = len(empty.core.scheduler.running)
    llm.abort_request(["gone"], internal=False)
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    [answered] = [each for each in outputs if each.request_id == "stays" and each.finished]
    assert same(answered, own)
    assert started == 1, "the other one waited"


def test_an_aborted_request_leaves_no_blocks_and_no_plan(empty):
    from vllm import SamplingParams

    llm, scheduler = empty.llm.llm_engine, empty.core.scheduler
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    ids = empty.ids(TEXTS[:4])
    llm.add_request("gone", {"prompt_token_ids": ids}, SamplingParams(max_tokens=50, ignore_eos=True))
    llm.step()
    llm.abort_request(["gone"], internal=False)
    while llm.has_unfinished_requests():
        llm.step()
    llm.step()
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert not scheduler.connector._scheduler._plans
    [output] = empty.ask([ids])
    assert is_as_engine(empty, output, TEXTS[:4])
