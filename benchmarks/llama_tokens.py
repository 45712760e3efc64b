"""Times llama.cpp per token; run by an interpreter that has llama_cpp.

argv: a JSON file, {gguf, threads, answers: [{prompt: token ids, answer: token ids}]}. Prints the milliseconds per token
of each answer, one line each.
"""

import json
import sys
import time
from pathlib import Path

ROOM = 16


def main() -> None:
    from llama_cpp import Llama

    plan = json.loads(Path(sys.argv[1]).read_text())
    model = Llama(
        plan["gguf"],
        n_ctx=max(len(each["prompt"]) + len(each["answer"]) for each in plan["answers"]) + ROOM,
        n_threads=plan["threads"],
        n_threads_batch=plan["threads"],
        flash_attn=True,
        verbose=False,
    )
    for each in plan["answers"]:
        model.reset()
        model.eval(each["prompt"])
        model.eval(each["answer"][:1])  # warms up
        model.n_tokens -= 1
        begun = time.perf_counter()
        for token in each["answer"]:
            model.eval([token])
        print(1e3 * (time.perf_counter() - begun) / len(each["answer"]), flush=True)


if __name__ == "__main__":
    main()
