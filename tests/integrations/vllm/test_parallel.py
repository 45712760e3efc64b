"""Two workers that share a model (tensor parallelism) answer as the built-in engine does."""

import concurrent.futures
import itertools

import pytest
import tiny_models
from vllm_helpers import SHAPE, STORED, asked, flip_byte, kv_files, listening_on, passage, post, until

from ragblend.engine.engine import Engine


@pytest.fixture(scope="module", params=[2, 1], ids=["a key head each", "one key head for both"])
def engines(request, has_vllm, tmp_path_factory):
    """The engine whose model is in two workers of vLLM, and the built-in one, on one home."""
    base = tmp_path_factory.mktemp("parallel")
    shape = SHAPE | {"num_key_value_heads": request.param}
    folder = tiny_models.save_model("qwen3", base / "model", is_endless=True, **shape)
    where = {"model": str(folder), "home": base / "home"}
    ours = Engine.open(**where, device="cpu", dtype="float32")
    ours.encode(STORED, [f"p{n}" for n in range(len(STORED))])
    named = ("--block-size", "32", "--tensor-parallel-size", "2")
    with listening_on(folder, base / "home", "float32", *named, minimum_tokens=32) as made:
        theirs = Engine.open(**where, backend="vllm", url=made.url)
        yield theirs, ours
        theirs.close()
    ours.close()


@pytest.mark.parametrize(
    "how", [{}, {"method": "cacheblend", "ratio": 0.2}, {"method": "recompute"}, {"method": "reuse"}], ids=str
)
def test_two_workers_fuse_as_one_engine(engines, how):
    prompt = asked(engines[0], [STORED[n] for n in (3, 0, 4, 1)], f"What of {how}?")
    found, expected = (each.generate(prompt, max_new_tokens=12, logprobs=3, **how) for each in engines)
    assert found.token_ids == expected.token_ids
    assert found.report.tokens == expected.report.tokens and found.report.served == expected.report.served
    assert found.report.tokens.reused > 100 or how == {"method": "recompute"}
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_two_workers_encode_as_one_engine(engines):
    theirs, ours = engines
    new = passage(80)
    assert theirs.encode([new], ["n80"]).encoded == 1 and ours.encode([new]).encoded == 0
    prompt = asked(ours, [new, STORED[2]])
    stored = ours.generate(prompt, "reuse", max_new_tokens=12).token_ids
    assert theirs.forget(["n80"]) > 0
    ours.encode([new], ["n80"])
    assert ours.generate(prompt, "reuse", max_new_tokens=12).token_ids == stored


def test_two_workers_encode_missing_passages_in_idle_steps(engines):
    theirs, ours = engines
    theirs.enter([new := passage(81)], ["n81"])

    def missing(question):
        ids = ours.tokenize(asked(ours, [new, *STORED[1:4]], question)).token_ids
        body = {"model": theirs.runtime.config.model, "prompt": list(ids), "max_tokens": 4}
        answer = post(f"{theirs.runtime.server.url}/v1/completions", body)
        return answer["kv_transfer_params"]["ragblend"]["missing_tokens"]

    assert missing("Who?") > 50
    numbers = itertools.count()
    until(lambda: not missing(f"Was it {next(numbers)}?"))


def test_damaged_passages_are_computed_by_both_workers(engines):
    theirs, ours = engines
    texts = [passage(number) for number in (90, 91, 92)]
    before = set(kv_files(ours.home))
    ours.encode(texts, ["n90", "n91", "n92"])
    prompt = asked(ours, [*texts, STORED[0]])
    for blob in set(kv_files(ours.home)) - before:
        flip_byte(blob)
    result = theirs.generate(prompt, "reuse", max_new_tokens=12)
    assert result.report.tokens.missing > 100 and result.report.tokens.reused > 50
    again = ours.generate(prompt, "reuse", max_new_tokens=12)
    assert result.token_ids == again.token_ids and again.report.tokens == result.report.tokens


def test_simultaneous_requests_are_right_when_half_of_them_are_aborted(engines):
    theirs, ours = engines
    prompts = [asked(theirs, [STORED[n % 5], STORED[(n + 2) % 5]], f"What of {n}?") for n in range(12)]
    # What is read again leaves exact blocks, which other prompts reuse then.
    options = {"method": "probe-shift:sure=0", "max_new_tokens": 8}
    expected = [ours.generate(each, **options).token_ids for each in prompts]

    def ask(number):
        if number % 2:
            stream = theirs.stream(prompts[number], max_new_tokens=400)
            next(iter(stream))
            stream.close()
            return None
        return theirs.generate(prompts[number], **options).token_ids

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, range(len(prompts))))
    assert found[::2] == expected[::2]
