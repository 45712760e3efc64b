"""KV in the background: named without the model, encoded behind every question, and none of what was deleted."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from benches import make_prompt, make_text, watch_lock
from doubles import raising, watch
from gguf.gguf_reader import GGUFReader
from waiting import SOON_S, started, until

from ragblend import Chunk, Engine, Literal, Prompt
from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.model.checkpoints import find_model
from ragblend.engine.model.convert import convert_gguf_tokenizer
from ragblend.engine.node_encoder import LocalNodeEncoder
from ragblend.engine.prompts.session import Session
from ragblend.engine.scheduling import background
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.scheduling.queue import CallbackCancel
from ragblend.kvstore.errors import Cancelled, PromptTooLongError, StoreError, StoreFullError
from ragblend.kvstore.store import KVStore

TEXTS = [make_text(seed) for seed in range(6)]
NODES = [f"node-{number}" for number in range(6)]


def entered(bench):
    """The engine, with all nodes entered and none encoded."""
    bench.engine.enter(TEXTS, NODES)
    return bench.engine


def asking(texts, nodes):
    chunks = [Chunk(text, node, entered=True) for text, node in zip(texts, nodes, strict=True)]
    return Prompt([Literal("Passages: "), *chunks, Literal(" Where?")])


def naming(text):
    """A question about a passage that a framework names, and that was never entered."""
    return Prompt([Literal("Passages: "), Chunk(text, "theirs"), Literal(" Where?")])


def test_nodes_are_entered_without_the_weights(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "weightless")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    engine = Engine.open(str(folder), home=tmp_path / "home", device="cpu", dtype="float32")
    engine.enter(TEXTS, NODES)
    found = engine.tokenize(Prompt([Chunk(node_id=NODES[0])])).token_ids
    assert len(found) >= engine.count_tokens(TEXTS[0]) > 0
    engine.close()


def test_hits_are_counted_though_nobody_closes_the_engine(fresh):
    """Of `ragblend ask`, and of programs: `ragblend store stats` said 0 hits after each."""
    engine = entered(fresh)
    list(engine.encode_nodes(NODES))
    assert engine.prefill(make_prompt(TEXTS), method="reuse").report.hits == 6
    engine.runtime.end()  # as the process exits
    with KVStore.open(engine.store.root, engine.store.budget_bytes) as another_process:
        assert another_process.totals_by_tier()["disk"].hits == 6


def test_equal_passages_count_once_and_too_long_ones_are_left_out(engine):
    engine.enter([TEXTS[0], TEXTS[0], " ".join(TEXTS * 40), TEXTS[1]], [*NODES[:2], "long", NODES[2]])
    nodes = [*NODES[:2], "long", "never entered", NODES[2]]
    missing = engine.missing(nodes)
    assert missing.node_ids == tuple(NODES[:3]) and missing.left_out == 2
    assert missing.room_bytes == engine.store.budget_bytes
    assert missing.tokens == sum(map(engine.count_tokens, TEXTS[:2]))
    first, second, third = engine.encode_nodes(missing.node_ids)
    assert second == 0 and [first, third] == [engine.count_tokens(text) for text in TEXTS[:2]]
    assert engine.store.stats().bytes == missing.nbytes
    assert engine.missing(nodes).node_ids == () and engine.missing(nodes).left_out == 2


def test_looking_up_nodes_frees_the_lock_after_each_batch(fresh, monkeypatch):
    """Not for all: there may be 100,000."""
    engine, looked_up = entered(fresh), []
    get = engine.runtime.nodes.get

    def got(*given):
        looked_up[-1] += 1
        return get(*given)

    monkeypatch.setattr("ragblend.engine.nodes.BATCH_NODES", 2)
    watch_lock(monkeypatch, engine.runtime, lambda: looked_up.append(0))
    monkeypatch.setattr(engine.runtime.nodes, "get", got)
    assert engine.missing(NODES).node_ids == tuple(NODES)
    assert max(looked_up) == 2 and sum(looked_up) == len(NODES)


def test_cancelling_does_not_wait_for_an_idle_device(fresh):
    """On a server that is never idle: for as long as another has the device."""
    engine, stopped = entered(fresh), threading.Event()
    engine.prefill(make_prompt(TEXTS[:1]))
    assert engine.finish_background(60)

    def encode() -> None:
        with pytest.raises(Cancelled):
            list(engine.encode_nodes(NODES[1:], CallbackCancel(lambda: True)))
        stopped.set()

    with engine.runtime.queue.turn():
        work = started(encode)
        assert stopped.wait(SOON_S)
    work.join(60)


def test_the_budget_ends_it_and_nothing_is_evicted(fresh_bench_for):
    first = entered(fresh_bench_for())
    whole = first.missing(NODES).nbytes
    engine = entered(fresh_bench_for(store_budget_bytes=whole // 2))
    encoded = list(engine.encode_nodes(NODES))
    stats = engine.store.stats()
    assert 0 < len(encoded) < 6 and stats.entries == len(encoded) and stats.evictions == 0
    assert engine.missing(NODES).node_ids == tuple(NODES[len(encoded) :])


def test_requested_nodes_are_encoded_first(fresh):
    engine = entered(fresh)
    ids = engine.tokenize(Prompt([Chunk(TEXTS[4])])).chunks[0].token_ids
    key = engine.runtime.key_of(engine.runtime.canonical_prefix, ids, "default")
    assert engine.store.open_chunk(key, ids) is None
    assert engine.missing(NODES).node_ids == ("node-4", "node-0", "node-1", "node-2", "node-3", "node-5")


def test_a_node_that_is_deleted_while_it_is_encoded_gets_no_kv(fresh):
    engine, asked = entered(fresh), []

    def delete() -> bool:
        if not asked:
            asked.append(engine.forget(NODES[:1]))
        return False

    first, second = engine.encode_nodes(NODES[:2], CallbackCancel(delete))
    assert first == 0 < second
    assert asked and engine.store.stats().entries == 1
    engine.forget(NODES)
    assert engine.store.stats().entries == 0 and engine.runtime.nodes.keys() == set()


def test_a_node_that_is_deleted_while_a_question_waits_gets_no_kv(fresh):
    engine = entered(fresh)
    prompt = engine.tokenize(asking(TEXTS[:2], NODES[:2]))
    engine.forget(NODES[:1])
    assert engine.prefill(prompt).report.misses == 2
    assert engine.finish_background(60)
    assert engine.store.stats().entries == 1 and engine.missing(NODES[:2]).node_ids == ()
    engine.forget(NODES[1:2])
    assert engine.store.stats().entries == 0


def test_kv_encoded_for_a_question_is_deleted_with_its_node(engine):
    """Of a node that a framework names and that was never encoded as such."""
    chunks = [Chunk(TEXTS[0], "theirs-0"), Chunk(TEXTS[1], "theirs-1")]
    engine.prefill(Prompt([Literal("Passages: "), *chunks, Literal(" Where?")]))
    assert engine.finish_background(60) and engine.store.stats().entries == 2
    assert engine.forget(["theirs-0", "theirs-1"]) > 0
    assert engine.store.stats().entries == 0


@pytest.mark.parametrize("replaced", [False, True])
def test_a_named_node_stays_deleted_or_replaced_if_its_question_is_answered_meanwhile(
    fresh, watch_layers, replaced
):
    """It came back with KV that nobody would delete again; or questions by its id got the old text, without a word."""
    engine, layers = fresh.engine, []
    assert engine.gate.passed

    def change(layer, *more):
        layers.append(layer)
        if layers == [0]:
            engine.enter(TEXTS[1:2], ["theirs"]) if replaced else engine.forget(["theirs"])

    watch_layers(fresh, change)
    assert engine.prefill(naming(TEXTS[0])).report.misses == 1
    assert engine.finish_background(60)
    assert engine.store.stats().entries == 0
    if replaced:
        found, new = (engine.tokenize(Prompt([each])) for each in (Chunk(node_id="theirs"), Chunk(TEXTS[1])))
        assert found.token_ids == new.token_ids
    else:
        assert engine.runtime.nodes.keys() == set()


@pytest.mark.parametrize("method", ["get", "put_many"])
def test_a_question_that_names_passages_is_answered_if_the_disk_fails(engine, monkeypatch, caplog, method):
    fail = raising(StoreFullError("the disk is full"))
    monkeypatch.setattr(type(engine.runtime.nodes), method, fail)
    assert engine.prefill(naming(TEXTS[0])).report.misses == 1
    assert engine.finish_background(60) and engine.store.stats().entries == 0
    assert [each.getMessage()[-16:] for each in caplog.records] == ["the disk is full"]


def test_an_answer_is_given_if_what_was_left_unstored_cannot_be_looked_up(engine, monkeypatch, caplog):
    """The error came after the last token, and the answer was lost."""
    assert engine.gate.passed
    fail = raising(StoreError("the node index is locked"))
    monkeypatch.setattr(type(engine.runtime.nodes), "get", fail)
    unstored = engine.home / f"unstored-{engine.runtime.fingerprint.digest[:16]}.json"
    unstored.write_text('{"default": ["node-0"]}')
    assert engine.generate(Prompt([Literal("Where?")]), max_new_tokens=2).token_ids
    assert not unstored.exists() and "the node index is locked" in caplog.text


WHILE_EXITING = """
import threading
from concurrent.futures import ThreadPoolExecutor
from ragblend.engine.scheduling.background import BackgroundTasks, end_at_exit

