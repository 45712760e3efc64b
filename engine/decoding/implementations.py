"""Chooses and runs the decode implementation, which computes an answer's tokens from the KV in a cache.

The model's own forward (`TransformersDecode`) supports every model, and is used until another one is verified. The
first entry of IMPLEMENTATIONS that supports a model is compared with it once, in the background: it must give the same
logits, in less time. To add an implementation, write its file, and an entry in that table.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoding.cuda_graph import CudaGraphDecode
from ragblend.engine.decoding.direct import DirectDecode, PassInput
from ragblend.engine.decoding.packed_weights import PackedWeights, load_packed, pack_weights, save_packed
from ragblend.engine.model.decoder import Decoder
from ragblend.engine.model.device import device_name, transfer_stream
from ragblend.kvstore.errors import Cancelled
from ragblend.kvstore.files import make_private_folder, replace_durably

VERSION = 6  # raise it when what is measured changes
# Few, because requests without a pause between them wait for this. With only 8 tokens the divergence varies twofold.
COMPARED_TOKENS, TIMED_TOKENS, ROUNDS = 24, 8, 3
# Mean divergence allowed, in nats a token: bfloat16 and another order of sums give 2e-3, a wrong layer 1 and more.
MAX_DIVERGENCE = 0.01
SETTLED_SHARE, MAX_ROUNDS = 0.8, 25
CancelCheck = Callable[[], bool]


class DecodeImplementation(Protocol):
    """Runs a few tokens through the model, after the KV in a cache.

    guessed_tokens: how many additional rows take little time; max_together: how many answers can share one pass.
    """

    guessed_tokens: ClassVar[int]
    max_together: ClassVar[int]

    def run(self, cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        """Append these tokens to the cache; returns the logits after each, (n, vocab) float32."""

    def run_together(self, inputs: Sequence[PassInput]) -> list[Tensor]:
        """`run` for several caches. If it raises, the caches are unchanged."""


@dataclass(frozen=True)
class TransformersDecode:
    """The model's own forward, one cache at a time, because it would need padding for different lengths."""

    model: Any
    guessed_tokens: ClassVar[int] = 0
    max_together: ClassVar[int] = 1

    @torch.inference_mode()
    def run(self, cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        logits: Tensor = self.model(ids, past_key_values=cache, use_cache=True).logits
        return logits[0].float()

    def run_together(self, inputs: Sequence[PassInput]) -> list[Tensor]:
        return [self.run(*each) for each in inputs]


# Each is constructed from (decoder, packed weights), for a decoder that it supports.
IMPLEMENTATIONS = (CudaGraphDecode, DirectDecode)


def candidate_for(decoder: Decoder) -> type[DirectDecode] | None:
    """The first entry of IMPLEMENTATIONS that supports this decoder."""
    return next((candidate for candidate in IMPLEMENTATIONS if candidate.supports(decoder)), None)


@dataclass(frozen=True)
class DecodeComparison:
    """A candidate compared with the model's own forward: divergence in nats per token, and its share of the time, per
    run.
    """

    divergence: float
    ratios: tuple[float, ...]

    @property
    def is_settled(self) -> bool:
        """Whether another measurement would give the same result; on a busy machine it may not."""
        faster = sum(ratio < 1 for ratio in self.ratios) / len(self.ratios)
        is_clear = max(faster, 1 - faster) >= SETTLED_SHARE or len(self.ratios) >= MAX_ROUNDS
        return is_clear or not self.divergence <= MAX_DIVERGENCE

    @property
    def accepts(self) -> bool:
        """Whether the candidate is to be used."""
        return self.is_settled and self.divergence <= MAX_DIVERGENCE and statistics.median(self.ratios) < 1


def compare_implementations(
    decoder: Decoder,
    candidate: DecodeImplementation,
    token_ids: Sequence[int],
    cancelled: CancelCheck = lambda: False,
) -> DecodeComparison:
    """Run the last tokens of a text through both alternately, one by one. Raises Cancelled once cancelled() is true.

    On a CPU it counts this thread's time, which does half of the work on two cores, so that other load does not count.
    """
    transfers = transfer_stream(decoder.device)
    seconds = time.perf_counter if transfers.staged else time.thread_time

    def clock() -> float:
        transfers.synchronize()
        return seconds()

    ids, last = list(token_ids[:-COMPARED_TOKENS]), token_ids[-COMPARED_TOKENS:]
    cache = FusedCache(decoder.geometry, len(ids), COMPARED_TOKENS, decoder.device)
    for held in cache.fused:
        held.set_length(0)
    model = TransformersDecode(decoder.model)
    model.run(cache, ids)

    def timed(implementation: DecodeImplementation, count: int = TIMED_TOKENS) -> tuple[Tensor, float]:
        cache.truncate()
        logits, begun = [], clock()
        for token in last[:count]:
            if cancelled():
                raise Cancelled("comparing decode implementations was interrupted by other work")
            logits.append(implementation.run(cache, [token]))
        return torch.cat(logits).log_softmax(-1), clock() - begun

    (expected, _), (found, _) = timed(model, COMPARED_TOKENS), timed(candidate, COMPARED_TOKENS)  # warms up
    divergence = float((expected.exp() * (expected - found)).sum(-1).mean())
    rounds = [(timed(candidate)[1], timed(model)[1]) for _ in range(ROUNDS)]
    return DecodeComparison(divergence, tuple(candidate_s / model_s for candidate_s, model_s in rounds))


class DecodeSelector:
    """Chooses a loaded model's decode implementation. current: the one to use now.

    allows_rounding: whether weights may be rounded to eight bits (if their file held them in about eight).

    The comparison is saved in a folder with the packed weights, as packing takes ten seconds per billion weights. If it
    is missing, damaged, or too large for memory, they are compared again; until then the model's own forward is used.
    """

    def __init__(self, decoder: Decoder, folder: Path, fingerprint: str, allows_rounding: bool) -> None:
        # The order in which weights are packed depends on the processor and on torch.
        environment = f"{device_name(decoder.device)}-{torch.__version__}-v{VERSION}"
        self._file = folder / f"steps-{fingerprint[:32]}-{environment}.json"
        self._weights_file = self._file.with_suffix(".safetensors")
        self._decoder: Any = decoder
        self._saves_weights = decoder.device.type == "cpu"
        self._allows_rounding = allows_rounding
        self._ratios: tuple[float, ...] = ()
        self._packed: PackedWeights = {}
        self.current: DecodeImplementation = TransformersDecode(decoder.model)
        self._candidate = candidate_for(decoder)
        self.needs_measurement = self._candidate is not None
        if self._candidate is not None:
            self._load(self._candidate)

    def _load(self, candidate: type[DirectDecode]) -> None:
        """Load the result and the packed weights of an earlier process."""
        with suppress(
            OSError, ValueError, TypeError, LookupError, SafetensorError, MemoryError, RuntimeError
        ):
            saved = json.loads(self._file.read_text())
            comparison = DecodeComparison(saved["divergence"], tuple(saved["ratios"]))
            if comparison.accepts:
                packed = load_packed(self._weights_file, saved["checksum"]) if self._saves_weights else {}
                self.current = candidate(self._decoder, packed)
            self._ratios, self.needs_measurement = comparison.ratios, not comparison.is_settled

    def measure(self, token_ids: Sequence[int], cancelled: CancelCheck) -> None:
        """Compare and choose. Raises Cancelled once cancelled() is true; weights packed by then are kept."""
        assert self._candidate is not None, "no implementation supports this decoder"
        self.needs_measurement = False  # an error here would be repeated after every answer
        try:
            pack_weights(self._decoder, self._packed, self._allows_rounding, cancelled)
            implementation = self._candidate(self._decoder, self._packed)
            measured = compare_implementations(self._decoder, implementation, token_ids, cancelled)
        except Cancelled:
            self.needs_measurement = True
            raise
        except BaseException:
            self._packed = {}
            raise
        packed, self._packed = self._packed, {}
        comparison = DecodeComparison(measured.divergence, (*self._ratios, *measured.ratios))
        self._ratios, self.needs_measurement = comparison.ratios, not comparison.is_settled
        if comparison.accepts:
            self.current = implementation
        if packed or not self._saves_weights:  # nothing packed: memory may suffice in the next process
            self._save(comparison, packed)

    def _save(self, comparison: DecodeComparison, packed: PackedWeights) -> None:
        with suppress(OSError, SafetensorError):  # on a full disk each process measures for itself
            make_private_folder(self._file.parent)
            checksum = save_packed(packed, self._weights_file) if packed and comparison.accepts else 0
            saved = json.dumps(asdict(comparison) | {"checksum": checksum}, indent=1, sort_keys=True)
            replace_durably(self._file, saved)
