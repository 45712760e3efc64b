"""Three questions in a script that calls nothing else, as everybody tries a framework first: its second run reuses."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from ragblend import Chunk, Engine, Literal, Prompt
engine = Engine.open(home=sys.argv[1], device="cpu", dtype="bfloat16")
texts = [f"The harbour master of town {n} is called Keeper {n}, and his boat has {n + 2} oars." for n in range(5)]
engine.enter(texts, [f"node{n}" for n in range(5)])
for question in range(3):
    chunks = [Chunk(texts[n], f"node{n}", entered=True) for n in (question, question + 1, question + 2)]
    result = engine.generate(engine.chat_prompt(None, chunks, f"Who keeps town {question}?"), max_new_tokens=4)
    print(json.dumps([result.report.hits, result.report.misses]))
"""


def counted(home, **environment):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, home], capture_output=True, text=True, check=True, timeout=600
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()], done.stderr


def test_a_script_of_three_questions_reuses_from_its_second_run_on(smollm2_home, tmp_path, with_smollm2):
    home = with_smollm2(tmp_path)
    first, said = counted(home)
    assert first[0] == (0, 3) and "have no KV yet" not in said
    for _ in range(2):
        assert counted(home)[0] == [(3, 0)] * 3


def test_what_the_end_of_a_process_cut_is_stored_first_in_the_next(tmp_path, with_smollm2, monkeypatch):
    """EXIT_S is 0: nothing is stored at the end."""
    home = with_smollm2(tmp_path)
    script = SCRIPT.replace(
        "import json, sys", "import json, sys, ragblend.engine.scheduling.background as s; s.EXIT_S = 0.0"
    )
    script = script.replace("for question in range(3)", "for question in range(1)")
    run = [sys.executable, "-c", script, home]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=600)
    assert "have no KV yet" in done.stderr
    (left,) = home.glob("unstored-*.json")
    assert set(json.loads(left.read_text())["default"]) <= {"node0", "node1", "node2"}
    assert left.stat().st_mode & 0o777 == 0o600
    other = SCRIPT.replace("for question in range(3)", "for question in (2,)")  # asks for none of two of them
    subprocess.run([sys.executable, "-c", other, home], capture_output=True, check=True, timeout=600)
    assert not left.exists()
    assert counted(home)[0][0] == (3, 0)
