"""Three questions in a script that calls nothing else, as everybody tries a framework first: its second run reuses."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import ragblend.engine.scheduling.background as background
from ragblend import Chunk, Engine, Literal, Prompt
background.EXIT_S = float(sys.argv[2])
engine = Engine.open(home=sys.argv[1], device="cpu", dtype="bfloat16")
texts = [f"The harbour master of town {n} is called Keeper {n}, and his boat has {n + 2} oars." for n in range(5)]
engine.enter(texts, [f"node{n}" for n in range(5)])
for question in map(int, sys.argv[3]):
    chunks = [Chunk(texts[n], f"node{n}", entered=True) for n in (question, question + 1, question + 2)]
    result = engine.generate(engine.chat_prompt(None, chunks, f"Who keeps town {question}?"), max_new_tokens=4)
    print(json.dumps([result.report.hits, result.report.misses]))
"""
SLOW_S = 600  # as long as a slow machine may take


def run(home, exit_s=SLOW_S, questions="012"):
    """(hits, misses) of each question, and what was logged."""
    command = [sys.executable, "-c", SCRIPT, home, str(exit_s), questions]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SLOW_S)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()], done.stderr


def test_a_script_of_three_questions_reuses_from_its_second_run_on(smollm2_home, tmp_path, with_smollm2):
    home = with_smollm2(tmp_path)
    counts, log = run(home)
    assert counts[0] == (0, 3) and "have no KV yet" not in log
    for _ in range(2):
        assert run(home)[0] == [(3, 0)] * 3


def test_passages_not_stored_before_exit_are_stored_first_in_the_next_process(tmp_path, with_smollm2):
    home = with_smollm2(tmp_path)
    assert "have no KV yet" in run(home, exit_s=0, questions="0")[1]
    (unstored,) = home.glob("unstored-*.json")
    assert set(json.loads(unstored.read_text())["default"]) <= {"node0", "node1", "node2"}
    assert unstored.stat().st_mode & 0o777 == 0o600
    run(home, questions="2")  # asks for none of two of them
    assert not unstored.exists()
    assert run(home)[0][0] == (3, 0)
