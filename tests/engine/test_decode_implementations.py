"""Decode implementations give the same answers, and a faster one is chosen only if it is proven."""

import copy
import gc
import resource
import threading
import time
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
from benches import largest_error, make_prompt, make_text
from tiny_models import SUPPORTED, TOOLS_TEMPLATE
from waiting import SOON_S

from ragblend import Literal, Prompt
from ragblend.engine.decoding import cuda_graph, implementations
from ragblend.engine.decoding.cuda_graph import CudaGraphDecode
from ragblend.engine.decoding.direct import DirectDecode
from ragblend.engine.decoding.eightbit import EightBit, eight_bit
from ragblend.engine.decoding.fourbit import FourBit, four_bit
from ragblend.engine.decoding.grammar import Grammar, json_grammar
from ragblend.engine.decoding.implementations import (
    DecodeComparison,
    DecodeSelector,
    TransformersDecode,
    compare_implementations,
)
from ragblend.engine.decoding.packed_weights import pack_weights
from ragblend.engine.decoding.prompt_lookup import PromptLookup
from ragblend.engine.model.load import was_quantized
from ragblend.engine.prompts.session import Session
from ragblend.engine.prompts.tools import call_format, tools_grammar
from ragblend.kvstore.errors import Cancelled

TEXTS = [make_text(seed) for seed in range(3)]
KNOWN = ("llama", "llama-llama3", "llama-linear", "llama-yarn", "qwen2", "qwen3")
ANSWER = [9, 30, 77, 200, 41, 5, 6, 8]
NEVER = partial(bool, 0)


@pytest.fixture
def fresh(fresh_bench_for, tmp_path):
    """A llama on a home in which nothing was compared yet."""
    return fresh_bench_for(home=tmp_path / "home")


@pytest.fixture
def prefilled_for(stored_for):
    """A prompt that was read, and the decoder that read it."""

    def prefilled(kind):
        engine = stored_for(kind).engine
        found = engine.prefill(make_prompt(TEXTS), "full")
        found.cache.truncate()
        return found, engine.runtime.decoder

    return prefilled


@pytest.fixture
def new_memory_is_nan():
    """What was allocated and not written yet counts for nothing."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def verdicts(monkeypatch):
    """What the next measurements say, in their order."""
    found = []

    def measure(decoder, rows, token_ids, cancelled):
        if cancelled():
            raise Cancelled("told to cancelled")
        return found.pop(0)

    monkeypatch.setattr(implementations, "compare_implementations", measure)
    return found


FASTER, SLOWER = DecodeComparison(0.0, (0.5,) * 5), DecodeComparison(0.0, (1.5,) * 5)
UNCLEAR = DecodeComparison(0.0, (0.5, 0.6, 0.7, 1.1, 2.0))


@pytest.mark.parametrize("kind", [*SUPPORTED, "ministral3"])
def test_which_models_direct_decode_supports(prefilled_for, kind):
    """Ministral 3 has all of Llama's parts, and queries that grow beyond the positions that are measured."""
    assert DirectDecode.supports(prefilled_for(kind)[1]) == (kind in KNOWN)


@pytest.mark.parametrize("loop", [DirectDecode, CudaGraphDecode])
@pytest.mark.parametrize("kind", KNOWN)
def test_direct_decode_gives_the_models_logits_and_cache(new_memory_is_nan, prefilled_for, kind, loop):
    """One by one, several at once, and beyond the room of the buffers, twice."""
    told, caches = [], []
    for steps_of in (lambda decoder: TransformersDecode(decoder.model), lambda decoder: loop(decoder, {})):
        prefilled, decoder = prefilled_for(kind)
        steps = steps_of(decoder)
        logits = [steps.run(prefilled.cache, [token]) for token in ANSWER]
        logits += [steps.run(prefilled.cache, ANSWER * 60), steps.run(prefilled.cache, [7])]
        told.append(torch.cat(logits))
        assert prefilled.cache.get_seq_length() == prefilled.cache.prompt_tokens + 61 * len(ANSWER) + 1
        caches.append([part.clone() for held in prefilled.cache.fused for part in (held.keys, held.values)])
    assert largest_error(told[1], told[0]) < 1e-4
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*caches, strict=True))


