"""The loading controller: decides which passages to load, how many tokens to recompute, and which tier would suffice.

Loading and recomputing run in parallel, layer by layer, so a request takes about as long as the slower of the two. If
loading is slower, more rows can be recomputed without delay; if it is faster, the KV could be on a cheaper tier
(CacheBlend, EuroSys'25, section 5.1, footnotes 5-6). If it is slower than computing, passages are computed from the
front of the prompt, where that is exact, while those behind are loaded (Cake, arXiv 2410.03065). On a CPU reading and
computing use the same cores, so nothing is hidden. Two things are measured (`profiling.py`): the time of rows through
the layers, and the speed of each tier; every request corrects them (`MeasuredSpeeds`). What a policy computes is known
from `Policy.passes`.
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

RATIO_STEPS = 1 << 10  # how finely `hidden_ratio` searches
# Tolerance for "no delay", as a share of the fastest tier's TTFT; two runs of one request differ by more.
NO_DELAY_FACTOR = 1.05
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
            raise UsageError(
                f"the profile has {self.bytes_per_s} bytes/s for tier {self.name!r}, which must be above 0; measure it "
                "again"
            )


@dataclass(frozen=True)
class DeviceProfile:
    """Measurements of one model on one device. prefill: times of new rows after cached ones, through all layers.

    tiers: empty if only the layers were measured; overlaps: whether loading runs in parallel with the layers; slowdown:
    how much longer computing takes at present than when it was measured.
    """

    about: str
    prefill: PrefillProfile
    tiers: tuple[Tier, ...]
    overlaps: bool = True
    slowdown: float = 1.0

    def tier(self, name: str) -> Tier:
        """The tier of that name; if it was not measured, the slowest one; if none was, one of infinite speed."""
        slowest = min(self.tiers, key=lambda tier: tier.bytes_per_s, default=Tier(name, math.inf))
        return next((tier for tier in self.tiers if tier.name == name), slowest)

    def rows_ms(self, cached: float, rows: float) -> float:
        """Time of `rows` after `cached` tokens through all layers; more rows than measured pass in several blocks."""
        most = self.prefill.new_tokens[-1]
        blocks, rest = int(rows // most), rows % most
        whole = sum(self.prefill.ms(cached + number * most, most) for number in range(blocks))
        rest_ms = self.prefill.ms(cached + blocks * most, rest) if rest else 0.0
        return self.slowdown * (whole + rest_ms)

    def with_speeds(self, speeds: Mapping[str, float]) -> "DeviceProfile":
        """The same profile with these speeds of tiers, in bytes per second, in place of its own."""
        unchanged = (tier for tier in self.tiers if tier.name not in speeds)
        return replace(self, tiers=(*unchanged, *(Tier(name, speed) for name, speed in speeds.items())))

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
    """The controller's ratio and predictions. bytes_by_tier: what is loaded, and from where; cheapest_tier: where this
    KV could be stored without any delay; not_loaded: why passages are computed instead of loaded, if any are.
    """

    ratio: float
    reason: str
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    predicted_ttft_ms: float | None = None
    predicted_load_ms: float | None = None
    predicted_compute_ms: float | None = None
    cheapest_tier: str | None = None
    not_loaded: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compute_ms(profile: DeviceProfile, work: Workload, ratio: float) -> float:
    """Time to compute a request, as the sum of its passes: small passes take longer per row, so the time of a mean
    number of rows would be too low.
    """
    passes = work.passes(ratio)
    return sum(count / work.layers * profile.rows_ms(work.tokens - rows, rows) for rows, count in passes)


def load_ms(profile: DeviceProfile, work: Workload, tier: str | None = None) -> float:
    """Time to load all stored KV from its tiers, or from one named tier."""
    parts = work.bytes_by_tier if tier is None else {tier: sum(work.bytes_by_tier.values())}
    return sum(nbytes / profile.tier(name).bytes_per_s * 1e3 for name, nbytes in parts.items())


def ttft_ms(profile: DeviceProfile, work: Workload, ratio: float, tier: str | None = None) -> float:
    """Time to first token as a pipeline: a layer is computed when it is loaded and the one before is done.

    The last passes go through all layers, one after the other; those before them are a probe, which begins at the
    first layer too.
    """
    load, layers = load_ms(profile, work, tier), work.layers
    if not profile.overlaps:
        return load + compute_ms(profile, work, ratio)
    passes = work.passes(ratio)
    load_layer_ms, done_ms = load / layers, 0.0
    first = layers - sum(count for _, count in passes)  # negative if there is a probe
    for rows, count in passes:
        begin, end = (0.0, count) if first < 0 else (first, first + count)
        first += count
        layer_ms = profile.rows_ms(work.tokens - rows, rows) / layers
        # A pass ends when its layers are computed: after the pass before it, after its first layer's KV has come, and
        # its last layer after that layer's KV has come.
        done_ms = max(
            done_ms + layer_ms * count,
            min(begin + 1, end) * load_layer_ms + layer_ms * count,
            end * load_layer_ms + layer_ms * min(1, count),
        )
    return max(done_ms, load)


def chunks_to_compute(
    profile: DeviceProfile, work: Callable[[int], Workload], ratio: float, least: int, most: int
) -> int:
    """How many of `most` stored chunks to compute instead of loading, at least `least`: the smallest number that gives
    the shortest time to first token. work(count): the request if the first `count` chunks are computed.
    """
    wanted = work(least)
    if profile.overlaps and load_ms(profile, wanted) <= compute_ms(profile, wanted, ratio):
        return least  # loading is hidden already
    times = {least: ttft_ms(profile, wanted, ratio)}
    times |= {count: ttft_ms(profile, work(count), ratio) for count in range(least + 1, most + 1)}
    return min(times, key=times.__getitem__)


class MeasuredSpeeds:
    """Speeds learned from requests since the process began: of each tier, and of computing relative to the profile.

    Each new measurement gets half of the weight.
    """

    MIN_BYTES = 1 << 20  # less says nothing about a tier
    MAX_CHANGE = 4.0  # a request that took this much longer, or less, was disturbed
    cannot_measure = False  # measuring the layers in the background failed

    def __init__(self) -> None:
        self._bytes_per_s: dict[str, float] = {}
        self._slowdown = 1.0

    def corrected(self, profile: DeviceProfile | None) -> DeviceProfile | None:
        """The profile, corrected by these speeds."""
        if profile is None:
            return None
        return replace(profile.with_speeds(self._bytes_per_s), slowdown=self._slowdown)

    def record_load(self, tier: str, nbytes: int, ms: float) -> None:
        """A request loaded these bytes from one tier, and was loading for `ms`."""
        if nbytes >= self.MIN_BYTES and ms > 0:
            found = nbytes / ms * 1e3
            self._bytes_per_s[tier] = 2 / (1 / self._bytes_per_s.get(tier, found) + 1 / found)

    def record_compute(self, predicted_ms: float, ms: float) -> None:
        """A request took `ms`; the corrected profile had predicted predicted_ms."""
        if predicted_ms > 0 and ms > 0:
            change = min(max(ms / predicted_ms, 1 / self.MAX_CHANGE), self.MAX_CHANGE)
            self._slowdown *= change**0.5


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
    fast = [tier for ms, tier in times if ms <= NO_DELAY_FACTOR * fastest]
    return min(fast, key=lambda tier: USD_PER_GB_MONTH.get(tier.name, math.inf)).name


def decide(
    profile: DeviceProfile | None, work: Workload, requested: float | None, least_ratio: float
) -> Decision:
    """The requested ratio; or, for None, the larger of least_ratio and what loading hides."""
    ratio, reason = requested, "asked for"
    if ratio is None:
        ratio, reason = least_ratio, "the least for quality"
    loaded = work.bytes_by_tier
    if profile is None:
        unknown = "not measured yet: `ragblend doctor --profile` does it"
        return Decision(ratio, unknown if requested is None else reason, loaded)
    if requested is None and loaded:
        ratio, reason = max((ratio, reason), (hidden_ratio(profile, work), "what loading hides"))
    cheapest = cheapest_tier(profile, work, ratio) if loaded and profile.tiers else None
    times = ttft_ms(profile, work, ratio), load_ms(profile, work), compute_ms(profile, work, ratio)
    ttft, load, compute = (round(ms, 2) for ms in times)
    return Decision(ratio, reason, loaded, ttft, load, compute, cheapest)
