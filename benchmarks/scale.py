"""Calculates the tables under "Scale" in docs/vllm.md, for a thousand million chunks, by stated formulas.

    python -m benchmarks.scale        # writes the tables; change a figure below and run it again

A device computes a prompt of T tokens in T f / F seconds: f FLOP per token, F FLOP per second. Loading takes T B / W: B
bytes of KV per token, W bytes per second. Layers are loaded while others are computed, so a fused prefill at ratio r
takes the longer of T B / W and r T f / F.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.common import DOCS, between_marks, markdown

PAGE = DOCS / "vllm.md"
CHUNK, PASSAGES, RATIO = 512, 6, 0.15
PROMPT = CHUNK * PASSAGES
REACHED = 0.5  # of a GPU's peak, in a prefill


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    layers: int
    heads: int
    key_heads: int
    size: int

    @property
    def token_bytes(self) -> int:
        """KV of one token in bfloat16: keys and values of all layers."""
        return 2 * 2 * self.layers * self.key_heads * self.size

    @property
    def flop(self) -> float:
        """FLOP to prefill one token: products with all weights, and attention over half of PROMPT on average."""
        return 2 * self.parameters + 4 * self.layers * self.heads * self.size * PROMPT / 2


@dataclass(frozen=True)
class Device:
    """A GPU. flops: dense bfloat16 peak."""

    name: str
    flops: float

    def seconds(self, model: Model, tokens: float = PROMPT) -> float:
        return tokens * model.flop / (REACHED * self.flops)


@dataclass(frozen=True)
class StoragePlace:
    """Storage for KV. rate: bytes per second to one device."""

    name: str
    rate: float

    def seconds(self, model: Model, tokens: float = PROMPT) -> float:
        return tokens * model.token_bytes / self.rate


MODELS = (
    Model("SmolLM2 135M", 135e6, 30, 9, 3, 64),
    Model("Llama 3.1 8B", 8.03e9, 32, 32, 8, 128),
    Model("Llama 3.3 70B", 70.6e9, 80, 64, 8, 128),
)
DEVICES = (Device("L4", 121e12), Device("H100", 989e12))
PLACES = (
    StoragePlace("object storage, 10 Gbit/s", 1.25e9),
    StoragePlace("Redis, 100 Gbit/s", 12.5e9),
    StoragePlace("NVMe, PCIe 4", 7e9),
    StoragePlace("host memory, PCIe 5", 55e9),
)


def sizes() -> Iterable[Sequence[str]]:
    yield "model", "a token", f"a chunk of {CHUNK}", "10^9 chunks"
    for model in MODELS:
        chunk = model.token_bytes * CHUNK
        yield model.name, *(_bytes(size) for size in (model.token_bytes, chunk, 1e9 * chunk))


def waits() -> Iterable[Sequence[str]]:
    yield "model on a device", "full prefill", *(place.name for place in PLACES)
    for model in MODELS[1:]:
        for device in DEVICES:
            full = device.seconds(model)
            fused = [max(place.seconds(model), RATIO * full) for place in PLACES]
            yield f"{model.name}, {device.name}", _ms(full), *(f"{_ms(t)} ({full / t:.1f})" for t in fused)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


def rendered(page: str) -> str:
    """The page with its two tables rendered again."""
    made = iter([sizes, waits])

    def table() -> str:
        head, *rows = next(made)()
        return markdown(head, rows)

    return between_marks(page, table)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
