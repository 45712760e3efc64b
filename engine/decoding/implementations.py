"""The seam behind which the tokens of an answer are computed, and what is chosen there.

The model's own forward serves every model. `DirectDecode` is several times faster and knows the layers of most families.
Which one serves a model is measured once, in the background: the second has to say what the first says, and in less
time. Until that is known the first one serves.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoding.direct import DirectDecode, PackedWeights, Read, has_room, pack_weights, rows_of
from ragblend.engine.decoding.eightbit import EightBit
from ragblend.engine.decoding.fourbit import FourBit
from ragblend.engine.model.decoder import Decoder
from ragblend.engine.model.device import device_name, transfer_stream
from ragblend.kvstore.checksum import crc32
from ragblend.kvstore.errors import Cancelled
from ragblend.kvstore.files import FILE_MODE, make_private_folder, replace_durably

VERSION = 4  # raise it when what is measured changes
MEASURED_TOKENS, TURNS = 16, 5
# Mean divergence allowed, in nats a token: bfloat16 and another order of sums give 2e-3, a wrong layer 1 and more.
MAX_DIVERGENCE = 0.01
SETTLED_SHARE, MAX_TURNS = 0.8, 25
Leave = Callable[[], bool]


class DecodeImplementation(Protocol):
    """What goes on behind a prompt's KV, a few tokens at a time.

    guessed: how many more rows cost little; together: how many answers may have theirs in one pass.
    """

    guessed_tokens: ClassVar[int]
    together: ClassVar[int]

    def run(self, cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        """Read these tokens behind what the cache holds; returns the logits behind each, (n, vocab) float32."""

    def run_together(self, reads: Sequence[Read]) -> list[Tensor]:
        """The same for several caches; where it fails, they hold what they held."""


@dataclass(frozen=True)
class TransformersDecode:
    """By the model's own forward, which takes one cache at a time: it knows no lengths that differ without padding."""

    model: Any
    guessed_tokens: ClassVar[int] = 0
    together: ClassVar[int] = 1

    @torch.inference_mode()
    def run(self, cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        logits: Tensor = self.model(ids, past_key_values=cache, use_cache=True).logits
        return logits[0].float()

    def run_together(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self.run(*read) for read in reads]


@dataclass(frozen=True)
class DecodeComparison:
    """How far from the model's own forward our loop is, in nats a token, and the share of its time it took, by turn."""

    divergence: float
    ratios: tuple[float, ...]

    @property
    def is_settled(self) -> bool:
        """Whether another measurement would say the same: what was found on a busy machine may not."""
        less = sum(ratio < 1 for ratio in self.ratios) / len(self.ratios)
        is_clear = max(less, 1 - less) >= SETTLED_SHARE or len(self.ratios) >= MAX_TURNS
        return is_clear or not self.divergence <= MAX_DIVERGENCE

    @property
    def takes_rows(self) -> bool:
        return self.is_settled and self.divergence <= MAX_DIVERGENCE and statistics.median(self.ratios) < 1


def compare_implementations(
    decoder: Decoder, rows: DecodeImplementation, token_ids: Sequence[int], leave: Leave = lambda: False
) -> DecodeComparison:
    """Read some text by both, its last tokens one by one, in turns. Raises Cancelled when leave() says so.

    On a CPU by its time of this thread, which does half of the work on two cores: others' work does not count.
    """
    transfers = transfer_stream(decoder.device)
    seconds = time.perf_counter if transfers.staged else time.thread_time

    def clock() -> float:
        transfers.synchronize()
        return seconds()

    ids, last = list(token_ids[:-MEASURED_TOKENS]), token_ids[-MEASURED_TOKENS:]
    cache = FusedCache(decoder.geometry, len(ids), MEASURED_TOKENS, decoder.device)
    for held in cache.fused:
        held.set_length(0)
    model = TransformersDecode(decoder.model)
    model.run(cache, ids)

    def read(steps: DecodeImplementation) -> tuple[Tensor, float]:
        cache.truncate()
        logits, begun = [], clock()
        for token in last:
            if leave():
                raise Cancelled("somebody needs the device")
            logits.append(steps.run(cache, [token]))
        return torch.cat(logits).log_softmax(-1), clock() - begun

    (expected, _), (found, _) = read(model), read(rows)  # warms up
    divergence = float((expected.exp() * (expected - found)).sum(-1).mean())
    turns = [(read(rows)[1], read(model)[1]) for _ in range(TURNS)]
    return DecodeComparison(divergence, tuple(ours / own for ours, own in turns))


class DecodeSelector:
    """Which of the two computes a loaded model's answers. steps: the one to use now.

    rounds: whether weights may be rounded to eight bits, as those may that a file held in about as many.

    What was measured is kept in a folder, with the packed weights, for which a billion weights are looked at in ten
    seconds; damaged, cut short, not written or too much for memory, it is measured again, and meanwhile the
    model's own forward serves.
    """

    def __init__(self, decoder: Decoder, folder: Path, fingerprint: str, rounds: bool) -> None:
        # The order in which weights are packed is the processor's and torch's.
        on = f"{device_name(decoder.device)}-{torch.__version__}-v{VERSION}"
        self._file = folder / f"steps-{fingerprint[:32]}-{on}.json"
        self._ratios: tuple[float, ...] = ()
        self._packed: PackedWeights = {}
        self.current: DecodeImplementation = TransformersDecode(decoder.model)
        self.needs_measurement = False  # whether there is something to measure
        self._rounds = rounds
        if not DirectDecode.knows(decoder):
            return
        self._decoder, self.needs_measurement = decoder, True
        with suppress(
            OSError, ValueError, TypeError, LookupError, SafetensorError, MemoryError, RuntimeError
        ):
            kept = json.loads(self._file.read_text())
            verdict = DecodeComparison(kept["divergence"], tuple(kept["ratios"]))
            if verdict.takes_rows:
                self.current = rows_of(decoder, self._kept(kept["checksum"]) if self._packs else {})
            self._ratios, self.needs_measurement = verdict.ratios, not verdict.is_settled

    @property
    def _packs(self) -> bool:
        return self._decoder.device.type == "cpu"

    def _kept(self, checksum: int) -> PackedWeights:
        if not has_room(self._weights.stat().st_size):
            raise MemoryError(f"too little for {self._weights}")
        return _load(self._weights, checksum)

    @property
    def _weights(self) -> Path:
        return self._file.with_suffix(".safetensors")

    def measure(self, token_ids: Sequence[int], leave: Leave) -> None:
        """Choose. Raises Cancelled when leave() says so: what was found so far is not looked for again."""
        self.needs_measurement = False  # what fails here would fail after every answer
        try:
            pack_weights(self._decoder, self._packed, self._rounds, leave)
            rows = rows_of(self._decoder, self._packed)
            measured = compare_implementations(self._decoder, rows, token_ids, leave)
        except Cancelled:
            self.needs_measurement = True
            raise
        except BaseException:
            self._packed = {}
            raise
        packed, self._packed = self._packed, {}
        verdict = DecodeComparison(measured.divergence, (*self._ratios, *measured.ratios))
        self._ratios, self.needs_measurement = verdict.ratios, not verdict.is_settled
        if verdict.takes_rows:
            self.current = rows
        if self._packs and not packed:  # for want of memory: another process may have it
            return
        with suppress(OSError, SafetensorError):  # a full disk, say: then it is measured in each process
            make_private_folder(self._file.parent)
            checksum = _save(packed, self._weights) if packed and verdict.takes_rows else 0
            kept = json.dumps(asdict(verdict) | {"checksum": checksum}, indent=1, sort_keys=True)
            replace_durably(self._file, kept)


def _save(packed: PackedWeights, path: Path) -> int:
    """Returns the checksum by which `_load` knows what it reads; whoever is killed here leaves the draft at most."""
    tensors = {
        f"{name}.{part}": getattr(each, part)
        for name, each in packed.items()
        if each is not None
        for part in ("levels", "scales")
    }
    draft = path.with_suffix(".part")
    save_file(tensors, draft)  # which leaves nothing where the disk is full
    draft.chmod(FILE_MODE)
    os.replace(draft, path)
    return _checksum(tensors)


def _load(path: Path, checksum: int) -> PackedWeights:
    """Raises ValueError where it is not what was saved."""
    tensors = load_file(path)
    if _checksum(tensors) != checksum:
        raise ValueError(f"{path} is damaged")
    names = {name.rpartition(".")[0] for name in tensors}
    parts = {name: (tensors[f"{name}.levels"], tensors[f"{name}.scales"]) for name in names}
    return {
        name: (FourBit if part[0].dtype == torch.uint8 else EightBit)(*part) for name, part in parts.items()
    }


def _checksum(tensors: dict[str, Tensor]) -> int:
    found = 0
    for name, tensor in sorted(tensors.items()):
        found = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = crc32(tensor.contiguous().view(torch.uint8).numpy().data, found)
    return found
