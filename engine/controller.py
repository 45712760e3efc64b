"""The loading controller: decides how many stored tokens can be recomputed without delay, and which tier would suffice.

Loading and recomputing run in parallel, layer by layer, so a request takes about as long as the slower of the two. If
loading is slower, more rows can be recomputed without delay; if it is faster, the KV could be on a cheaper tier
(CacheBlend, EuroSys'25, section 5.1, footnotes 5-6). On a CPU reading and computing use the same cores, so nothing is
hidden. Two things are measured (`profiling.py`): the time of rows through the layers, and the speed of each tier. The
policy tells its own work (`Policy.passes`).
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import StoreError, UsageError
from ragblend.kvstore.files import make_private_folder, replace_durably
from ragblend.kvstore.policy import PrefillProfile

RATIO_STEPS = 1 << 10
# Tolerance for "no delay", as a share of the fastest tier's TTFT; two runs of one request differ by more.
NO_DELAY = 1.05
# Storing a GB for a month: cloud list prices, rounded; only their order matters.
USD_PER_GB_MONTH = {"device": 60.0, "memory": 3.0, "disk": 0.1}
Passes = Sequence[tuple[float, float]]  # (rows, layers that they pass)


@dataclass(frozen=True)
class Tier:
    """Where KV may be stored. bytes_per_s: into the fused buffers, rotated."""

    name: str
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0:
            raise UsageError(f"the profile of tier {self.name!r} is not above 0 bytes/s; measure it again")


@dataclass(frozen=True)
class DeviceProfile:
    """Measurements of one model on one device. prefill: rows after others, through all layers.

    overlaps: whether loading runs in parallel with the layers.
    """

    about: str
    prefill: PrefillProfile
    tiers: tuple[Tier, ...]
    overlaps: bool = True

    def tier(self, name: str) -> Tier:
        """The tier of that name; the slowest known one if it was not measured."""
        slowest = min(self.tiers, key=lambda tier: tier.bytes_per_s)
        return next((tier for tier in self.tiers if tier.name == name), slowest)

    def rows_ms(self, cached: float, rows: float) -> float:
        """Time of `rows` after `cached` tokens through all layers; more rows than measured pass in several blocks."""
        most = self.prefill.new_tokens[-1]
        blocks, rest = int(rows // most), rows % most
        whole = sum(self.prefill.ms(cached + number * most, most) for number in range(blocks))
        return whole + (self.prefill.ms(cached + blocks * most, rest) if rest else 0.0)

    def beside(self, name: str, bytes_per_s: float) -> "DeviceProfile":
        """The same profile with another measurement of one tier."""
        others = (tier for tier in self.tiers if tier.name != name)
        return replace(self, tiers=(*others, Tier(name, bytes_per_s)))

    def save(self, path: Path) -> None:
        """Save the profile, replacing an older one. Raises StoreError if the disk is full or fails; the older one then
        stays.
        """
        try:
            make_private_folder(path.parent)
            replace_durably(path, json.dumps(asdict(self), indent=1))
        except OSError as error:
            raise StoreError(f"writing the profile {path}: {error.strerror}; check the disk") from error

    @classmethod
    def read(cls, path: Path) -> "DeviceProfile | None":
        """Read a saved profile; None if there is none. Raises UsageError for a file that is no profile."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            tiers = tuple(Tier(**tier) for tier in value["tiers"])
            about = str(value["about"])
            overlaps = bool(value["overlaps"])
            return cls(about, PrefillProfile.from_json(value["prefill"]), tiers, overlaps)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UsageError(
                f"reading the profile {path}: {error}; remove it and run `ragblend doctor --profile` again"
            ) from error


@dataclass(frozen=True)
class Workload:
    """A request before anything is computed: its tokens, the stored KV to load by tier, and what the policy would
    compute at a ratio.
    """

    tokens: int
    layers: int
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    passes: Callable[[float], Passes] = lambda ratio: ()


@dataclass(frozen=True)
class Decision:
    """The controller's ratio and predictions. cheapest_tier: where this KV could be stored without any delay."""

    ratio: float
    reason: str
    predicted_ttft_ms: float | None = None
    predicted_load_ms: float | None = None
    predicted_compute_ms: float | None = None
    cheapest_tier: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compute_ms(profile: DeviceProfile, work: Workload, ratio: float) -> float:
    """Sums over passes, because small passes take longer per row: a mean over layers would be too low."""
    passes = work.passes(ratio)
    return sum(n / work.layers * profile.rows_ms(work.tokens - rows, rows) for rows, n in passes)


def load_ms(profile: DeviceProfile, work: Workload, tier: str | None = None) -> float:
    """Reading all stored KV from its tiers, or, if named, from one tier."""
    parts = work.bytes_by_tier if tier is None else {tier: sum(work.bytes_by_tier.values())}
    return sum(nbytes / profile.tier(name).bytes_per_s * 1e3 for name, nbytes in parts.items())


def ttft_ms(profile: DeviceProfile, work: Workload, ratio: float, tier: str | None = None) -> float:
    """Time to first token as a pipeline: loading the first layer, then the slower of loading and computing, then
    computing the last.
    """
    compute, load, layers = compute_ms(profile, work, ratio), load_ms(profile, work, tier), work.layers
    between = max(compute, load) if profile.overlaps else compute + load
    return (layers - 1) / layers * between + (compute + load) / layers


def hidden_ratio(profile: DeviceProfile, work: Workload) -> float:
    """The largest ratio whose computation is hidden behind loading; 0 if there is none."""
    if not profile.overlaps:
        return 0.0
    steps = range(RATIO_STEPS + 1)  # compute time only grows with the ratio
    load = load_ms(profile, work)
    hidden = bisect_right(steps, load, key=lambda step: compute_ms(profile, work, step / RATIO_STEPS))
    return max(hidden - 1, 0) / RATIO_STEPS


def cheapest_tier(profile: DeviceProfile, work: Workload, ratio: float) -> str:
    """The cheapest tier from which a request takes no longer than from the fastest (footnote 6)."""
    times = [(ttft_ms(profile, work, ratio, tier.name), tier) for tier in profile.tiers]
    fastest = min(ms for ms, _ in times)
    fast = [tier for ms, tier in times if ms <= NO_DELAY * fastest]
    return min(fast, key=lambda tier: USD_PER_GB_MONTH.get(tier.name, math.inf)).name


def decide(
    profile: DeviceProfile | None, work: Workload, asked: float | None, least_ratio: float
) -> Decision:
    """The requested ratio; or, for None, the larger of least_ratio and what loading hides."""
    ratio, reason = (least_ratio, "the least for quality") if asked is None else (asked, "asked for")
    if profile is None:
        return Decision(ratio, "no profile: run `ragblend doctor --profile`" if asked is None else reason)
    if asked is None and work.bytes_by_tier:
        ratio, reason = max((ratio, reason), (hidden_ratio(profile, work), "what loading hides"))
    cheapest = cheapest_tier(profile, work, ratio) if work.bytes_by_tier else None
    times = ttft_ms(profile, work, ratio), load_ms(profile, work), compute_ms(profile, work, ratio)
    ttft, load, compute = (round(ms, 2) for ms in times)
    return Decision(ratio, reason, ttft, load, compute, cheapest)
