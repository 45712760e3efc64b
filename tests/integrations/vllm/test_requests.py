"""Requests of all kinds to one vLLM with the connector: what is fused, what is not, and that nothing is ever wrong."""

import math
from pathlib import Path

import pytest
from vllm_helpers import QUESTION, passage

from ragblend.engine.prompts.segments import Chunk

TEXTS = [passage(number) for number in range(6)]


def first(output) -> dict[int, float]:
    """Log-probabilities of the first token."""
    return {i: each.logprob for i, each in output.outputs[0].logprobs[0].items()}


def same(one, two, tolerance: float = 1e-4) -> bool:
    """Whether two answers are one: the first token's distribution, and all tokens."""
    a, b = first(one), first(two)
    near = all(abs(math.exp(a[i]) - math.exp(b[i])) < tolerance for i in a)
    return near and one.outputs[0].token_ids == two.outputs[0].token_ids


@pytest.fixture
def empty(server):
    """The server with nothing in its prefix cache."""
    server.llm.reset_prefix_cache()
    return server


def engine_says(server, texts, question=QUESTION, method="probe-shift", ratio=0.15):
    """Probabilities of the first token by the built-in engine."""
    prompt = server.engine.tokenize(server.engine.chat_prompt(None, [Chunk(t) for t in texts], question))
    return server.engine.prefill(prompt, method=method, ratio=ratio).logits.softmax(-1).tolist()


def is_as_engine(server, output, texts, question=QUESTION) -> bool:
    expected = engine_says(server, texts, question)
    return all(abs(math.exp(p) - expected[i]) < 1e-4 for i, p in first(output).items())


def test_passages_in_a_new_order_come_from_the_store(empty):
    order = [TEXTS[n] for n in (4, 1, 3, 0)]
    [output] = empty.ask([empty.ids(order)])
    report = output.kv_transfer_params["ragblend"]
    assert (report["method"], report["ratio"], report["missing_tokens"]) == ("probe-shift", 0.15, 0)
    assert report["reused_tokens"] > report["recomputed_tokens"] > 0
    assert output.num_cached_tokens == len(output.prompt_token_ids) - 1
    assert is_as_engine(empty, output, order)


def test_the_same_question_and_the_next_turn_find_their_own_blocks(empty):
    ids = empty.ids(TEXTS[:4])
    [once] = empty.ask([ids])
    [again] = empty.ask([ids])
    assert same(once, again) and again.kv_transfer_params is None
    whole_blocks = (len(ids) - 1) // 32 * 32
    assert again.num_cached_tokens == whole_blocks
    [turn] = empty.ask([[*ids, *once.outputs[0].token_ids, 9, 8, 7]])
    assert turn.kv_transfer_params is None and turn.num_cached_tokens >= whole_blocks


def test_fused_blocks_reach_no_other_prompt(empty):
    """Neither a plain request for the same prompt, nor another question behind the same passages."""
    ids, other = empty.ids(TEXTS[:4]), empty.ids(TEXTS[:4], "Who never came back when the mole broke?")
    alone = empty.ask([ids], [{"off": True}])[0]
    empty.llm.reset_prefix_cache()
    fused, plain, asked = empty.ask([ids, ids, other], [None, {"off": True}, None])
    assert plain.num_cached_tokens == 0 and same(plain, alone) and not same(fused, alone)
    assert asked.num_cached_tokens == len(other) - 1
    assert is_as_engine(empty, asked, TEXTS[:4], "Who never came back when the mole broke?")


def test_exact_blocks_are_better_than_fused_ones(empty):
    ids = empty.ids(TEXTS[:4])
    [exact] = empty.ask([ids], [{"off": True}])
    [later] = empty.ask([ids])
    assert later.kv_transfer_params is None and same(exact, later)


