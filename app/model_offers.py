"""Suggests models of the hub that fit this machine's memory and are fast enough on it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragblend.app.home import Home
from ragblend.app.models import SUGGESTIONS, Suggestion
from ragblend.engine.model.checkpoints import DEFAULT

if TYPE_CHECKING:
    from ragblend.app.workspace import Workspace

GIGABYTE = 10**9
PROMPT_TOKENS = 2000
SLOWEST_TOKENS_PER_S = 1.5
LONGEST_FIRST_TOKEN_S = 90.0
ANSWER_TOKENS = 60  # of the first answer, for `Offer.answer_s`
COMFORTABLE_ANSWER_S = 30.0
# Memory needed beside the weights: embedder, index, the buffers of one prompt.
OVERHEAD_BYTES = 2 * GIGABYTE
BUNDLED_PARAMETERS = 0.135e9


@dataclass(frozen=True)
class MachineCapacity:
    """Memory and speed of this machine. flops_per_s: of large matrix products; bytes_per_s: of
    reading the weights, once per token.
    """

    free_bytes: float
    bytes_a_parameter: int
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Offer:
    """A suggestion with its cost on this machine. first_token_s: for a prompt of 2,000 tokens that are not stored;
    answer_s: until such a first answer of 60 tokens is complete. is_best: recommended.
    """

    model: Suggestion
    memory_bytes: float
    first_token_s: float
    tokens_per_s: float
    answer_s: float
    is_best: bool = False


def offers(machine: MachineCapacity, most: int = 3) -> list[Offer]:
    """The models that fit the memory and are fast enough, smallest first; if there are many, a small, a medium and a
    large one.

    If none is fast enough, the smallest that fits. The best one is the largest whose first answer comes within half a
    minute, or else the smallest.
    """
    every = [_offer(model, machine) for model in SUGGESTIONS]
    fitting = [offer for offer in every if offer.memory_bytes <= machine.free_bytes]
    quick = [offer for offer in fitting if offer.tokens_per_s >= SLOWEST_TOKENS_PER_S]
    usable = [offer for offer in quick if offer.first_token_s <= LONGEST_FIRST_TOKEN_S]
    step = (len(usable) - 1) / (most - 1)
    chosen = usable if len(usable) <= most else [usable[round(number * step)] for number in range(most)]
    chosen = chosen or fitting[:1]
    best = max((n for n, each in enumerate(chosen) if each.answer_s <= COMFORTABLE_ANSWER_S), default=0)
    return [replace(each, is_best=n == best) for n, each in enumerate(chosen)]


def short_text(offer: Offer) -> str:
    """An offer in a few words: the model's name, download size and time to the first answer."""
    return (
        f"{offer.model.name} ({'recommended, ' if offer.is_best else ''}"
        f"{offer.model.download_bytes / GIGABYTE:.1f} GB, first answer after about {offer.answer_s:.0f} s)"
    )


def record_first_suggestion(home: Home) -> bool:
    """Record that larger models were suggested to the user of this home; False if that was done before."""
    try:
        home.models_suggested.touch(mode=0o600, exist_ok=False)
    except OSError:
        return False
    return True


def _offer(model: Suggestion, machine: MachineCapacity) -> Offer:
    weights = model.parameters * machine.bytes_a_parameter
    first_token_s = 2 * model.parameters * PROMPT_TOKENS / machine.flops_per_s
    tokens_per_s = machine.bytes_per_s / weights
    answer_s = first_token_s + ANSWER_TOKENS / tokens_per_s
    return Offer(model, weights + OVERHEAD_BYTES, first_token_s, tokens_per_s, answer_s)


def measure_machine(workspace: "Workspace") -> MachineCapacity:
    """Measure this machine, in a fifth of a second on two cores. Raises UsageError for the device.

    The prefill speed is that of the model in use, if it was profiled here.
    """
    from ragblend.engine.model.device import free_bytes, measure_rates, pick_device, pick_dtype

    settings = workspace.settings
    device = pick_device(settings.device)
    dtype = pick_dtype(device, settings.dtype)
    rates = measure_rates(device, dtype)
    capacity = MachineCapacity(free_bytes(device), 4 if dtype == "float32" else 2, *rates)
    known = {DEFAULT: BUNDLED_PARAMETERS} | {one.name: one.parameters for one in SUGGESTIONS}
    profiled = settings.model in known and any(workspace.home.profiles.glob("*.json"))
    profile = workspace.engine.known_profile if profiled else None
    if profile is not None:
        seconds = profile.rows_ms(0, PROMPT_TOKENS) / 1e3
        return replace(capacity, flops_per_s=2 * known[settings.model] * PROMPT_TOKENS / seconds)
    return capacity