running = threading.Event()

def load():
    running.set()
    threading.main_thread().join()
    ThreadPoolExecutor().submit(print)

tasks = BackgroundTasks()
end_at_exit(tasks)
tasks.add(load)
running.wait()
"""


def test_a_task_that_fails_because_the_process_exits_is_no_news():
    """After a question that needed no model there was a traceback, by which the model was damaged."""
    done = subprocess.run([sys.executable, "-c", WHILE_EXITING], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_closing_does_not_wait_for_all_that_is_queued(engine, monkeypatch):
    """A server that was stopped encoded up to 256 passages first. The next process begins with them."""
    encode, encoded = ChunkEncoder.encode, []
    assert engine.gate.passed

    def slow(*given):
        encoded.append(0)
        until(lambda: engine.runtime.background.stopping)
        return encode(*given)

    monkeypatch.setattr(ChunkEncoder, "encode", slow)
    monkeypatch.setattr(background, "EXIT_S", 0.0)
    unstored = engine.home / f"unstored-{engine.runtime.fingerprint.digest[:16]}.json"
    engine.prefill(Prompt([Chunk(text, f"node {number}") for number, text in enumerate(TEXTS)]))
    until(lambda: encoded)
    engine.close()
    assert len(encoded) == 1
    assert json.loads(unstored.read_text()) == {"default": [f"node {n}" for n in range(1, len(TEXTS))]}


@pytest.mark.parametrize("full", ["budget", "disk", "disk that does not say so"])
def test_a_full_store_is_logged_in_a_line_and_nothing_is_encoded(fresh_bench_for, monkeypatch, caplog, full):
    """Each question once computed each passage in vain, with a traceback for each."""
    engine = fresh_bench_for(store_budget_bytes=1000 if full == "budget" else None).engine
    prompt, encoded = engine.tokenize(make_prompt(TEXTS[:2])), []
    engine.prefill(prompt, method="full")  # loads the model, and has nothing encoded
    encode, usage = ChunkEncoder.encode, shutil.disk_usage(engine.home)
    refused = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(ChunkEncoder, "encode", lambda *given: (encoded.append(0), encode(*given))[1])
    with monkeypatch.context() as disk:
        if full != "budget":
            disk.setattr(os, "posix_fallocate", refused)
        if full == "disk":
            disk.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        engine.prefill(prompt)
        assert engine.finish_background(60)
    said = [record for record in caplog.records if "no KV for the next question" in record.getMessage()]
    assert len(said) == 2 and len(encoded) == (2 if full == "disk that does not say so" else 0)
    assert not any(record.exc_info for record in caplog.records)
    if full != "budget":
        engine.prefill(prompt)
        assert engine.finish_background(60) and engine.store.stats().entries == 2


def test_a_chunk_is_written_while_the_next_is_computed(fresh, monkeypatch):
    engine, computing = entered(fresh), threading.Event()
    layers, asked, seen = engine.runtime.fingerprint.geometry.layers, [], []
    put = engine.store.put

    def waiting(*kv, **named):
        seen.append(computing.wait(60))
        return put(*kv, **named)

    def is_cancelled() -> bool:
        asked.append(1)
        if len(asked) > 1 + layers:  # the second chunk's: each is asked once, and once a layer
            computing.set()
        return False

    monkeypatch.setattr(engine.store, "put", waiting)
    assert len(list(engine.encode_nodes(NODES[:2], CallbackCancel(is_cancelled)))) == 2
    assert seen == [True, True] and len(asked) == 2 * (1 + layers) and engine.store.stats().entries == 2


@pytest.mark.parametrize("stored", [0, 1, 2], ids=["the first", "the second", "the third"])
def test_cancelling_between_two_layers_keeps_what_was_computed_before(fresh, stored):
    engine, layers = entered(fresh), fresh.engine.runtime.fingerprint.geometry.layers
    left, said = [], []

    def is_cancelled() -> bool:
        left.append(1)
        return len(left) > stored * (1 + layers) + 2

    with pytest.raises(Cancelled):
        said.extend(engine.encode_nodes(NODES, CallbackCancel(is_cancelled)))
    assert len(said) == engine.store.stats().entries == stored
    assert len(list(engine.encode_nodes(NODES))) == 6, "and gone on with"
    assert engine.prefill(make_prompt(TEXTS), method="reuse").report.misses == 0


def test_passages_before_one_that_is_too_long_are_stored(fresh):
    engine = entered(fresh)
    engine.enter([" ".join(TEXTS * 40)], ["long"])
    said = []
    with pytest.raises(PromptTooLongError):
        said.extend(engine.encode_nodes([NODES[0], "long", NODES[1]]))
    assert len(said) == engine.store.stats().entries == 1


def test_a_question_does_not_wait_for_a_passage(fresh):
    """The pass over a passage is left when a question comes, and begun again after it."""
    engine, answered, asking_now = entered(fresh), threading.Event(), []
    engine.prefill(make_prompt(TEXTS[:1]))  # loaded
    assert engine.finish_background(60)

    def ask() -> None:
        engine.prefill(make_prompt([make_text(9)], suffix=" Who?"))
        answered.set()

    def is_cancelled() -> bool:
        """At the first layer of the first passage a question comes; the layer ends when it is in the queue."""
        if not asking_now:
            asking_now.append(started(ask))
            while engine.runtime.queue.request_count < 2:
                answered.wait(0.01)
        return False

    encoding = engine.encode_nodes(NODES, CallbackCancel(is_cancelled))
    next(encoding)  # of node-0, which is stored already under another prefix or not
    if not asking_now:
        next(encoding)
    assert answered.is_set(), "the question was answered before the passage it interrupted"
    assert engine.finish_background(60) and len(list(encoding)) >= 4
    asking_now[0].join(60)
    assert engine.missing(NODES).node_ids == ()


def test_a_node_that_is_forgotten_while_a_framework_encodes_gets_no_kv(engine):
    def forget(done: int, total: int) -> None:
        if done == 1:
            engine.forget(NODES[2:3])

    engine.encode(TEXTS, node_ids=NODES, progress=forget)
    assert engine.store.stats().entries == 5
    engine.forget(NODES)
    assert engine.store.stats().entries == 0


def test_for_its_tokenizer_the_bundled_model_is_parsed_once_and_not_converted(tmp_path, monkeypatch):
    """Two minutes went by before the first document was cut, of which three seconds each for three parses."""
    parsed = []
    watch(monkeypatch, GGUFReader, "__init__", lambda *given: parsed.append(given))
    engine = Engine.open(home=tmp_path, device="cpu", dtype="float32")
    engine.enter(TEXTS, NODES)
    assert engine.count_tokens(TEXTS[0]) > 0 and engine.needs_conversion
    made = [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()]
    assert len(made) == 1 and made[0].endswith("-tokenizer")
    engine.close()
    assert list(
        convert_gguf_tokenizer(find_model("default"), tmp_path / "2", "float32").glob("tokenizer.json")
    )
    assert len(parsed) <= 1, "none if another test has it parsed"


def test_background_work_waits_for_the_answer(engine):
    """What was missing is encoded by a thread that would otherwise run beside the answer's tokens."""
    idle = []
    asked = make_prompt(TEXTS)
    engine.generate(asked, max_new_tokens=6, on_text=lambda _: idle.append(engine.finish_background(0)))
    assert idle and all(idle)
    assert engine.finish_background(60)
    assert engine.prefill(asked, method="reuse").report.misses == 0