def test_many_at_once_are_as_one_by_one(empty):
    orders = [[TEXTS[(start + n) % 6] for n in range(3 + start % 2)] for start in range(6)]
    prompts = [empty.ids(order) for order in orders]
    params = [None if n % 3 else {"off": True} for n in range(6)]
    alone = []
    for ids, said in zip(prompts, params, strict=True):
        empty.llm.reset_prefix_cache()
        alone += empty.ask([ids], [said])
    empty.llm.reset_prefix_cache()
    together = empty.ask(prompts, params)
    assert all(map(same, together, alone))
    assert [output.kv_transfer_params is None for output in together] == [said is not None for said in params]


def test_several_answers_to_one_prompt(empty):
    ids = empty.ids(TEXTS[:4])
    [one] = empty.ask([ids])
    empty.llm.reset_prefix_cache()
    [several] = empty.ask([ids], n=3, temperature=1.0, seed=1)
    probabilities = [{i: each.logprob for i, each in out.logprobs[0].items()} for out in several.outputs]
    assert all(
        abs(math.exp(each[i]) - math.exp(p)) < 1e-4 for each in probabilities for i, p in first(one).items()
    )


def test_a_passage_of_which_edges_became_other_tokens_is_used(empty):
    ids = empty.ids(TEXTS[:4])
    at = ids.index(empty.engine.runtime.tokenizing.passage_ids(TEXTS[0])[0])
    [output] = empty.ask([[*ids[:at], 44, *ids[at + 1 :]]])
    assert output.kv_transfer_params["ragblend"]["missing_tokens"] == 0
    assert output.kv_transfer_params["ragblend"]["reused_tokens"] > 100


def test_exact_and_auto_go_on_from_paths_that_the_engine_has_learnt(empty):
    prompt = empty.engine.tokenize(empty.engine.chat_prompt(None, [Chunk(t) for t in TEXTS[:3]], QUESTION))
    for _ in range(2):  # asked for twice, a path is kept
        empty.engine.generate(prompt, method="exact", max_new_tokens=1)
        assert empty.engine.finish_background(120)
    known = prompt.places[-1][1]
    ids, spans = list(prompt.token_ids), [list(place) for place in prompt.places]
    [own] = empty.ask([ids], [{"off": True}])
    for method in ("exact", "auto"):
        empty.llm.reset_prefix_cache()
        [output] = empty.ask([ids], [{"method": method, "spans": spans}])
        report = output.kv_transfer_params["ragblend"]
        assert report["reused_tokens"] == known - prompt.places[0][0], method
        assert report["recomputed_tokens"] == 0 and same(output, own), method
    other = empty.ids([TEXTS[n] for n in (4, 5, 3)])
    [own] = empty.ask([other], [{"off": True}])
    empty.llm.reset_prefix_cache()
    [output] = empty.ask([other], [{"method": "exact"}])
    assert same(output, own), "in an order that nobody has asked for it is computed"


def test_a_report_is_told_to_who_has_its_label(empty):
    """As `VllmEngine` asks for it: of an answer of one token, and of one that was not fused, too."""
    ids = empty.ids(TEXTS[1:5])

    def told(label):
        [output] = empty.ask([[5]], [{"report": label}], max_tokens=1)
        return output.kv_transfer_params["ragblend"]

    empty.ask([ids], [{"label": "a"}], max_tokens=1)
    about = told("a")
    assert about["refusal"] is None and about["method"] == "probe-shift"
    assert about["model"]["weights"] == empty.engine.runtime.fingerprint.weights
    report = about["report"]
    assert report["hits"] == 4 and sum(count for _, count in report["served"]) == len(ids)
    assert told("a")["report"] is None, "once"
    empty.ask([ids], [{"label": "c"}], max_tokens=1)
    cached = told("c")["report"]
    assert cached["cached_tokens"] == (len(ids) - 1) // 32 * 32 and cached["method"] == "probe-shift"
    empty.ask([ids], [{"label": "b", "collection": "theirs"}], max_tokens=1)
    assert "theirs" in told("b")["report"]["warning"]


