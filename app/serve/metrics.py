"""Counts of one server, in Prometheus' text format (exposition format 0.0.4)."""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


@dataclass
class Histogram:
    """How many values were at most each bound; the last place is for what was above all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS_S, value)] += 1
        self.total += value


class Metrics:
    """Safe for threads. Names are without `ragblend_`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        key = name, tuple(sorted(labels.items()))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + by

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._histograms.setdefault(name, Histogram()).add(seconds)

    def text(self, gauges: Mapping[str, float], counts: Iterable[tuple[str, Labels, float]] = ()) -> str:
        """All of it; gauges: what is so just now; counts: that somebody else counts."""
        with self._lock:
            known = {**self._counts, **{(name, labels): value for name, labels, value in counts}}
            lines = _of_kind("counter", known)
            for name, histogram in self._histograms.items():
                lines += _histogram(f"ragblend_{name}", histogram)
        return "\n".join(
            [*lines, *_of_kind("gauge", {(name, ()): value for name, value in gauges.items()}), ""]
        )


def _of_kind(kind: str, values: Mapping[tuple[str, Labels], float]) -> list[str]:
    lines, last = [], ""
    for (name, labels), value in sorted(values.items()):
        if name != last:
            lines.append(f"# TYPE ragblend_{name} {kind}")
        lines.append(
            f"ragblend_{name}{_braced(labels)} {value:g}"
            if value % 1
            else f"ragblend_{name}{_braced(labels)} {value:.0f}"
        )
        last = name
    return lines


def _histogram(name: str, histogram: Histogram) -> list[str]:
    lines, reached = [f"# TYPE {name} histogram"], 0
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), histogram.counts, strict=True):
        reached += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {reached}')
    return [*lines, f"{name}_sum {histogram.total:g}", f"{name}_count {reached}"]


def _braced(labels: Labels) -> str:
    """Values are names of ours: nothing in them needs escaping."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}" if labels else ""