def test_an_engine_closed_after_an_answer_stays_closed(engine):
    """What its prompt had missed was encoded after that, on a model that was loaded anew for it."""
    session = Session()
    closing = threading.Thread(target=engine.close)

    def show(_):
        if not closing.ident:
            closing.start()
            until(lambda: engine.runtime.queue.has_waiting)

    engine.generate(make_prompt(TEXTS), max_new_tokens=6, session=session, on_text=show)
    closing.join(60)
    assert engine.finish_background(60)
    assert engine.runtime.loaded_now is None and "nodes" not in vars(engine.runtime)
    assert session.tokens == 0


def test_asking_about_the_model_waits_for_no_answer(fresh):
    """Each took a turn to look at the gate, and behind one that is not shared all others waited."""
    engine, answered = entered(fresh), threading.Event()
    assert engine.gate.passed and list(engine.encode_nodes(NODES[:1])) != [0]

    def look() -> None:
        assert engine.gate.passed
        assert list(engine.encode_nodes(NODES[:1])) == [0]
        assert engine.encode(TEXTS[:1], NODES[:1]).encoded == 0
        engine.prefetch([Chunk(TEXTS[0])])
        assert engine.finish_background(60)
        answered.set()

    with engine.runtime.queue.turn(claim=Claim(shares=True)):
        threading.Thread(target=look, daemon=True).start()
        assert answered.wait(60)