def test_a_passage_is_encoded_when_that_is_asked_for_and_never_when_that_is(empty):
    text = passage(78)
    runtime = empty.engine.runtime
    ids, prefix = tuple(runtime.tokenizing.passage_ids(text)), runtime.canonical_prefix
    key = runtime.key_of(prefix, ids, "default")
    options = {"spans": [[len(prefix), len(prefix) + len(ids)]]}
    empty.ask([[*prefix, *ids, 5]], [options | {"encode": False}])
    idle(empty)
    assert not runtime.store.contains(key)
    empty.llm.reset_prefix_cache()
    [output] = empty.ask([[*prefix, *ids, 5]], [options | {"encode": True, "method": "reuse"}])
    assert output.kv_transfer_params["ragblend"]["missing_tokens"] == 0 and runtime.store.contains(key)


def test_one_prompt_has_only_so_many_passages_encoded(empty):
    """Everybody waits for that step."""
    from ragblend.integrations.vllm.planning import MOST_ENCODED

    store, ids = empty.engine.runtime.store, empty.ids([passage(90)], "x")
    before = store.stats().entries
    options = {"spans": [[start, start + 2] for start in range(10, 50, 2)], "encode": True, "method": "reuse"}
    [output] = empty.ask([ids], [options])
    assert output.kv_transfer_params["ragblend"]["missing_tokens"] == 2 * (20 - MOST_ENCODED)
    assert store.stats().entries - before == MOST_ENCODED


def test_named_spans_are_used_and_wrong_ones_are_not(empty):
    ids = empty.ids(TEXTS[:4])
    runtime = empty.engine.runtime
    start = len(runtime.canonical_prefix)
    length = len(runtime.tokenizing.passage_ids(TEXTS[0]))
    said = {"spans": [[start, start + length]], "method": "reuse"}
    assert empty.ask([ids], [said])[0].kv_transfer_params["ragblend"]["reused_tokens"] == length
    empty.llm.reset_prefix_cache()
    own = empty.ask([ids], [{"off": True}])[0]
    for wrong in (
        {"spans": [[start + 1, start + length]]},
        {"spans": [[0, 10**9]]},
        {"collection": "theirs"},
    ):
        empty.llm.reset_prefix_cache()
        [output] = empty.ask([ids], [wrong])
        assert output.kv_transfer_params is None and same(output, own), wrong


def files_of(server) -> list[Path]:
    return sorted(
        path for path in (server.home / "kv").rglob("*") if path.is_file() and path.stat().st_size > 50_000
    )


def test_what_one_client_says_are_passages_serves_no_other(empty):
    """Spans that cut a prompt into pieces without context made KV that everybody's same prompt then got."""
    ids = empty.ids(TEXTS[:4])
    [cold] = empty.ask([ids])
    empty.llm.reset_prefix_cache()
    spans = [[start, start + 2] for start in range(12, 76, 2)]
    [odd] = empty.ask([ids], [{"spans": spans, "encode": True}])
    assert odd.kv_transfer_params["ragblend"]["reused_tokens"] > 0 and not same(odd, cold)
    longer = [*ids, *empty.ids([])[-12:]]
    plain, goes_on = empty.ask([ids, longer])
    assert same(plain, cold) and plain.kv_transfer_params["ragblend"]["hits"] == 4
    empty.llm.reset_prefix_cache()
    assert same(goes_on, empty.ask([longer])[0])


