"""Encode two passages once, then answer a question from their stored KV.

python examples/quickstart.py            # the bundled SmolLM2; or a hub id, a folder, a .gguf file
"""

import sys

from ragblend import Chunk, Engine

PASSAGES = [
    "The harbour was dredged in 1921 by the Ems company, who left the crane behind. " * 4,
    "The crane on the north mole lifts nine tonnes and is painted green. It was last used in 1968. " * 4,
]
QUESTION = "Which company left the crane behind?"


def main() -> None:
    engine = Engine.open(sys.argv[1] if len(sys.argv) > 1 else "default")

    # Once for each passage, at any time before the question: its KV is stored on disk.
    report = engine.encode(PASSAGES)
    print(f"encoded {report.encoded}, already stored {report.skipped}")

    # A prompt is literals and chunks in any order; this one is the model's chat template, with the passages first.
    prompt = engine.chat_prompt(None, [Chunk(text) for text in PASSAGES], QUESTION)
    engine.prefill(prompt)  # the first one also loads the model, which is not to be measured

    # The same token ids twice: everything computed, and 25% of the stored tokens recomputed.
    for method in ("full", "probe-shift"):
        result = engine.generate(prompt, method=method, max_new_tokens=12)
        tokens = result.report.tokens
        print(f"{method}: {result.text!r}, first token after {result.report.timings.ttft_ms:.0f} ms")
        print(f"  {tokens.reused} tokens reused, {tokens.recomputed} recomputed, {tokens.fresh} fresh")
    engine.close()


if __name__ == "__main__":
    main()
