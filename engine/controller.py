"""The loading controller: which share of the stored tokens can be recomputed for nothing, and where their KV could lie.

Loading and recomputing run side by side, layer by layer, so a request takes about as long as the slower of the two.
Where loading is the slower one, more rows can be recomputed without any delay; where it is the faster one, the KV might
as well lie on a cheaper tier (CacheBlend, EuroSys'25, section 5.1, footnotes 5-6). On a CPU reading takes the cores
that compute, so they take turns and nothing is hidden. Two things are measured (`profiling.py`): what rows take through
the layers, and how fast each tier is read. What a policy computes it says itself (`Policy.passes`).
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
# Of the quickest tier's time to the first token: below what two runs of one request differ by.
NO_DELAY = 1.05
# What keeping a GB for a month costs: cloud list prices, rounded; the order is what decides.
USD_PER_GB_MONTH = {"device": 60.0, "memory": 3.0, "disk": 0.1}
Passes = Sequence[tuple[float, float]]  # (rows, layers that they are taken through)


@dataclass(frozen=True)
class Tier:
    """Where KV may lie. bytes_per_s: into the fused buffers, moved."""

    name: str
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0:
            raise UsageError(f"the profile of tier {self.name!r} makes no sense; measure it again")


@dataclass(frozen=True)
class DeviceProfile:
    """What was measured of one model on one device. prefill: rows behind others, through all layers.

    overlaps: whether reading leaves to the layers what they compute with.
    """

    about: str
    prefill: PrefillProfile
    tiers: tuple[Tier, ...]
    overlaps: bool = True

    def tier(self, name: str) -> Tier:
        """The tier of that name; the slowest known one where it was not measured."""
        slowest = min(self.tiers, key=lambda tier: tier.bytes_per_s)
        return next((tier for tier in self.tiers if tier.name == name), slowest)

    def rows_ms(self, cached: float, rows: float) -> float:
        """Rows behind others through all layers; more than were measured in blocks, each behind those before it."""
        most = self.prefill.new_tokens[-1]
        blocks, rest = int(rows // most), rows % most
        whole = sum(self.prefill.ms(cached + number * most, most) for number in range(blocks))
        return whole + (self.prefill.ms(cached + blocks * most, rest) if rest else 0.0)

    def beside(self, name: str, bytes_per_s: float) -> "DeviceProfile":
        """The same with a tier that was measured in use, and where nothing can be put."""
        others = (tier for tier in self.tiers if tier.name != name)
        return replace(self, tiers=(*others, Tier(name, bytes_per_s)))

    def save(self, path: Path) -> None:
        """In the place of an older one. Raises StoreError where the disk takes none, and the older one stays."""
        try:
            make_private_folder(path.parent)
            replace_durably(path, json.dumps(asdict(self), indent=1))
        except OSError as error:
            raise StoreError(f"writing the profile {path}: {error.strerror}; check the disk") from error

    @classmethod
    def read(cls, path: Path) -> "DeviceProfile | None":
        """None where nothing was measured. Raises UsageError for a file that is no profile."""
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
    """A request before anything is computed: its tokens, stored KV to load by the tier that it lies on, and what the
    policy would compute at a ratio.
    """

    tokens: int
    layers: int
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    passes: Callable[[float], Passes] = lambda ratio: ()


@dataclass(frozen=True)
class Decision:
    """What the controller chose, and expects. cheapest_tier: where this KV could lie without any delay."""

    ratio: float
    reason: str
    predicted_ttft_ms: float | None = None
    predicted_load_ms: float | None = None
    predicted_compute_ms: float | None = None
    cheapest_tier: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compute_ms(profile: DeviceProfile, work: Workload, ratio: float) -> float:
    """Pass by pass, because few rows take longer each: a mean over layers would say too little."""
    passes = work.passes(ratio)
    return sum(n / work.layers * profile.rows_ms(work.tokens - rows, rows) for rows, n in passes)


def load_ms(profile: DeviceProfile, work: Workload, tier: str | None = None) -> float:
    """Reading all stored KV from where it lies, or, if named, from one tier."""
    parts = work.bytes_by_tier if tier is None else {tier: sum(work.bytes_by_tier.values())}
    return sum(nbytes / profile.tier(name).bytes_per_s * 1e3 for name, nbytes in parts.items())


def ttft_ms(profile: DeviceProfile, work: Workload, ratio: float, tier: str | None = None) -> float:
    """A pipeline of layers: the first must be loaded, the last computed, and between them the slower one counts."""
    compute, load, layers = compute_ms(profile, work, ratio), load_ms(profile, work, tier), work.layers
    between = max(compute, load) if profile.overlaps else compute + load
    return (layers - 1) / layers * between + (compute + load) / layers


def hidden_ratio(profile: DeviceProfile, work: Workload) -> float:
    """The largest ratio whose computing is hidden by the loading; 0 where even none is not."""
    if not profile.overlaps:
        return 0.0
    steps = range(RATIO_STEPS + 1)  # compute time only grows with the ratio
    load = load_ms(profile, work)
    hidden = bisect_right(steps, load, key=lambda step: compute_ms(profile, work, step / RATIO_STEPS))
    return max(hidden - 1, 0) / RATIO_STEPS


def cheapest_tier(profile: DeviceProfile, work: Workload, ratio: float) -> str:
    """Of the tiers from which a request takes no longer than from the quickest, the cheapest (footnote 6)."""
    times = [(ttft_ms(profile, work, ratio, tier.name), tier) for tier in profile.tiers]
    quickest = min(ms for ms, _ in times)
    quick = [tier for ms, tier in times if ms <= NO_DELAY * quickest]
    return min(quick, key=lambda tier: USD_PER_GB_MONTH.get(tier.name, math.inf)).name


def decide(
    profile: DeviceProfile | None, work: Workload, asked: float | None, least_ratio: float
) -> Decision:
    """The ratio that was asked for; or, for None, the larger of least_ratio and what loading hides."""
    ratio, reason = (least_ratio, "the least for quality") if asked is None else (asked, "asked for")
    if profile is None:
        return Decision(ratio, "no profile: run `ragblend doctor --profile`" if asked is None else reason)
    if asked is None and work.bytes_by_tier:
        ratio, reason = max((ratio, reason), (hidden_ratio(profile, work), "what loading hides"))
    cheapest = cheapest_tier(profile, work, ratio) if work.bytes_by_tier else None
    times = ttft_ms(profile, work, ratio), load_ms(profile, work), compute_ms(profile, work, ratio)
    ttft, load, compute = (round(ms, 2) for ms in times)
    return Decision(ratio, reason, ttft, load, compute, cheapest)