@contextmanager
def answering(engine, token):
    """An answer is under way, and is never done; token() is called after each of its tokens."""
    done = threading.Event()

    def answer() -> None:
        with engine.runtime.queue.turn(claim=Claim(shares=True)) as turn:
            while not done.is_set():
                token()
                turn.between_tokens()

    other = started(answer)
    try:
        yield
    finally:
        done.set()
        other.join(60)


def test_on_a_busy_device_a_passage_is_encoded_in_turn_and_once(engine, monkeypatch):
    """Each question left it to be done again, in a pause that never came."""
    asked = make_prompt(TEXTS[:1])
    begun, encode, encoded = threading.Event(), LocalNodeEncoder.encode_in_background, []
    monkeypatch.setattr("ragblend.engine.nodes.PATIENCE_S", 0.0)
    monkeypatch.setattr(
        LocalNodeEncoder, "encode_in_background", lambda *given: (encoded.append(1), encode(*given))
    )
    engine.runtime.background.add(lambda: begun.wait(60))  # until all have asked

    for _ in range(3):
        engine.prefill(asked, method="reuse")
    with answering(engine, begun.set):
        assert engine.finish_background(60) and len(encoded) == 1
    assert engine.prefill(asked, method="reuse").report.misses == 0


def test_answers_go_on_while_a_framework_encodes(engine, monkeypatch):
    """It took the device alone for each passage: before the first it waited for all answers, and then they for it."""
    begun, tokens = threading.Event(), [0]
    engine.encode(TEXTS[:1])
    monkeypatch.setattr("ragblend.engine.scheduling.queue.SLICE_S", 0.0)

    def token() -> None:
        begun.set()
        tokens[0] += engine.runtime.queue.request_count > 1

    encoding = threading.Thread(target=engine.encode, args=(TEXTS[1:2],), daemon=True)
    with answering(engine, token):
        assert begun.wait(60)
        encoding.start()
        encoding.join(60)
        assert not encoding.is_alive() and tokens[0] >= engine.runtime.decoder.geometry.layers
