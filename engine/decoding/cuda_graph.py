"""`CudaGraphDecode`: `DirectDecode` on CUDA, where launching kernels takes longer than running them."""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoding.direct import DirectDecode, PassInput
from ragblend.engine.decoding.packed_weights import PackedWeights
from ragblend.engine.model.decoder import Decoder, TransformersDecoder
from ragblend.engine.model.device import record_calls
from ragblend.engine.scheduling.order import MAX_BEGUN

log = logging.getLogger("ragblend")


@dataclass(frozen=True)
class _Recording:
    """A recorded pass over a cache. buffers: identify the cache's buffers, as recorded.

    play: reads ids (R,) and positions (R,), and writes logits (R, vocab) float32.
    """

    buffers: tuple[Any, ...]
    ids: Tensor
    positions: Tensor
    logits: Tensor
    play: Callable[[], object]


class CudaGraphDecode(DirectDecode):
    """Records one answer's forward pass as a CUDA graph, and replays it until the cache's buffers change."""

    def __init__(self, decoder: TransformersDecoder, packed: PackedWeights) -> None:
        super().__init__(decoder, packed)
        self._can_record = True
        self._recordings: weakref.WeakKeyDictionary[FusedCache, dict[int, _Recording]] = (
            weakref.WeakKeyDictionary()
        )

    @staticmethod
    def supports(decoder: Decoder) -> TypeGuard[TransformersDecoder]:
        return decoder.device.type == "cuda" and DirectDecode.supports(decoder)

    def _run_from(self, inputs: Sequence[PassInput], begins: Sequence[int]) -> list[Tensor]:
        if len(inputs) > 1 or len(inputs[0][1]) not in (1, 1 + self.guessed_tokens) or not self._can_record:
            return super()._run_from(inputs, begins)
        ((cache, token_ids),), (begin,) = inputs, begins
        count = len(token_ids)
        try:
            recording = self._recording_for(cache, begin, count)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError):  # memory may be free the next time
                log.warning("CUDA graphs cannot be recorded here; rows are computed call by call: %s", error)
                self._can_record = False
            cache.truncate(begin - cache.prompt_tokens)
            return super()._run_from(inputs, begins)
        recording.ids.copy_(torch.tensor(list(token_ids)))
        recording.positions.copy_(torch.arange(begin, begin + count))
        recording.play()
        for held in cache.fused:
            held.set_length(begin - held.evicted + count)
        return [recording.logits.clone()]

    def _recording_for(self, cache: FusedCache, begin: int, count: int) -> _Recording:
        """The recording for `count` rows over these buffers, created if necessary. Raises what recording raises."""
        for held in cache.fused:
            held.ensure_room(count)
        buffers = tuple(
            (held.key_buffer.data_ptr(), held.value_buffer.data_ptr(), held.key_buffer.shape, held.evicted)
            for held in cache.fused
        )
        recordings = self._recordings.setdefault(cache, {})
        if count not in recordings or recordings[count].buffers != buffers:
            recordings.pop(count, None)  # frees its memory for the new one
            recordings[count] = self._record(cache, begin, count, buffers)
            while len(self._recordings) > MAX_BEGUN:  # a session's cache outlives its answer
                self._recordings.pop(next(iter(self._recordings)))
        return recordings[count]

    def _record(self, cache: FusedCache, begin: int, count: int, buffers: tuple[Any, ...]) -> _Recording:
        device, reference = self.decoder.device, weakref.ref(cache)
        ids = torch.zeros(count, dtype=torch.int64, device=device)
        positions = torch.arange(begin, begin + count, device=device)
        head: Any = self.decoder.model.lm_head
        logits = torch.empty(count, head.weight.shape[0], device=device)

        def run_pass() -> None:
            held = reference()
            assert held is not None, "a recording is played only with its cache at hand"
            logits.copy_(self.forward([held], ids, positions, [count]))

        return _Recording(buffers, ids, positions, logits, record_calls(device, run_pass))
