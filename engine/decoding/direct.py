"""A decoder's layers over a few rows, by our own loop: what a token of an answer costs.

One row through transformers' layers takes as long in calls and small operations as in products, and torch's attention
kernel reads the keys of one row four times slower than memory gives them. Here a layer is 25 operations, attention is
two batched products over the cache's own buffers, and weights that lie on sixteen levels are read as such
(`fourbit.py`), others as eight bits (`eightbit.py`). On CUDA, where calls take longer than all else, they are recorded
once for each answer (`CudaGraphDecode`).

The layers known are those of Llama, Qwen 2 and Qwen 3: normed, rotated by halves, gated. Whether a model that
looks like one is one is measured (`implementations.py`), so nothing is taken on trust.
"""

import inspect
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ragblend.engine.cache import FusedCache, FusedLayer
from ragblend.engine.decoding.eightbit import EightBit, eight_bit
from ragblend.engine.decoding.fourbit import FourBit, four_bit, multiplies_four_bit
from ragblend.engine.model.decoder import FULL, Decoder, TransformersDecoder, constant_rope_tokens
from ragblend.engine.model.device import available_bytes, record_calls
from ragblend.engine.model.rope import HALF
from ragblend.engine.scheduling.order import MOST_BEGUN
from ragblend.kvstore.errors import Cancelled

log = logging.getLogger("ragblend")
MAX_FREE_MEMORY_SHARE = 0.25
Product = Callable[[Tensor], Tensor]
Packed = FourBit | EightBit
PackedWeights = dict[str, Packed | None]  # by layer and name, and the output layer's; None: it stays as it is
HEAD = "head"
DEVICES = "cpu", "cuda"
Read = tuple[FusedCache, Sequence[int]]  # what a cache is to read next
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION, _HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True)
class Norm:
    """A root mean square norm over the last size."""

    weight: Tensor
    epsilon: float

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True)
class RowLayer:
    """One layer's parts. qkv: queries, keys and values, one behind the other; gated: gate and up alike."""

    before: Norm
    qkv: Product
    head_norms: tuple[Norm, Norm] | None  # of queries and of keys
    scaling: float
    out: Product
    between: Norm
    gated: Product
    activation: Product
    down: Product


