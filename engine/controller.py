"""The loading controller: which share of the stored tokens can be recomputed for nothing, and what a request will take.

Loading and recomputing run side by side, layer by layer, so a request takes about as long as the slower of the two.
Where loading is the slower one, more rows can be recomputed without any delay; where it is the faster one, the KV might
as well lie on a cheaper tier (CacheBlend, EuroSys'25, section 5.1 and footnotes 5-6). On a CPU loading needs the cores
that compute, so a measured share of it stands in the layers' way. Pure functions over a measured profile.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.profile import PrefillProfile

# Rows that are left after a selection that has spent the ratio by itself. Here, where nothing needs torch.
FLOOR_RATIO = 0.01
# Of how many computed rows a shift learns at most: its cost grows with their number times that of all rows.
MOST_LEARNT = 768
RATIO_STEPS = 1 << 10
GIGABYTE = 10**9
# Of the quickest tier's time to the first token: below what two runs of one request differ by.
NO_DELAY = 1.05
# What a GB costs for a month where nothing else is said: cloud list prices, rounded; the order is what decides.
USD_PER_GB_MONTH = {"device": 60.0, "memory": 3.0, "disk": 0.1}


@dataclass(frozen=True)
class Tier:
    """Where KV may lie. bytes_per_s: into the fused buffers, moved; usd_per_gb_month: what keeping it there costs.

    in_the_way: share of the loading time for which the layers cannot go on, because it takes what they compute with:
    0 before a device of its own, 1 where loading and computing take turns.
    """

    name: str
    bytes_per_s: float
    usd_per_gb_month: float
    in_the_way: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.usd_per_gb_month < 0 or not 0 <= self.in_the_way <= 1:
            raise UsageError(f"the profile of tier {self.name!r} makes no sense; measure it again")


@dataclass(frozen=True)
class DeviceProfile:
    """What was measured of one model on one device.

    overhead_ms: of any request, beside its layers; shift_ms: what a shift takes in all layers, of itself, for each
    stored token, and for each stored token and row that it learns from; watch_ms: what watching the attention of one
    row takes in all layers, for each token looked at.
    """

    about: str
    prefill: PrefillProfile
    tiers: tuple[Tier, ...]
    overhead_ms: float = 0.0
    shift_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)
    watch_ms: float = 0.0

    def tier(self, name: str) -> Tier:
        """The tier of that name; the slowest known one where it was not measured."""
        slowest = min(self.tiers, key=lambda tier: tier.bytes_per_s)
        return next((tier for tier in self.tiers if tier.name == name), slowest)

    def priced(self, prices: Mapping[str, float]) -> "DeviceProfile":
        """The same measurements with other prices, by tier; those of other tiers stay."""
        tiers = (replace(t, usd_per_gb_month=prices.get(t.name, t.usd_per_gb_month)) for t in self.tiers)
        return replace(self, tiers=tuple(tiers))

    def save(self, path: Path) -> None:
        value = asdict(self) | {"prefill": self.prefill.to_json()}
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps(value, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "DeviceProfile | None":
        """None where nothing was measured. Raises UsageError for a file that is no profile."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            tiers = tuple(Tier(**tier) for tier in value["tiers"])
            prefill = PrefillProfile.from_json(value["prefill"])
            once, each, pair = (*value.get("shift_ms", ()), 0.0, 0.0, 0.0)[:3]  # none or fewer in older ones
            shift = float(once), float(each), float(pair)
            watch, overhead = float(value.get("watch_ms", 0.0)), float(value["overhead_ms"])
            return cls(str(value["about"]), prefill, tiers, overhead, shift, watch)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"reading the profile {path}: {error}; remove it and run `ragblend doctor --profile` again"
            ) from error