def test_graphs_are_recorded_once_per_answer_and_number_of_rows(prefilled_for, monkeypatch):
    """And again where its buffers are others; what the recordings hold goes with the answer."""
    made = []
    monkeypatch.setattr(cuda_graph, "record_calls", lambda device, work: made.append(device) or work)
    (one, decoder), (other, _) = prefilled_for("llama"), prefilled_for("llama")
    rows, expected = CudaGraphDecode(decoder, {}), DirectDecode(decoder, {})
    for token in ANSWER * 3:
        for prefilled in (one, other):
            rows.run(prefilled.cache, [token])
    assert len(made) == 2, "two answers in turns"
    rows.run(one.cache, [1] * (1 + rows.guessed_tokens))
    rows.run(one.cache, [1, 2])  # rare: computed as it is
    rows.run_together([(one.cache, [3]), (other.cache, [3])])
    assert len(made) == 3
    for held in one.cache.fused:
        held.ensure_room(2 * held.key_buffer.shape[2])
    found = rows.run(one.cache, [4])
    assert len(made) == 4
    one.cache.truncate(one.cache.get_seq_length() - one.cache.prompt_tokens - 1)
    assert torch.allclose(found, expected.run(one.cache, [4]), atol=1e-5)
    gone = weakref.ref(one.cache)
    del one, prefilled
    gc.collect()
    assert gone() is None and len(rows._recordings) == 1
    kept = [prefilled_for("llama")[0] for _ in range(cuda_graph.MAX_BEGUN + 2)]  # as sessions keep theirs
    for prefilled in kept:
        rows.run(prefilled.cache, [5])
    assert len(rows._recordings) == cuda_graph.MAX_BEGUN


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_rows_are_computed_directly_if_recording_fails(prefilled_for, monkeypatch, caplog, error):
    """A failure in the middle has left some layers a row longer than others. Want of memory is of one moment."""
    (mine, decoder), (own, _) = prefilled_for("llama"), prefilled_for("llama")
    rows, expected, tried = CudaGraphDecode(decoder, {}), DirectDecode(decoder, {}), []

    def fails(device, work):
        tried.append(1)
        mine.cache.fused[0].set_length(mine.cache.get_seq_length() + 1)
        raise error("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graph, "record_calls", fails)
    for token in ANSWER:
        assert torch.equal(rows.run(mine.cache, [token]), expected.run(own.cache, [token]))
    said = "are computed call by call" in caplog.text
    assert (len(tried), said) == ((len(ANSWER), False) if error is torch.OutOfMemoryError else (1, True))


def test_unwritten_buffer_rows_are_zeros(new_memory_is_nan, prefilled_for):
    """A pass that fails before it writes leaves it to the next one, whose products are over all of a buffer."""
    prefilled, _ = prefilled_for("llama")
    for held in prefilled.cache.fused:
        held.ensure_room(2 * held.key_buffer.shape[2])
        stop = held.keys.shape[2]
        assert not held.key_buffer[:, :, stop:].any() and not held.value_buffer[:, :, stop:].any()
        assert held.keys.isfinite().all()


def test_a_diverging_implementation_is_rejected(prefilled_for):
    prefilled, decoder = prefilled_for("llama")
    ids = prefilled.prompt.token_ids
    rows = DirectDecode(decoder, {})
    assert compare_implementations(decoder, rows, ids).divergence < 1e-6
    for part in rows.layers:
        object.__setattr__(part, "scaling", part.scaling * 1.5)
    verdict = compare_implementations(decoder, rows, ids)
    assert verdict.divergence > 0.01 and verdict.is_settled and not verdict.accepts


NAN = float("nan")


@pytest.mark.parametrize(
    ("comparison", "is_settled", "accepts"),
    [
        (FASTER, True, True),
        (SLOWER, True, False),
        (UNCLEAR, False, False),
        (DecodeComparison(0.0, (0.5,) * 4 + (3.0,)), True, True),  # other load took one turn
        (DecodeComparison(0.0, (0.9, 0.9, 0.9, 1.1, 1.1) * 5), True, True),  # it never gets clearer
        (DecodeComparison(NAN, (0.5,) * 5), True, False),
        (DecodeComparison(0.02, (0.5,) * 5), True, False),
    ],
)
def test_a_candidate_is_accepted_only_if_equal_and_clearly_faster(comparison, is_settled, accepts):
    assert (comparison.is_settled, comparison.accepts) == (is_settled, accepts)


# --- which implementation is chosen, and when


@pytest.fixture
def choice_for(prefilled_for, with_levels, tmp_path):
    """choice_for(): what a process that begins finds; its files are those of the others."""
    prefilled, decoder = prefilled_for("llama")
    with_levels(decoder)

    def begun():
        choice = DecodeSelector(decoder, tmp_path / "models", "f" * 64, allows_rounding=True)
        choice.is_direct = lambda: isinstance(choice.current, DirectDecode)
        choice.measured = partial(choice.measure, prefilled.prompt.token_ids, NEVER)
        return choice

    return begun


def files(tmp_path):
    return {path.suffix: path for path in (tmp_path / "models").iterdir()}


@pytest.mark.parametrize(
    ("processes", "needs_measurement", "is_direct", "suffixes"),
    [
        ([[FASTER]], False, True, {".json", ".safetensors"}),
        ([[SLOWER]], False, False, {".json"}),
        ([[UNCLEAR, UNCLEAR]], True, False, {".json"}),
        ([[UNCLEAR, UNCLEAR], [FASTER]], True, False, {".json"}),
        ([[UNCLEAR, UNCLEAR], [FASTER, FASTER]], False, True, {".json", ".safetensors"}),
    ],
    ids=["faster", "slower", "unclear", "still unclear", "clear together"],
)
def test_comparisons_add_up_and_are_saved(
    choice_for, tmp_path, verdicts, processes, needs_measurement, is_direct, suffixes
):
    """processes: the comparisons that each of several processes makes."""
    for comparisons in processes:
        choice = choice_for()
        assert choice.needs_measurement and not choice.is_direct()
        for comparison in comparisons:
            verdicts.append(comparison)
            choice.measured()
    for found in (choice, choice_for()):
        assert (found.needs_measurement, found.is_direct()) == (needs_measurement, is_direct)
    assert set(files(tmp_path)) == suffixes
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path).values())


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "of another", "no verdict"])
def test_damaged_packed_weights_are_rebuilt(choice_for, tmp_path, verdicts, damage):
    verdicts += [FASTER] * 2
    choice_for().measured()
    weights, verdict = files(tmp_path)[".safetensors"], files(tmp_path)[".json"]
    sound = weights.read_bytes()
    assert len(sound) > 10_000
    if damage == "no verdict":  # killed between the two
        verdict.write_text("{")
    else:
        at = len(sound) // 2
        flipped = sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :]
        weights.write_bytes({"cut": sound[:-100], "flipped": flipped, "empty": b""}.get(damage, sound[:8]))
    weights.with_suffix(".part").write_bytes(b"of somebody who was killed while he wrote")
    choice = choice_for()
    assert choice.needs_measurement and not choice.is_direct()
    choice.measured()
    assert choice.is_direct() and choice_for().is_direct()
    assert weights.read_bytes() == sound and set(files(tmp_path)) == {".json", ".safetensors"}