class Places:
    """Where an answer's next rows go in each layer, and which of its buffers' rows they do not see.

    positions (count,): theirs in the sequence. Made once for all layers that hold as much.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions, self.count = positions, positions.numel()
        self._made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def of(self, held: FusedLayer, group: int) -> tuple[Tensor, Tensor]:
        """Rows (count,) of its buffers, with room for them, and addends (1, group * count or 1, capacity) of scores."""
        begin, capacity = held.keys.shape[2], held.made_room(self.count)
        if (begin, capacity) not in self._made:
            at = self.positions - held.evicted
            unseen = torch.arange(capacity, device=at.device) > at[:, None]
            addends = held.keys.new_zeros(unseen.shape).masked_fill_(unseen, -math.inf)
            self._made[begin, capacity] = at, (addends if self.count == 1 else addends.repeat(group, 1))[None]
        return self._made[begin, capacity]


class DirectDecode:
    """A decoder's layers, taken apart; the weights that were not packed are the decoder's own."""

    guessed_tokens: ClassVar[int] = 3
    together: ClassVar[int] = MOST_BEGUN

    def __init__(self, decoder: TransformersDecoder, found: PackedWeights) -> None:
        """A decoder that it `knows`; found: its weights that were packed."""
        self.decoder = decoder
        self.layers = [_row_layer(layer, f"{i}.", found) for i, layer in enumerate(decoder.layers)]
        head: Any = decoder.model.lm_head
        self.head = _product([head], [found.get(HEAD)])

    @staticmethod
    def knows(decoder: Decoder) -> TypeGuard[TransformersDecoder]:
        """Whether the decoder is where this was tried, and its layers look like those that are known."""
        if not isinstance(decoder, TransformersDecoder):
            return False
        known = decoder.device.type in DEVICES and set(decoder.layer_types) == {FULL}
        known = known and set(decoder.layouts) == {HALF} and constant_rope_tokens(decoder.config) is None
        return known and all(_is_known(layer, decoder) for layer in decoder.layers)

    def run(self, cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        """Read these tokens behind what the cache holds; returns the logits behind each, (n, vocab) float32."""
        return self.run_together([(cache, token_ids)])[0]

    @torch.inference_mode()
    def run_together(self, reads: Sequence[Read]) -> list[Tensor]:
        """The same for several answers in one pass: rows share the products, and each answer has its own attention.

        Where it fails, the caches hold what they held.
        """
        begins = [cache.get_seq_length() for cache, _ in reads]
        try:
            return self._passed(reads, begins)
        except BaseException:
            for (cache, _), begin in zip(reads, begins, strict=True):
                cache.truncate(begin - cache.prompt_tokens)
            raise

    def _passed(self, reads: Sequence[Read], begins: Sequence[int]) -> list[Tensor]:
        counts = [len(token_ids) for _, token_ids in reads]
        ids = torch.tensor([token for _, token_ids in reads for token in token_ids])
        places = [range(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
        positions = torch.tensor([each for place in places for each in place])
        where, caches = self.decoder.device, [cache for cache, _ in reads]
        logits = self.through(caches, ids.to(where), positions.to(where), counts)
        return list(logits.split(counts))

    def through(
        self, caches: Sequence[FusedCache], ids: Tensor, positions: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """Tokens ids (R,), of which so many are each cache's next, at positions (R,) -> logits (R, vocab) float32."""
        decoder, places = self.decoder, [Places(each) for each in positions.split(list(counts))]
        hidden = decoder.embed(ids)[0]
        cos, sin = decoder.rotary(FULL, positions, hidden)
        sin[..., : sin.shape[-1] // 2].neg_()  # by halves: they are swapped, and the first is taken off
        rotary = cos[0, :, None], sin[0, :, None]
        for number, part in enumerate(self.layers):
            held = [cache.fused[number] for cache in caches]
            hidden = hidden + _attended(part, held, places, part.before(hidden), rotary)
            gate, up = part.gated(part.between(hidden)).chunk(2, -1)
            hidden = hidden + part.down(part.activation(gate) * up)
        return decoder.head(hidden[None], self.head)


class CudaGraphDecode(DirectDecode):
    """The same; what one answer's next rows have the device do is recorded, as long as its buffers are the same."""

    def __init__(self, decoder: TransformersDecoder, found: PackedWeights) -> None:
        super().__init__(decoder, found)
        self._records = True
        self._recordings: weakref.WeakKeyDictionary[FusedCache, dict[int, _Recording]] = (
            weakref.WeakKeyDictionary()
        )

    def _passed(self, reads: Sequence[Read], begins: Sequence[int]) -> list[Tensor]:
        if len(reads) > 1 or len(reads[0][1]) not in (1, 1 + self.guessed_tokens) or not self._records:
            return super()._passed(reads, begins)
        ((cache, token_ids),), (begin,), count = reads, begins, len(reads[0][1])
        for held in cache.fused:
            held.made_room(count)
        buffers = tuple(
            (held.key_buffer.data_ptr(), held.value_buffer.data_ptr(), held.key_buffer.shape, held.evicted)
            for held in cache.fused
        )
        recordings = self._recordings.setdefault(cache, {})
        if count not in recordings or recordings[count].buffers != buffers:
            recordings.pop(count, None)  # its memory serves the next
            try:
                recordings[count] = self._recorded(cache, begin, count, buffers)
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError):  # which is of this moment
                    log.warning("rows cannot be recorded here, and are computed call by call: %s", error)
                    self._records = False
                cache.truncate(begin - cache.prompt_tokens)
                return super()._passed(reads, begins)
            while len(self._recordings) > MOST_BEGUN:  # a session's cache outlives its answer
                self._recordings.pop(next(iter(self._recordings)))
        found = recordings[count]
        found.ids.copy_(torch.tensor(list(token_ids)))
        found.positions.copy_(torch.arange(begin, begin + count))
        found.play()
        for held in cache.fused:
            held.set_length(begin - held.evicted + count)
        return [found.logits.clone()]

    def _recorded(self, cache: FusedCache, begin: int, count: int, buffers: tuple[Any, ...]) -> "_Recording":
        device, of = self.decoder.device, weakref.ref(cache)
        ids = torch.zeros(count, dtype=torch.int64, device=device)
        positions = torch.arange(begin, begin + count, device=device)
        head: Any = self.decoder.model.lm_head
        logits = torch.empty(count, head.weight.shape[0], device=device)

        def once() -> None:
            held = of()
            assert held is not None, "played by whoever has it"
            logits.copy_(self.through([held], ids, positions, [count]))

        return _Recording(buffers, ids, positions, logits, record_calls(device, once))


