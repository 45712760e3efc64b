"""Measures what the knowledge tree saves: six passages in full, fused, and with three or all in a known order.

    python -m benchmarks.measure_paths --data musique.json --limit 12

Prints, for each way, the median prefill time as a share of full prefill's, the share of rows computed, and the mean KL
divergence of the first token from full prefill. The ways are measured one after the other for each question.
"""

from collections import defaultdict
from statistics import fmean, median

from benchmarks.common import Data, Limit, Model, agreement, opened, run
from ragblend.measuring.data import load
from ragblend.measuring.prefilling import prompt_of

PASSAGES, KNOWN = 6, 3


def main(data: Data, model: Model = "default", limit: Limit = 12) -> None:
    """Measure, and print a line per way."""
    ways = defaultdict[str, list[tuple[float, float, float]]](list)
    with opened(model) as engine:
        for number, question in enumerate(load(data).questions[:limit]):
            texts = question.passages[:PASSAGES]
            prompt, beginning = (prompt_of(engine, each, question.text) for each in (texts, texts[:KNOWN]))
            engine.encode(texts)
            full = engine.prefill(prompt, method="full")
            if number == 0:  # warmed up
                full = engine.prefill(prompt, method="full")
            for way in ("probe-shift", "prefix", "", "auto 3", "exact 3", "auto 6", "exact 6"):
                found = engine.prefill(prompt if way else beginning, method=way.partition(" ")[0] or "exact")
                engine.finish_background()
                if way:
                    share = found.report.timings.prefill_ms / full.report.timings.prefill_ms
                    apart, _ = agreement(full.logits[None], found.logits[None])
                    ways[way].append((share, found.report.computed_fraction, apart))
    for way, rows in ways.items():
        shares, computed, divergences = zip(*rows, strict=True)
        told = f"{median(shares):.3f} of the time, {fmean(computed):.3f} of the rows"
        print(f"{way}: {told}, KL {fmean(divergences):.4f}")


if __name__ == "__main__":
    run(main, __doc__)
