"""Peak memory of one answer beyond the weights, seen from outside: run by test_smollm2 in a process of its own.

Arguments: home, method. Prints JSON: peak_bytes beyond what was resident before, kv_bytes of the fused sequence, counts
of tokens.
"""

import json
import sys
from pathlib import Path

from ragblend import Chunk, Engine, Literal, Prompt


def status_kib(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def main(home: str, method: str) -> None:
    engine = Engine.open(home=home, device="cpu", dtype="bfloat16")
    vocabulary = range(1000, 40_000)
    chunks = [tuple(vocabulary[(n * 512 + i * 37) % 39_000] for i in range(512)) for n in range(6)]
    texts = [engine.tokenizer.decode(ids) for ids in chunks]
    engine.encode(texts)
    short = Prompt([Literal("Read this."), Chunk(texts[0]), Literal("So?")])
    engine.generate(short, method=method, max_new_tokens=4)  # code, kernels and thread pools are loaded
    engine.runtime.loaded.model.generation_config.eos_token_id = None  # what is measured does not end early
    engine.finish_background()  # and what computes answers is chosen
    prompt = engine.tokenize(engine.chat_prompt(None, [Chunk(text) for text in texts], "Which one?"))
    kv_bytes = len(prompt.token_ids) * engine.runtime.decoder.geometry.token_bytes
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from what is resident
    before = status_kib("VmRSS")
    result = engine.generate(prompt, method=method, max_new_tokens=100)
    peak = (status_kib("VmHWM") - before) * 1024
    generated = result.report.tokens.generated
    found = {"peak_bytes": peak, "kv_bytes": kv_bytes, "generated": generated}
    print(json.dumps(found | {"hits": result.report.hits, "tokens": len(prompt.token_ids)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