@dataclass(frozen=True)
class _Recording:
    """play: reads ids (R,) at positions (R,), writes logits (R, vocab) float32. buffers: those that it writes to."""

    buffers: tuple[Any, ...]
    ids: Tensor
    positions: Tensor
    logits: Tensor
    play: Callable[[], object]


def rows_of(decoder: TransformersDecoder, found: PackedWeights) -> DirectDecode:
    """What is fastest where that decoder is."""
    return (DirectDecode if decoder.device.type == "cpu" else CudaGraphDecode)(decoder, found)


def _attended(
    part: RowLayer,
    held: Sequence[FusedLayer],
    places: Sequence[Places],
    rows: Tensor,
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    """(R, hidden) -> (R, hidden); of the rows those at its places are each one's whose KV is held."""
    heads, size = held[0].keys.shape[1], held[0].keys.shape[3]
    cos, sin = rotary
    qkv = part.qkv(rows).view(rows.shape[0], -1, size)  # (R, N + 2 H, D)
    if part.head_norms is not None:
        of_queries, of_keys = part.head_norms
        both = torch.cat([of_queries(qkv[:, : -2 * heads]), of_keys(qkv[:, -2 * heads : -heads])], 1)
    else:
        both = qkv[:, :-heads]
    both, values = torch.addcmul(both * cos, both.roll(size // 2, -1), sin), qkv[:, -heads:]
    if len(held) == 1:
        return part.out(_attended_alone(part.scaling, held[0], places[0], both, values))
    counts = [place.count for place in places]
    each = zip(held, places, both.split(counts), values.split(counts), strict=True)
    return part.out(torch.cat([_attended_alone(part.scaling, *given) for given in each]))


def _attended_alone(scaling: float, held: FusedLayer, places: Places, both: Tensor, values: Tensor) -> Tensor:
    """Queries and keys (R, N + H, D), values (R, H, D) of one answer's rows -> (R, N * D), its KV held."""
    count, heads, size = values.shape
    at, unseen = places.of(held, (both.shape[1] - heads) // heads)
    held.write(at, both[None, :, -heads:].transpose(1, 2), values[None].transpose(1, 2))
    queries = both[:, :-heads].reshape(count, heads, -1, size).permute(1, 2, 0, 3).reshape(heads, -1, size)
    # Of the whole buffers: products over a part are four times slower in bfloat16, and of a new shape each time.
    behind = held.key_buffer[0].transpose(1, 2)
    weights = torch.softmax(torch.baddbmm(unseen, queries, behind, alpha=scaling), -1)  # (H, G * R, capacity)
    attended = torch.bmm(weights, held.value_buffer[0])
    return attended.view(heads, -1, count, size).permute(2, 0, 1, 3).reshape(count, -1)


def _is_known(layer: nn.Module, decoder: Decoder) -> bool:
    if {name for name, child in layer.named_children() if any(True for _ in child.parameters())} != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    within = {name for name, _ in attention.named_children()}  # type: ignore[union-attr]
    sized = {name.split(".")[0] for name, _ in mlp.named_parameters()}  # type: ignore[union-attr]
    norms = within & _HEAD_NORMS
    whole = all(getattr(attention, name).weight.shape == (decoder.geometry.key_size,) for name in norms)
    linear = [getattr(attention, name, None) for name in _ATTENTION] + [
        getattr(mlp, name, None) for name in _MLP
    ]
    return (
        within - norms == _ATTENTION
        and norms in (set(), _HEAD_NORMS)
        and whole
        and sized == _MLP
        and all(isinstance(each, nn.Linear) for each in linear)
        and hasattr(attention, "scaling")
        # What asks for positions besides its rotary tables may change beyond those that are measured (Ministral 3).
        and "position_ids" not in inspect.signature(attention.forward).parameters  # type: ignore[union-attr]
        and hasattr(mlp, "act_fn")
        and all(
            hasattr(norm, "variance_epsilon")
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
    )


@torch.inference_mode()
def pack_weights(
    decoder: TransformersDecoder,
    found: PackedWeights,
    rounds: bool,
    leave: Callable[[], bool] = lambda: False,
) -> None:
    """Look at all weights that found lacks, and add them: in four bits where they lie on sixteen levels, else, where it
    rounds, in eight.

    Nothing is added where memory does not allow a second copy, or the device has no such products. Raises Cancelled
    when leave() says so.
    """
    if decoder.device.type != "cpu":
        return
    named: dict[str, Any] = {}
    for number, layer in enumerate(decoder.layers):
        for part, names in (("self_attn", _ATTENTION), ("mlp", _MLP)):
            named |= {f"{number}.{name}": getattr(getattr(layer, part), name) for name in names}
    named[HEAD] = decoder.model.lm_head  # last: who is told to leave it begins it anew, and it is the largest
    size = sum(linear.weight.numel() for linear in named.values())
    if not found and not (multiplies_four_bit() and has_room(size)):
        return

    def go_on() -> None:
        if leave():
            raise Cancelled("somebody needs the device")

    for name, linear in named.items():
        if name not in found:
            go_on()
            found[name] = four_bit(linear.weight, go_on) or (
                eight_bit(linear.weight, go_on) if rounds else None
            )


def has_room(nbytes: int) -> bool:
    """Whether memory allows a copy of weights of this size."""
    return nbytes <= MAX_FREE_MEMORY_SHARE * available_bytes()


def _row_layer(layer: nn.Module, name: str, found: PackedWeights) -> RowLayer:
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    is_normed = hasattr(attention, "q_norm")

    def product(part: Any, *names: str) -> Product:
        return _product([getattr(part, each) for each in names], [found.get(name + each) for each in names])

    return RowLayer(
        _norm(layer.input_layernorm),
        product(attention, "q_proj", "k_proj", "v_proj"),
        (_norm(attention.q_norm), _norm(attention.k_norm)) if is_normed else None,
        float(attention.scaling),
        product(attention, "o_proj"),
        _norm(layer.post_attention_layernorm),
        product(mlp, "gate_proj", "up_proj"),
        mlp.act_fn,
        product(mlp, "down_proj"),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def _product(linears: Sequence[nn.Linear], packed: Sequence[Packed | None]) -> Product:
    """What these make of the same rows, one behind the other."""
    if (whole := _joined(packed)) is not None:
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        return _biased(whole, torch.cat(biases) if biases else None)
    each: list[Product] = [
        linear if one is None else _biased(one, linear.bias)
        for linear, one in zip(linears, packed, strict=True)
    ]
    return each[0] if len(each) == 1 else lambda rows: torch.cat([product(rows) for product in each], -1)


def _joined(packed: Sequence[Packed | None]) -> Packed | None:
    fours = [each for each in packed if isinstance(each, FourBit)]
    if len(fours) == len(packed):
        return FourBit.joined(fours)
    eights = [each for each in packed if isinstance(each, EightBit)]
    return EightBit.joined(eights) if len(eights) == len(packed) else None


def _biased(packed: Packed, bias: Tensor | None) -> Product:
    return packed if bias is None else lambda rows: packed(rows) + bias