def test_on_a_full_disk_only_the_file_is_lost(choice_for, tmp_path, verdicts):
    """The process that measured has its loop; the next one begins with the model's own."""
    verdicts += [FASTER]
    choice, limits = choice_for(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        choice.measured()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert choice.is_direct()
    assert choice_for().needs_measurement and not choice_for().is_direct()
    assert not files(tmp_path)


def test_packed_weights_beyond_memory_stay_on_disk(choice_for, tmp_path, verdicts, monkeypatch):
    """That process has its loop by the model's own weights; with memory again they are read again."""
    verdicts += [FASTER] * 2
    choice_for().measured()
    kept = {name: path.read_bytes() for name, path in files(tmp_path).items()}
    with monkeypatch.context() as patched:
        patched.setattr("ragblend.engine.decoding.packed_weights.available_bytes", lambda: 1000)
        choice = choice_for()
        assert choice.needs_measurement and not choice.is_direct()
        choice.measured()
        assert choice.is_direct() and not choice.needs_measurement
    assert {name: path.read_bytes() for name, path in files(tmp_path).items()} == kept
    assert choice_for().is_direct() and not choice_for().needs_measurement


def test_implementations_are_compared_after_the_answer(engine, verdicts):
    """And not while it lasts, nor for every answer."""
    verdicts += [FASTER]
    choice = engine.runtime.decode_selector if engine.gate.passed else None
    pieces = iter(engine.stream(make_prompt(TEXTS), "full", max_new_tokens=20))
    next(pieces)
    assert isinstance(choice.current, TransformersDecode)
    first = "".join(pieces)
    assert engine.finish_background(SOON_S)
    assert isinstance(choice.current, DirectDecode) and not verdicts
    engine.generate(make_prompt(TEXTS), "full", max_new_tokens=4)
    assert engine.finish_background(SOON_S)
    assert "".join(engine.stream(make_prompt(TEXTS), "full", max_new_tokens=20)).endswith(first)


def test_measuring_yields_to_requests_and_restarts(engine, monkeypatch):
    """To a question, and for good to whoever closes the model."""
    begun, let_go, times = threading.Event(), threading.Event(), []

    def measure(decoder, rows, token_ids, cancelled):
        times.append(1)
        begun.set()
        while not cancelled():
            if let_go.wait(0.01):
                return FASTER
        raise Cancelled("somebody came")

    monkeypatch.setattr(implementations, "compare_implementations", measure)
    answer = partial(engine.generate, make_prompt(TEXTS), "full", max_new_tokens=4)
    first = answer()
    assert begun.wait(SOON_S)
    assert answer().token_ids == first.token_ids, "it waits for no measurement"
    begun.clear()
    assert begun.wait(SOON_S)
    engine.close()  # nor does this
    assert len(times) == 2 and answer().token_ids == first.token_ids
    let_go.set()
    assert engine.finish_background(SOON_S)
    assert isinstance(engine.runtime.decode_selector.current, DirectDecode)


def test_a_program_that_asks_without_a_pause_is_measured_too(engine, monkeypatch):
    """Each question would interrupt the measurement, and the fast loop never be used."""
    given_up = []

    def measure(decoder, rows, token_ids, cancelled):
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            if cancelled():
                given_up.append(1)
                raise Cancelled("somebody came")
            time.sleep(0.001)
        return FASTER

    monkeypatch.setattr(implementations, "compare_implementations", measure)
    monkeypatch.setattr("ragblend.engine.scheduling.queue.PAUSE_S", 0.0)
    stops_at = time.monotonic() + SOON_S
    while time.monotonic() < stops_at:
        engine.generate(make_prompt(TEXTS), "full", max_new_tokens=4)
        if isinstance(engine.runtime.decode_selector.current, DirectDecode):
            break
    assert isinstance(engine.runtime.decode_selector.current, DirectDecode)
    assert len(given_up) <= 3


def test_a_measurement_that_never_ends_holds_requests_twice_at_most(engine, monkeypatch):
    insisted, queue = [], engine.runtime.queue

    def measure(decoder, rows, token_ids, cancelled):
        insisted.append(False)
        while True:
            is_wanted = queue.has_waiting
            if cancelled():
                raise Cancelled("somebody came")
            insisted[-1] = insisted[-1] or is_wanted
            time.sleep(0.001)

    monkeypatch.setattr(implementations, "compare_implementations", measure)
    monkeypatch.setattr("ragblend.engine.scheduling.queue.PAUSE_S", 0.0)
    monkeypatch.setattr("ragblend.engine.runtime.BLOCKING_S", 1.0)
    stops_at = time.monotonic() + SOON_S
    while len(insisted) < 9 and time.monotonic() < stops_at:
        engine.generate(make_prompt(TEXTS), "full", max_new_tokens=4)
    assert len(insisted) >= 9 and 1 <= sum(insisted) <= 2


def test_a_failed_comparison_is_not_repeated_after_every_answer(engine, monkeypatch, caplog):
    monkeypatch.setattr(implementations, "compare_implementations", lambda *given: 1 / 0)
    for _ in range(2):
        engine.generate(make_prompt(TEXTS), "full", max_new_tokens=4)
        assert engine.finish_background(SOON_S)
    assert sum("a background task failed" in record.message for record in caplog.records) == 1


# --- an answer is the same with both implementations


@pytest.fixture
def both(stored, monkeypatch):
    """both(answer): what answer(engine) returns with each of the two."""
    runtime = stored.engine.runtime
    ways = TransformersDecode(runtime.loaded.model), DirectDecode(runtime.decoder, {})

    def answers(answer):
        found = []
        for steps in ways:
            monkeypatch.setattr(runtime.decode_selector, "current", steps)
            found.append(answer(stored.engine))
        return found

    return answers


SAMPLED = {"temperature": 1.2, "seed": 3, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2, "min_p": 0.01}
PENALIZED = {"presence_penalty": 0.4, "frequency_penalty": 1.5, "logit_bias": {300: 3.0, 20: -100}}
REPEATED = Grammar("start: /(the harbour master kept two ledgers; )*/", is_closed=False)
SCHEMA = json_grammar({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
PROMPT = make_prompt(TEXTS)


def said(**options):
    """The tokens of an answer by these options, of which there are more than three."""

    def answer(engine):
        found = engine.generate(PROMPT, **{"max_new_tokens": 30, "method": "full"} | options).token_ids
        assert len(found) > 3
        return found

    return answer


def called(is_forced):
    """The tokens of an answer that may call a tool, or must."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": parameters}}]

    def answer(engine):
        tokenizer = copy.deepcopy(engine.tokenizer)
        tokenizer.chat_template = TOOLS_TEMPLATE
        grammar = tools_grammar(call_format(tokenizer, "tiny"), tools, is_forced=is_forced, is_parallel=True)
        found = engine.generate(PROMPT, max_new_tokens=60, grammar=grammar)
        assert found.text.startswith("<tool_call>") == is_forced
        return found.token_ids

    return answer


def streamed(engine):
    whole = engine.generate(PROMPT, max_new_tokens=40).text
    stop = whole[len(whole) // 2 :][:3]
    pieces = list(engine.stream(PROMPT, max_new_tokens=40, stop=[stop]))
    assert "".join(pieces) == whole[: whole.index(stop)] and len(pieces) > 3
    return pieces


def continued(engine):
    session = Session()
    first = engine.stream(PROMPT, session=session, max_new_tokens=9).result
    more = Prompt([*first.prompt.segments, Literal("", first.token_ids[:-1]), Literal("And then?")])
    second = engine.stream(more, session=session, max_new_tokens=9).result
    assert second.report.tokens.reused > 100
    return first.token_ids, second.token_ids, second.report.tokens, session.tokens


def cancelled(engine):
    event, pieces = threading.Event(), []

    def heard(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            event.set()

    with pytest.raises(Cancelled) as raised:
        engine.generate(PROMPT, max_new_tokens=200, on_text=heard, cancel=event)
    return pieces, str(raised.value)


ANSWERS = {
    "sampled": said(**SAMPLED),
    "penalized": said(**PENALIZED),
    "evicted": said(keep_tokens=20),
    "by a schema": said(grammar=SCHEMA),
    "by a schema, sampled and penalized": said(grammar=SCHEMA, **SAMPLED, **PENALIZED),
    "fused": said(method="probe-shift", ratio=0.3),
    "long": said(max_new_tokens=300),
    "with a tool": called(is_forced=False),
    "by a tool": called(is_forced=True),
    "streamed": streamed,
    "continued": continued,
    "cancelled": cancelled,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_both_implementations_answer_the_same(both, answer):
    one, other = both(answer)
    assert one == other


def test_both_implementations_answer_as_transformers(both, stored):
    assert both(said()) == [tuple(stored.answer(PROMPT, 30))] * 2


def test_both_implementations_report_the_same_logprobs(both):
    told = both(lambda engine: engine.generate(PROMPT, max_new_tokens=9, logprobs=3, **SAMPLED))
    for one, other in zip(*(result.logprobs for result in told), strict=True):
        assert one.token_id == other.token_id
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert [each[0] for each in other.most_likely] == [each[0] for each in one.most_likely]


def test_quoting_the_prompt_takes_fewer_passes(stored, monkeypatch):
    """A random model repeats itself: with guesses it says the same, and what it goes on from is the same."""
    engine, passes = stored.engine, []
    rows, prompt = DirectDecode(engine.runtime.decoder, {}), make_prompt(TEXTS)
    assert engine.runtime.token_grammars  # which want to know how answers end
    monkeypatch.setattr(engine.runtime.decode_selector, "current", rows)
    monkeypatch.setattr(engine.runtime, "end_ids", [])
    read = rows.run_together
    monkeypatch.setattr(rows, "run_together", lambda reads: passes.append(len(reads[0][1])) or read(reads))
    told, held = [], []
    for count in (0, 3):
        monkeypatch.setattr(DirectDecode, "guessed_tokens", count)
        session, options = Session(), {"grammar": REPEATED, "max_new_tokens": 101}
        told.append(engine.stream(prompt, session=session, **options).result.token_ids)
        held.append((session.tokens, len(passes)))
    assert told[0] == told[1] and len(told[0]) == 101
    assert held[0] == (len(engine.tokenize(prompt).token_ids) + 100, 100)
    assert held[1][0] == held[0][0] and held[1][1] - 100 < 50
    assert set(passes) <= {1, 2, 3, 4}


def test_guessing_stops_when_guesses_are_wrong():
    lookup = PromptLookup(3, [1, 2, 3, 4, 5, 6, 1, 2])
    assert lookup.propose() == [3, 4, 5]
    lookup.add(3)
    assert lookup.propose() == [4, 5, 6]
    for _ in range(8):
        lookup.record_accepted(0)
        assert lookup.propose()
    lookup.record_accepted(0)
    assert not lookup.propose()
    assert not PromptLookup(0, [1, 2, 3, 1, 2]).propose() and not PromptLookup(3, [1, 2, 3, 4]).propose()
    assert not PromptLookup(3, [1, 2, 3, 1, 2, 9]).propose()


# --- packed weights


def on_levels(rows, columns, dtype, seed=0):
    """Weights of sixteen levels a group; some groups use fewer, some one."""
    draw = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (rows, columns // 32, 32), generator=draw)
    levels[::3] = levels[::3].clamp(2, 9)
    levels[5, 0] = 4
    scale, lowest = (torch.randn(rows, columns // 32, 1, generator=draw) * 0.1 for _ in range(2))
    return (levels * scale.abs() + lowest).view(rows, columns).to(dtype)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pack", "make", "nbytes"),
    [
        (four_bit, lambda: on_levels(128, 96, torch.float32), 128 * 96 // 2),
        (eight_bit, lambda: normal(48, 96).index_fill(0, torch.tensor([5]), 0), 48 * 96),
    ],
    ids=["four bits", "eight bits"],
)
def test_packed_weights_multiply_like_the_original(pack, make, nbytes, dtype):
    weight, rows = make().to(dtype), normal(3, 96).to(dtype)
    packed = pack(weight)
    assert packed is not None and packed.levels.nbytes == nbytes
    expected = rows.float() @ weight.float().T
    assert largest_error(packed(rows), expected) < 0.03
    both = type(packed).concatenated([packed, packed])
    assert torch.equal(both(rows), torch.cat([packed(rows)] * 2, 1))


ONE_OFF = on_levels(128, 96, torch.float32).index_fill(0, torch.tensor([127]), 1)


@pytest.mark.parametrize(
    ("pack", "weight"),
    [
        (four_bit, normal(128, 96)),
        (four_bit, ONE_OFF.addcmul_(torch.eye(128, 96), torch.full((), 0.02))),
        (four_bit, on_levels(120, 96, torch.float32)),
        (four_bit, on_levels(128, 96, torch.float32)[:, :80]),
        (eight_bit, normal(40, 96)),
        (eight_bit, normal(48, 80)),
        (eight_bit, normal(48, 96).index_fill(1, torch.tensor([7]), 30)),
    ],
    ids=[
        "random",
        "one row a little off",
        "rows of no whole block",
        "columns of no whole group",
        "rows beyond which the kernel reads",  # it crashed at 20 rows of 33
        "columns beyond which the kernel reads",
        "a large weight in each row, beside which others become zero",
    ],
)
def test_unsuitable_weights_are_not_packed(pack, weight):
    assert pack(weight) is None


@pytest.fixture
def with_levels(monkeypatch):
    """with_levels(decoder): most of its weights lie on levels until the test ends."""

    def with_levels(decoder):
        for seed, layer in enumerate(decoder.layers):
            mlp = layer.mlp
            for linear in (layer.self_attn.q_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
                weight = on_levels(*linear.weight.shape, torch.float32, seed) * 0.3
                monkeypatch.setitem(linear._parameters, "weight", weight)
        return decoder

    return with_levels


def test_models_of_four_bit_weights_are_decoded_with_packed_weights(prefilled_for, with_levels):
    """Within what rounding to bfloat16 does; and the weights that are no four-bit ones become eight-bit ones."""
    prefilled, decoder = prefilled_for("qwen2")
    packed, seen = {}, []
    with pytest.raises(Cancelled):
        pack_weights(with_levels(decoder), packed, True, lambda: len(packed) == 5)
    pack_weights(decoder, packed, True, lambda: bool(seen.append(len(packed))))
    assert len(packed) == 7 * len(decoder.layers) + 1
    assert set(seen) == set(range(5, len(packed))), "what was looked at once is not again"
    kinds = {name.rpartition(".")[2]: type(each) for name, each in packed.items()}
    fours = dict.fromkeys(("q_proj", "gate_proj", "up_proj", "down_proj"), FourBit)
    assert kinds == fours | dict.fromkeys(("k_proj", "v_proj", "o_proj", "head"), EightBit)
    kernel = mock.Mock(wraps=torch._weight_int8pack_mm)
    with mock.patch.object(torch, "_weight_int8pack_mm", kernel):
        DirectDecode(decoder, packed).run(prefilled.cache, [1, 2])
    prefilled.cache.truncate()
    rows, levels, _ = kernel.call_args.args
    assert rows.dtype == torch.bfloat16, "in float32 it is ten times slower"
    assert torch.equal(levels, packed["head"].levels) and kernel.call_count == 3 * len(decoder.layers) + 1
    rows = DirectDecode(decoder, packed)
    assert 0 < compare_implementations(decoder, rows, prefilled.prompt.token_ids).divergence < 0.05


@pytest.mark.parametrize("pack", [four_bit, eight_bit])
def test_packing_a_large_weight_can_be_cancelled(pack, monkeypatch):
    """An output layer takes seconds: a question that comes meanwhile does not wait for them."""
    monkeypatch.setattr("ragblend.engine.decoding.fourbit.BLOCK_WEIGHTS", 64 * 64)
    monkeypatch.setattr("ragblend.engine.decoding.eightbit.BLOCK_ROWS", 64)
    weight, asked = torch.randint(0, 16, (256, 64)).float(), []

    def go_on():
        asked.append(1)
        if len(asked) == 3:
            raise Cancelled("somebody came")

    with pytest.raises(Cancelled):
        pack(weight, go_on)
    assert pack(weight, go_on) is not None and len(asked) == 3 + 4


def test_weights_are_rounded_only_if_allowed(prefilled_for, with_levels):
    """A greedy answer of a float32 checkpoint would not be that of its own `generate`."""
    _, decoder = prefilled_for("llama")
    packed = {}
    pack_weights(decoder, packed, allows_rounding=False)
    assert packed and not any(packed.values())
    pack_weights(with_levels(decoder), again := {}, allows_rounding=False)
    assert any(isinstance(each, FourBit) for each in again.values())


def test_small_files_count_as_quantized(model_folder, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1_000))
    assert was_quantized(str(file), 1_000) and was_quantized(str(file), 800)
    assert not was_quantized(str(file), 500), "sixteen bits a weight"
    assert not was_quantized(str(model_folder("llama")), 10**9)
