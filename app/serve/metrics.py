"""Metrics of one server in Prometheus' text format (exposition format 0.0.4)."""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters and histograms. Thread-safe. Names are passed without their prefix `ragblend_`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = {}
        # By name: a count for each bucket, one for larger values, and the sum of all.
        self._histograms: dict[str, list[float]] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        key = name, tuple(sorted(labels.items()))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            histogram = self._histograms.setdefault(name, [0] * (len(BUCKETS_S) + 2))
            histogram[bisect_left(BUCKETS_S, seconds)] += 1
            histogram[-1] += seconds

    def text(self, gauges: Mapping[str, float], counts: Iterable[tuple[str, Labels, float]] = ()) -> str:
        """All metrics as text. gauges: current values; counts: counters that are kept elsewhere."""
        with self._lock:
            counters = {**self._counts, **{(name, labels): value for name, labels, value in counts}}
            lines = _lines("counter", counters)
            for name, histogram in self._histograms.items():
                lines += _histogram_lines(f"ragblend_{name}", histogram)
        lines += _lines("gauge", {(name, ()): value for name, value in gauges.items()})
        return "\n".join([*lines, ""])


def _lines(kind: str, values: Mapping[tuple[str, Labels], float]) -> list[str]:
    lines, last = [], ""
    for (name, labels), value in sorted(values.items()):
        if name != last:
            lines.append(f"# TYPE ragblend_{name} {kind}")
        shown = f"{value}" if value % 1 else f"{value:.0f}"
        # Label values are our own names, so nothing in them needs escaping.
        braced = "{" + ",".join(f'{label}="{text}"' for label, text in labels) + "}" if labels else ""
        lines.append(f"ragblend_{name}{braced} {shown}")
        last = name
    return lines


def _histogram_lines(name: str, histogram: Sequence[float]) -> list[str]:
    *counts, total = histogram
    cumulative = [int(count) for count in accumulate(counts)]
    bounds = zip((*map(str, BUCKETS_S), "+Inf"), cumulative, strict=True)
    lines = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in bounds]
    return [f"# TYPE {name} histogram", *lines, f"{name}_sum {total}", f"{name}_count {cumulative[-1]}"]
