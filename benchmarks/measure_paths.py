"""What the knowledge tree saves: six passages read in full, fused, and with three or all of them in a known order.

    python -m benchmarks.measure_paths --data musique.json --limit 12

Prints, for each way, the median time to read a prompt as a share of full prefill's, the share of rows computed, and the
mean KL divergence of the first token from full prefill. Each question's ways are measured one after the other.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from ragblend import Chunk, Engine
from ragblend.app.bench.metrics import kl_divergence

PASSAGES, KNOWN = 6, 3


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument(
        "--data", required=True, help="questions with passages, as `ragblend bench quality` takes them"
    )
    parser.add_argument("--limit", type=int, default=12, help="of the questions")
    asked = parser.parse_args(arguments)
    ways: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as home:
        engine = Engine.open(asked.model, home=home)
        for number, entry in enumerate(json.loads(Path(asked.data).read_text())[: asked.limit]):
            texts = [each["text"] for each in entry["ctxs"][:PASSAGES]]
            prompt, beginning = (
                engine.tokenize(engine.chat_prompt(None, [Chunk(text) for text in those], entry["question"]))
                for those in (texts, texts[:KNOWN])
            )
            engine.encode(texts)
            full = engine.prefill(prompt, method="full")
            if number == 0:  # warmed up
                full = engine.prefill(prompt, method="full")
            for way in ("probe-shift", "prefix", "", "auto 3", "exact 3", "auto 6", "exact 6"):
                found = engine.prefill(prompt if way else beginning, method=way.partition(" ")[0] or "exact")
                engine.finish_background()
                if way:
                    share = found.report.timings.prefill_ms / full.report.timings.prefill_ms
                    apart = kl_divergence(full.logits[None], found.logits[None])
                    ways.setdefault(way, []).append((share, found.report.computed_fraction, apart))
        engine.close()
    for way, rows in ways.items():
        shares, computed, divergences = (list(each) for each in zip(*rows, strict=True))
        told = f"{statistics.median(shares):.3f} of the time, {statistics.mean(computed):.3f} of the rows"
        print(f"{way}: {told}, KL {statistics.mean(divergences):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