@dataclass(frozen=True)
class Workload:
    """A request before anything is computed. bytes_by_tier: stored KV to load, by the tier that it lies on.

    always: rows that every policy computes; candidates: stored rows that may be recomputed; all of `stored` count in a
    ratio. What choosing costs is paid from the ratio: whole_layers are computed for all candidates before some of them
    are chosen, and a probe takes probe_rows through probe_layers, settled_rows of them for good. Beside the ratio:
    shifted, stored tokens among which those that are not recomputed are shifted (0: none are), and watched, rows whose
    attention is looked at, in the mean of all layers.
    """

    tokens: int
    always: int
    candidates: int
    stored: int
    layers: int
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    whole_layers: float = 0.0
    probe_rows: int = 0
    probe_layers: int = 0
    settled_rows: int = 0
    shifted: int = 0
    watched: float = 0.0

    def whole(self, ratio: float) -> float:
        """Layers computed for all candidates: none where there is nothing to choose."""
        return self.whole_layers if 0 < ratio * self.stored < self.candidates else 0.0

    def rows(self, ratio: float) -> float:
        """Rows computed in a layer behind the choice, those that a probe has settled included."""
        whole = self.whole(ratio)
        spent = whole * self.candidates + self.probe_layers * (self.probe_rows - self.settled_rows)
        left = (ratio * self.stored * self.layers - spent) / (self.layers - int(whole))
        return self.always + min(max(left, min(FLOOR_RATIO, ratio) * self.stored), self.candidates)


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
    """The layers for the rows of that ratio against the whole sequence, after those that choosing takes.

    Pass by pass, because few rows take longer each: a mean over layers would say too little.
    """

    def ms(rows: float, layers: float) -> float:
        return layers / work.layers * profile.prefill.ms(work.tokens - rows, rows) if layers else 0.0

    whole, rows = work.whole(ratio), work.rows(ratio)
    choosing = ms(work.probe_rows, work.probe_layers) + ms(work.always + work.candidates, whole)
    behind = ms(rows - work.settled_rows, work.probe_layers)
    once, each, pair = profile.shift_ms
    learnt = min(rows - work.always, MOST_LEARNT)
    shifting = once + work.shifted * (each + pair * learnt) if work.shifted and ratio else 0.0
    watching = profile.watch_ms * work.watched * work.tokens
    return choosing + watching + behind + ms(rows, work.layers - work.probe_layers - int(whole)) + shifting


def load_ms(profile: DeviceProfile, work: Workload, tier: str | None = None) -> float:
    """Reading all stored KV from where it lies, or, if named, from one tier."""
    return sum(ms for _, ms in _loads(profile, work, tier))


def busy_ms(profile: DeviceProfile, work: Workload, ratio: float, tier: str | None = None) -> float:
    """The layers, and what of the loading stands in their way."""
    in_the_way = sum(each.in_the_way * ms for each, ms in _loads(profile, work, tier))
    return compute_ms(profile, work, ratio) + in_the_way


def _loads(profile: DeviceProfile, work: Workload, tier: str | None) -> list[tuple[Tier, float]]:
    parts = work.bytes_by_tier if tier is None else {tier: sum(work.bytes_by_tier.values())}
    tiers = [(profile.tier(name), nbytes) for name, nbytes in parts.items()]
    return [(each, nbytes / each.bytes_per_s * 1e3) for each, nbytes in tiers]


def ttft_ms(profile: DeviceProfile, work: Workload, ratio: float, tier: str | None = None) -> float:
    """Layers in a pipeline: the first must be loaded, the last computed, and between them the slower one counts."""
    compute, load = compute_ms(profile, work, ratio), load_ms(profile, work, tier)
    between = (work.layers - 1) / work.layers * max(busy_ms(profile, work, ratio, tier), load)
    return profile.overhead_ms + between + (compute + load) / work.layers


def hidden_ratio(profile: DeviceProfile, work: Workload) -> float:
    """The largest ratio whose computing is hidden by the loading; 0 where even none is not."""
    load = load_ms(profile, work)
    low, high = 0, RATIO_STEPS
    while low < high:  # compute time only grows with the ratio
        middle = (low + high + 1) // 2
        if busy_ms(profile, work, middle / RATIO_STEPS) <= load:
            low = middle
        else:
            high = middle - 1
    return low / RATIO_STEPS


def cheapest_tier(profile: DeviceProfile, work: Workload, ratio: float) -> str:
    """Of the tiers from which a request takes no longer than from the quickest, the cheapest (footnote 6)."""
    times = [(ttft_ms(profile, work, ratio, tier.name), tier) for tier in profile.tiers]
    quickest = min(ms for ms, _ in times)
    quick = [tier for ms, tier in times if ms <= NO_DELAY * quickest]
    return min(quick, key=lambda tier: tier.usd_per_gb_month).name


def decide(
    profile: DeviceProfile | None, work: Workload, asked: float | None, least_ratio: float
) -> Decision:
    """The ratio that was asked for; or, for None, the larger of least_ratio and what loading hides."""
    if profile is None:
        reason = "asked for" if asked is not None else "no profile: run `ragblend doctor --profile`"
        return Decision(least_ratio if asked is None else asked, reason)
    if asked is None:
        hidden = hidden_ratio(profile, work) if work.stored else 0.0
        ratio, reason = max((least_ratio, "the least for quality"), (hidden, "what loading hides"))
    else:
        ratio, reason = asked, "asked for"
    return Decision(
        ratio,
        reason,
        round(ttft_ms(profile, work, ratio), 2),
        round(load_ms(profile, work), 2),
        round(compute_ms(profile, work, ratio), 2),
        cheapest_tier(profile, work, ratio) if work.stored else None,
    )