def test_a_damaged_passage_is_computed_in_place(empty):
    before = TEXTS[5]
    texts = [passage(50), *TEXTS[1:3], before]
    stored = set(files_of(empty))
    empty.engine.encode(texts[:1], ["p50"])
    [new] = set(files_of(empty)) - stored
    held = bytearray(new.read_bytes())
    held[len(held) // 2] ^= 0xFF
    new.write_bytes(held)
    [output] = empty.ask([empty.ids(texts)])
    report = output.kv_transfer_params["ragblend"]
    assert report["missing_tokens"] == len(empty.engine.runtime.tokenizing.passage_ids(texts[0]))
    assert report["reused_tokens"] > 0


def test_what_cannot_be_fused_is_computed_by_vllm(empty, monkeypatch):
    from ragblend.integrations.vllm import worker

    ids = empty.ids(TEXTS[:4])
    [own] = empty.ask([ids], [{"off": True}])
    empty.llm.reset_prefix_cache()

    def breaks(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(worker, "prefill", breaks)
    one, _ = empty.ask([ids, empty.ids(TEXTS[2:5])])
    assert same(one, own)
    assert one.kv_transfer_params == {"ragblend": {"error": "MemoryError: no room"}}
    monkeypatch.undo()
    empty.llm.reset_prefix_cache()
    assert "error" not in empty.ask([ids])[0].kv_transfer_params["ragblend"], "and the server goes on"


def test_what_fails_once_is_computed_here_and_its_blocks_are_never_without_kv(empty, monkeypatch):
    """vLLM may have scheduled a next token before it hears of it."""
    from ragblend.integrations.vllm import worker

    ids, made, told = empty.ids(TEXTS[:4]), worker.prefill, set()
    take = worker.ConnectorWorker.take_failed_blocks
    monkeypatch.setattr(
        worker.ConnectorWorker,
        "take_failed_blocks",
        lambda side: (told.update(found := take(side)), found)[1],
    )
    [own] = empty.ask([ids], [{"off": True}])
    empty.llm.reset_prefix_cache()

    def breaks(runtime, request):
        if request.policy.name != "full":
            raise MemoryError("no room")
        return made(runtime, request)

    monkeypatch.setattr(worker, "prefill", breaks)
    one, next_one = empty.ask([ids, ids])
    assert same(one, own) and one.num_cached_tokens == len(ids) - 1 and not told
    assert same(next_one, own) and next_one.num_cached_tokens == len(ids) - 1, "in a step of its own"
    assert one.kv_transfer_params == {"ragblend": {"error": "MemoryError: no room"}}


def test_more_than_a_step_takes_waits_for_the_next(empty, monkeypatch):
    from ragblend.integrations.vllm.scheduler import ConnectorScheduler

    steps, given = [], ConnectorScheduler.take_work

    def counted(self, idle):
        work = given(self, idle)
        steps.append(len(work.prompts))
        return work

    monkeypatch.setattr(ConnectorScheduler, "take_work", counted)
    prompts = [empty.ids([TEXTS[n], *TEXTS[:3]]) for n in (3, 4, 5)]
    made = empty.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    monkeypatch.setattr(
        made,
        "_settings",
        type(made._settings)(minimum_tokens=32, step_tokens=len(prompts[0]) + len(prompts[1])),
    )
    outputs = empty.ask(prompts)
    assert [count for count in steps if count] == [2, 1]
    assert all("error" not in output.kv_transfer_params["ragblend"] for output in outputs)


def test_what_would_compute_more_than_a_step_takes_is_read_in_pieces(empty, monkeypatch):
    made = empty.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    ids = empty.ids(TEXTS[:4])
    few = type(made._settings)(minimum_tokens=32, step_tokens=len(ids) // 2)
    monkeypatch.setattr(made, "_settings", few)
    fused, whole = empty.ask([ids, ids], [{}, {"method": "recompute", "label": "whole"}])
    assert fused.kv_transfer_params["ragblend"]["hits"] == 4, "that one saves"
    assert whole.kv_transfer_params is None and whole.outputs[0].token_ids
    [told] = empty.ask([[5, 6, 7]], [{"report": "whole"}])
    assert "in pieces" in told.kv_transfer_params["ragblend"]["report"]["warning"]


def test_a_long_prompt_that_fails_is_vllms_at_once(empty, monkeypatch):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from ragblend.integrations.vllm import worker

    tried = []

    def breaks(runtime, request):
        tried.append(request.policy.name)
        raise MemoryError("no room")

    ids = empty.ids(TEXTS[2:6])
    monkeypatch.setattr(worker, "prefill", breaks)
    monkeypatch.setattr(get_kv_transfer_group()._worker, "_longest", len(ids) // 2)
    [lost] = empty.ask([ids])
    monkeypatch.undo()
    [own] = empty.ask([ids], [{"off": True}])
    assert tried == ["probe-shift"] and same(lost, own)


def test_a_known_passage_without_kv_is_encoded_when_idle(empty):
    text = passage(77)
    empty.engine.enter([text], ["p77"])
    texts = [text, *TEXTS[:3]]
    [output] = empty.ask([empty.ids(texts)])
    assert output.kv_transfer_params["ragblend"]["missing_tokens"] > 0
    idle(empty)
    runtime = empty.engine.runtime
    ids = tuple(runtime.tokenizing.passage_ids(text))
    found = runtime.store.get(runtime.key_of(runtime.canonical_prefix, ids, "default"), ids)
    assert found is not None
    empty.llm.reset_prefix_cache()
    order = texts[::-1]
    [output] = empty.ask([empty.ids(order)])
    assert output.kv_transfer_params["ragblend"]["missing_tokens"] == 0
    assert is_as_engine(empty, output, order)


def idle(server, steps: int = 5) -> None:
    """As the server's own loop does while `has_pending_push_work`."""
    for _ in range(steps):
        server.llm.llm_engine.engine_core.engine_core.step_fn()


@pytest.mark.parametrize("while_it_waits", [False, True])
def test_kv_that_vllm_encoded_goes_with_its_passage(empty, while_it_waits):
    text, name = passage(80 + while_it_waits), f"p{80 + while_it_waits}"
    runtime = empty.engine.runtime
    ids = tuple(runtime.tokenizing.passage_ids(text))
    key = runtime.key_of(runtime.canonical_prefix, ids, "default")
    empty.engine.enter([text], [name])
    empty.ask([empty.ids([text, *TEXTS[:3]])])
    if while_it_waits:
        empty.engine.forget([name])
        idle(empty)
    else:
        idle(empty)
        assert runtime.store.contains(key)
        assert empty.engine.forget([name]) > 0
    assert not runtime.store.contains(key)


def spans_of(server, texts) -> tuple[list[int], list[list[int]]]:
    """A prompt, and where its passages are, as a client that knows them says it."""
    prompt = server.engine.tokenize(server.engine.chat_prompt(None, [Chunk(t) for t in texts], QUESTION))
    return list(prompt.token_ids), [list(place) for place in prompt.places]


def test_what_a_client_names_goes_with_its_passage_and_is_no_passage_of_its_own(empty):
    """Named passages were encoded under no node, so deleting them left their KV; and so was any text of a client."""
    known, unknown, runtime = passage(90), passage(91), empty.engine.runtime
    keys = [
        runtime.key_of(runtime.canonical_prefix, tuple(runtime.tokenizing.passage_ids(text)), "default")
        for text in (known, unknown)
    ]
    empty.engine.enter([known], ["p90"])
    ids, spans = spans_of(empty, [known, unknown, *TEXTS[:3]])
    empty.ask([ids], [{"spans": spans}])
    idle(empty)
    assert [runtime.store.contains(key) for key in keys] == [True, False]
    assert empty.engine.forget(["p90"]) > 0 and not runtime.store.contains(keys[0])
    empty.llm.reset_prefix_cache()
    empty.ask([ids], [{"spans": spans, "encode": True}])  # asked for
    assert [runtime.store.contains(key) for key in keys] == [True, True]


def test_nothing_is_encoded_while_vllm_is_paused(empty):
    """Perhaps it is given other weights: their KV would be stored as these weights'."""
    from vllm.v1.core.sched.interface import PauseState

    core, runtime, text = empty.llm.llm_engine.engine_core.engine_core, empty.engine.runtime, passage(92)
    key = runtime.key_of(runtime.canonical_prefix, tuple(runtime.tokenizing.passage_ids(text)), "default")
    empty.engine.enter([text], ["p92"])
    empty.ask([empty.ids([text, *TEXTS[:3]])])
    for state in PauseState.PAUSED_NEW, PauseState.PAUSED_ALL:
        core.scheduler.set_pause_state(state)
        idle(empty)
        assert not runtime.store.contains(key) and not core.scheduler.has_requests()
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert core.scheduler.has_requests()
    idle(empty)
    assert runtime.store.contains(key)


def test_blocks_that_were_not_filled_serve_nobody_though_their_request_is_gone(empty, monkeypatch):
    """vLLM looks for failed blocks among the requests that still run."""
    from vllm import SamplingParams

    from ragblend.integrations.vllm import worker

    core = empty.llm.llm_engine.engine_core.engine_core
    order, question = [TEXTS[n] for n in (4, 1, 0, 3)], "What was lost?"
    ids = empty.ids(order, question)

    def breaks(*args):
        core.aborts_queue.put_nowait([each.request_id for each in core.scheduler.running])
        raise MemoryError("no room")

    monkeypatch.setattr(worker, "prefill", breaks)
    empty.llm.llm_engine.add_request("gone", {"prompt_token_ids": ids}, SamplingParams(max_tokens=5))
    idle(empty)
    monkeypatch.undo()
    empty.llm.llm_engine.abort_request(["gone"], internal=False)
    empty.llm.llm_engine.step()
    [later] = empty.ask([ids])
    assert later.kv_transfer_params is not None and is_as_engine(empty, later, order, question)


def test_who_asks_the_same_does_not_wait_for_blocks_that_a_failed_request_is_to_compute(empty, monkeypatch):
    """It has them taken back and computes them again, step by step: and may be aborted before it has."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from ragblend.integrations.vllm import worker

    llm = empty.llm.llm_engine
    core, ids = llm.engine_core.engine_core, empty.ids([TEXTS[n] for n in (2, 0, 4, 1)])
    [own] = empty.ask([ids], [{"off": True}])
    empty.llm.reset_prefix_cache()

    def breaks(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(worker, "prefill", breaks)
    monkeypatch.setattr(get_kv_transfer_group()._worker, "_longest", len(ids) // 2)
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=-1, ignore_eos=True)
    for name in ("gone", "stays"):
        llm.add_request(name, {"prompt_token_ids": ids}, sampling)
    llm.step()
    begun = len(core.scheduler.running)
    llm.abort_request(["gone"], internal=False)
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    [answered] = [each for each in outputs if each.request_id == "stays" and each.finished]
    assert same(answered, own)
    assert begun == 1, "the other one waited"


def test_a_second_turn_that_is_fused_serves_no_other_second_turn(empty):
    first = empty.ids(TEXTS[:2])
    second, other = (
        [*first, *empty.ids([TEXTS[n] for n in (5, 3, 2, 4)], question)]
        for question in ("Who never came back when the mole broke?", QUESTION)
    )
    empty.ask([first])
    [alone] = empty.ask([other])
    empty.llm.reset_prefix_cache()
    for ids in (first, second):
        assert empty.ask([ids])[0].kv_transfer_params is not None
    [after] = empty.ask([other])
    assert after.kv_transfer_params is not None and same(after, alone)


def test_an_aborted_request_leaves_nothing(empty):
    from vllm import SamplingParams

    core = empty.llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    ids = empty.ids(TEXTS[:4])
    core.add_request("gone", {"prompt_token_ids": ids}, SamplingParams(max_tokens=50, ignore_eos=True))
    core.step()
    core.abort_request(["gone"], internal=False)
    while core.has_unfinished_requests():
        core.step()
    core.step()
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert not scheduler.connector._scheduler._plans
    [output] = empty.ask([ids])
    assert is_as_engine(empty, output, TEXTS[:4])
