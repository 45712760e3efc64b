"""Memory of one answer beyond the weights: run by test_smollm2 in a process of its own.

Arguments: home, method. Prints JSON. allocated_bytes: the most that tensors took at a time, and left_bytes what they
still take when the answer is there; resident_bytes: how far the process grew, seen from outside, for a first answer of
100 tokens and for a second one; kv_bytes of the fused sequence, and counts.
"""

import json
import sys
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from ragblend import Chunk, Engine, Literal, Prompt


def status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main(home: str, method: str) -> None:
    engine = Engine.open(home=home, device="cpu", dtype="bfloat16")
    vocabulary = range(1000, 40_000)
    chunks = [tuple(vocabulary[(n * 512 + i * 37) % 39_000] for i in range(512)) for n in range(6)]
    texts = [engine.tokenizer.decode(ids) for ids in chunks]
    engine.encode(texts)
    short = Prompt([Literal("Read this."), Chunk(texts[0]), Literal("So?")])
    engine.generate(short, method=method, max_new_tokens=4)  # code, kernels and thread pools are loaded
    engine.runtime.end_ids = []  # what is measured does not end early
    engine.finish_background()  # and what computes answers is chosen
    prompt = engine.tokenize(engine.chat_prompt(None, [Chunk(text) for text in texts], "Which one?"))
    kv_bytes = len(prompt.token_ids) * engine.runtime.decoder.geometry.token_bytes
    resident = []
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the high-water mark starts again from what is resident
        before = status_bytes("VmRSS")
        result = engine.generate(prompt, method=method, max_new_tokens=100)
        resident.append(status_bytes("VmHWM") - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine.generate(prompt, method=method, max_new_tokens=8)
    held, most = 0, 0
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    found = {"allocated_bytes": most, "left_bytes": held, "resident_bytes": resident, "kv_bytes": kv_bytes}
    counts = {"generated": result.report.tokens.generated, "hits": result.report.hits}
    print(json.dumps(found | counts | {"tokens": len(prompt.token_ids)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
