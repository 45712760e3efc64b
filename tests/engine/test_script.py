"""Three questions in a script that calls nothing else, as everybody tries a framework first: its second run reuses."""

import json
import subprocess
import sys
from contextlib import closing

from ragblend import Engine, Literal, Prompt


def town(number):
    return (
        f"The harbour master of town {number} is called Keeper {number}, and his boat has {number + 2} oars."
    )


SCRIPT = """
import json, sys
import ragblend.engine.scheduling.background as background
import ragblend.engine.scheduling.queue as queue
from ragblend import Chunk, Engine, Literal, Prompt
background.EXIT_S = float(sys.argv[2])
if not background.EXIT_S:
    queue.PAUSE_S = 600  # nothing is stored while it runs
engine = Engine.open(sys.argv[5], home=sys.argv[1], device="cpu", dtype="bfloat16")
texts = json.loads(sys.argv[4])
engine.enter(texts, [f"node{n}" for n in range(5)])
for question in map(int, sys.argv[3]):
    chunks = [Chunk(texts[n], f"node{n}", entered=True) for n in (question, question + 1, question + 2)]
    result = engine.generate(engine.chat_prompt(None, chunks, f"Who keeps town {question}?"), max_new_tokens=4)
    print(json.dumps([result.report.hits, result.report.misses]))
"""
SLOW_S = 600  # as long as a slow machine may take


def run(home, model, exit_s=SLOW_S, questions="012"):
    """(hits, misses) of each question, and what was logged."""
    texts = json.dumps([town(number) for number in range(5)])
    command = [sys.executable, "-c", SCRIPT, home, str(exit_s), questions, texts, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SLOW_S)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()], done.stderr


def times_asked(home, model):
    """How often the KV of town 0 was asked for."""
    with closing(Engine.open(str(model), home=home, device="cpu", dtype="bfloat16")) as engine:
        runtime = engine.runtime
        ids = tuple(runtime.tokenizing.passage_ids(town(0)))
        return runtime.store.request_count(runtime.key_of(runtime.canonical_prefix, ids, "default"))


def test_a_script_of_three_questions_reuses_from_its_second_run_on(home, tiny_folder):
    counts, log = run(home, tiny_folder)
    assert counts[0] == (0, 3) and "have no KV yet" not in log
    before = times_asked(home, tiny_folder)
    assert run(home, tiny_folder)[0] == [(3, 0)] * 3
    assert times_asked(home, tiny_folder) > before, "what a process used is known to the next one"


def test_passages_not_stored_before_exit_are_stored_first_in_the_next_process(home, tiny_folder):
    assert "have no KV yet" in run(home, tiny_folder, exit_s=0, questions="0")[1]
    (unstored,) = home.glob("unstored-*.json")
    assert set(json.loads(unstored.read_text())["default"]) <= {"node0", "node1", "node2"}
    assert unstored.stat().st_mode & 0o777 == 0o600
    nodes = [f"node{number}" for number in range(3)]
    with closing(Engine.open(str(tiny_folder), home=home, device="cpu", dtype="bfloat16")) as engine:
        assert engine.missing(nodes).node_ids
        engine.generate(Prompt([Literal("Read this.")]), max_new_tokens=1)
        assert engine.finish_background(SLOW_S) and engine.missing(nodes).node_ids == ()
    assert not unstored.exists()
