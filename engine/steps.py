"""The seam behind which the tokens of an answer are computed, and what is chosen there.

The model's own forward serves every model. `FewRows` is several times faster on a CPU and knows the layers of most
families. Which one serves a model is measured once: the second has to say what the first says, and in less time.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoder import Decoder
from ragblend.engine.few_rows import FewRows, FourBits, four_bits
from ragblend.engine.fourbit import FourBit
from ragblend.kvstore.files import FILE_MODE, make_private_folder, replace_durably

VERSION = 1  # raise it when what is measured changes
MEASURED_TOKENS = 16
# Mean divergence allowed, in nats a token: bfloat16 and another order of sums give 2e-3, a wrong layer 1 and more.
MOST_DIVERGENCE = 0.01


class Steps(Protocol):
    """What goes on behind a prompt's KV, a few tokens at a time."""

    def run(self, cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        """Read these tokens behind what the cache holds; returns the logits behind each, (n, vocab) float32."""


@dataclass(frozen=True)
class ModelSteps:
    """By the model's own forward."""

    model: Any

    @torch.inference_mode()
    def run(self, cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        logits: Tensor = self.model(ids, past_key_values=cache, use_cache=True).logits
        return logits[0].float()


@dataclass(frozen=True)
class StepsVerdict:
    """How far from the model's own forward our loop is, in nats a token, and milliseconds of a token by both."""

    divergence: float
    rows_ms: float
    model_ms: float

    @property
    def takes_rows(self) -> bool:
        return self.divergence <= MOST_DIVERGENCE and self.rows_ms < self.model_ms


def measure_steps(decoder: Decoder, rows: FewRows, token_ids: Sequence[int]) -> StepsVerdict:
    """Read some text by both, its last tokens one by one."""
    ids, last = list(token_ids[:-MEASURED_TOKENS]), token_ids[-MEASURED_TOKENS:]
    cache = FusedCache(decoder.geometry, len(ids), MEASURED_TOKENS, decoder.device)
    for held in cache.fused:
        held.set_length(0)
    model = ModelSteps(decoder.model)
    model.run(cache, ids)

    def read(steps: Steps) -> tuple[Tensor, float]:
        steps.run(cache, last[:1])  # warms up
        cache.truncate()
        begun = time.perf_counter()
        logits = torch.cat([steps.run(cache, [token]) for token in last])
        elapsed = time.perf_counter() - begun
        cache.truncate()
        return logits.log_softmax(-1), elapsed * 1e3 / len(last)

    (expected, model_ms), (found, rows_ms) = read(model), read(rows)
    divergence = float((expected.exp() * (expected - found)).sum(-1).mean())
    return StepsVerdict(divergence, rows_ms, model_ms)


def kept_steps(folder: Path, fingerprint: str, decoder: Decoder, token_ids: Sequence[int]) -> FewRows | None:
    """Our loop over this model, where it was found to serve it better, now or earlier.

    The verdict is kept, and so are the four-bit weights, for which a billion weights are looked at in ten seconds.
    """
    # The order in which weights are packed is the processor's and torch's.
    on = f"{torch.backends.cpu.get_cpu_capability()}-{torch.__version__}-v{VERSION}"
    file = folder / f"steps-{fingerprint[:32]}-{on}.json"
    weights = file.with_suffix(".safetensors")
    with suppress(OSError, ValueError, TypeError, SafetensorError):
        if not StepsVerdict(**json.loads(file.read_text())).takes_rows:
            return None
        return FewRows.of(decoder, _load(weights))
    found = four_bits(decoder) if FewRows.knows(decoder) else {}
    rows = FewRows.of(decoder, found)
    if rows is None:
        return None
    verdict = measure_steps(decoder, rows, token_ids)
    with suppress(OSError, SafetensorError):  # then it is measured again
        make_private_folder(folder)
        _save(found, weights)
        replace_durably(file, json.dumps(asdict(verdict), indent=1, sort_keys=True))
    return rows if verdict.takes_rows else None


def _save(found: FourBits, path: Path) -> None:
    tensors = {
        f"{name}.{part}": getattr(four, part) for name, four in found.items() for part in ("levels", "scales")
    }
    draft = path.with_suffix(".part")
    save_file(tensors, draft)
    draft.chmod(FILE_MODE)
    os.replace(draft, path)


def _load(path: Path) -> FourBits:
    tensors = load_file(path)
    names = {name.rpartition(".")[0] for name in tensors}
    return {name: FourBit(tensors[f"{name}.levels"], tensors[f"{name}.scales"]) for name in names}
