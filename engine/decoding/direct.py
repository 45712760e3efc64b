"""`DirectDecode`: runs a decoder's layers over a few rows by itself, several times faster than transformers does.

For one row, transformers' calls and small operations take as long as the products, and torch's attention kernel reads
the keys four times slower than memory allows. Here a layer is 25 operations, attention is two batched products over the
cache's own buffers, and packed weights (`packed_weights.py`) are multiplied as they are.

It supports the layers of Llama, Qwen 2 and Qwen 3: normed, half-split rotary, gated. `implementations.py` measures
whether it gives the model's own logits before it is used.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ragblend.engine.cache import FusedCache, FusedLayer
from ragblend.engine.decoding.eightbit import EightBit
from ragblend.engine.decoding.fourbit import FourBit
from ragblend.engine.decoding.packed_weights import (
    ATTENTION_LINEARS,
    HEAD,
    MLP_LINEARS,
    PackedWeight,
    PackedWeights,
)
from ragblend.engine.model.decoder import FULL, Decoder, TransformersDecoder, constant_rope_tokens
from ragblend.engine.model.rope import HALF
from ragblend.engine.scheduling.order import MAX_BEGUN

Product = Callable[[Tensor], Tensor]
PassInput = tuple[FusedCache, Sequence[int]]  # a cache, and the token ids to append to it
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_HEAD_NORMS = {"q_norm", "k_norm"}


@dataclass(frozen=True)
class RmsNorm:
    """A root mean square norm over the last dimension."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> "RmsNorm":
        return cls(module.weight, float(module.variance_epsilon))

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True)
class LayerParts:
    """The operations of one layer. qkv: queries, keys and values, concatenated; gate_up: gate and up, likewise."""

    input_norm: RmsNorm
    qkv: Product
    head_norms: tuple[RmsNorm, RmsNorm] | None  # of queries and of keys
    scaling: float
    out: Product
    post_norm: RmsNorm
    gate_up: Product
    activation: Product
    down: Product

    @classmethod
    def of(cls, layer: nn.Module, prefix: str, packed: PackedWeights) -> "LayerParts":
        """prefix: of this layer's names in `packed`."""
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp

        def product(part: Any, *names: str) -> Product:
            linears = [getattr(part, name) for name in names]
            return _product(linears, [packed.get(prefix + name) for name in names])

        has_norms = hasattr(attention, "q_norm")
        return cls(
            RmsNorm.of(layer.input_layernorm),
            product(attention, "q_proj", "k_proj", "v_proj"),
            (RmsNorm.of(attention.q_norm), RmsNorm.of(attention.k_norm)) if has_norms else None,
            float(attention.scaling),
            product(attention, "o_proj"),
            RmsNorm.of(layer.post_attention_layernorm),
            product(mlp, "gate_proj", "up_proj"),
            mlp.act_fn,
            product(mlp, "down_proj"),
        )


class RowPositions:
    """The buffer rows that one answer's new rows are written to in each layer, and the mask of those they must not see.

    positions (R,): in the sequence. Computed once for all layers that hold the same number of rows.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions, self.count = positions, positions.numel()
        self._by_layer_size: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def in_layer(self, held: FusedLayer, group: int) -> tuple[Tensor, Tensor]:
        """Buffer rows (R,), growing the buffers if necessary, and the additive mask (1, group * R or 1, capacity)."""
        begin, capacity = held.keys.shape[2], held.ensure_room(self.count)
        if (begin, capacity) not in self._by_layer_size:
            at = self.positions - held.evicted
            unseen = torch.arange(capacity, device=at.device) > at[:, None]
            mask = held.keys.new_zeros(unseen.shape).masked_fill_(unseen, -math.inf)
            mask = mask if self.count == 1 else mask.repeat(group, 1)
            self._by_layer_size[begin, capacity] = at, mask[None]
        return self._by_layer_size[begin, capacity]


class DirectDecode:
    """Runs a decoder's layers itself. Weights that are not packed are shared with the decoder."""

    guessed_tokens: ClassVar[int] = 3
    max_together: ClassVar[int] = MAX_BEGUN

    def __init__(self, decoder: TransformersDecoder, packed: PackedWeights) -> None:
        """decoder: one that `supports` accepts."""
        self.decoder = decoder
        self.layers = [LayerParts.of(layer, f"{i}.", packed) for i, layer in enumerate(decoder.layers)]
        head: Any = decoder.model.lm_head
        self.head = _product([head], [packed.get(HEAD)])

    @staticmethod
    def supports(decoder: Decoder) -> TypeGuard[TransformersDecoder]:
        """Whether it was tested with layers of these types on this type of device."""
        return (
            isinstance(decoder, TransformersDecoder)
            and decoder.device.type in ("cpu", "cuda")
            and set(decoder.layer_types) == {FULL}
            and set(decoder.layouts) == {HALF}
            and constant_rope_tokens(decoder.config) is None
            and all(_is_supported(layer, decoder) for layer in decoder.layers)
        )

    def run(self, cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        return self.run_together([(cache, token_ids)])[0]

    @torch.inference_mode()
    def run_together(self, inputs: Sequence[PassInput]) -> list[Tensor]:
        """One pass for several answers: rows share the products, each answer has its own attention."""
        begins = [cache.get_seq_length() for cache, _ in inputs]
        try:
            return self._run_from(inputs, begins)
        except BaseException:
            for (cache, _), begin in zip(inputs, begins, strict=True):
                cache.truncate(begin - cache.prompt_tokens)
            raise

    def _run_from(self, inputs: Sequence[PassInput], begins: Sequence[int]) -> list[Tensor]:
        counts = [len(token_ids) for _, token_ids in inputs]
        ids = torch.tensor([token for _, token_ids in inputs for token in token_ids])
        ranges = [range(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
        positions = torch.tensor([position for each in ranges for position in each])
        device, caches = self.decoder.device, [cache for cache, _ in inputs]
        return list(self.forward(caches, ids.to(device), positions.to(device), counts).split(counts))

    def forward(
        self, caches: Sequence[FusedCache], ids: Tensor, positions: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """ids and positions (R,), counts[i] of them for caches[i] -> logits (R, vocab) float32."""
        decoder = self.decoder
        row_positions = [RowPositions(part) for part in positions.split(list(counts))]
        hidden = decoder.embed(ids)[0]
        cos, sin = decoder.rotary(FULL, positions, hidden)
        sin[..., : sin.shape[-1] // 2].neg_()  # the halves are swapped, and the first one is subtracted
        rotary = cos[0, :, None], sin[0, :, None]
        for number, layer in enumerate(self.layers):
            held = [cache.fused[number] for cache in caches]
            hidden = hidden + _attention(layer, held, row_positions, layer.input_norm(hidden), rotary)
            gate, up = layer.gate_up(layer.post_norm(hidden)).chunk(2, -1)
            hidden = hidden + layer.down(layer.activation(gate) * up)
        return decoder.head(hidden[None], self.head)


def _attention(
    layer: LayerParts,
    held: Sequence[FusedLayer],
    row_positions: Sequence[RowPositions],
    rows: Tensor,
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    """(R, hidden) -> (R, hidden); rows of the same answer attend to that answer's KV."""
    heads, size = held[0].keys.shape[1], held[0].keys.shape[3]
    cos, sin = rotary
    qkv = layer.qkv(rows).view(rows.shape[0], -1, size)  # (R, N + 2 H, D)
    if layer.head_norms is not None:
        norm_queries, norm_keys = layer.head_norms
        queries, keys = qkv[:, : -2 * heads], qkv[:, -2 * heads : -heads]
        queries_keys = torch.cat([norm_queries(queries), norm_keys(keys)], 1)
    else:
        queries_keys = qkv[:, :-heads]
    queries_keys = torch.addcmul(queries_keys * cos, queries_keys.roll(size // 2, -1), sin)
    values = qkv[:, -heads:]
    if len(held) == 1:
        return layer.out(_attention_of_one(layer.scaling, held[0], row_positions[0], queries_keys, values))
    counts = [positions.count for positions in row_positions]
    answers = zip(held, row_positions, queries_keys.split(counts), values.split(counts), strict=True)
    return layer.out(torch.cat([_attention_of_one(layer.scaling, *answer) for answer in answers]))


def _attention_of_one(
    scaling: float, held: FusedLayer, row_positions: RowPositions, queries_keys: Tensor, values: Tensor
) -> Tensor:
    """Queries and keys (R, N + H, D), values (R, H, D) of one answer's rows -> (R, N * D)."""
    count, heads, size = values.shape
    at, mask = row_positions.in_layer(held, (queries_keys.shape[1] - heads) // heads)
    held.write(at, queries_keys[None, :, -heads:].transpose(1, 2), values[None].transpose(1, 2))
    queries = queries_keys[:, :-heads].reshape(count, heads, -1, size)
    queries = queries.permute(1, 2, 0, 3).reshape(heads, -1, size)
    # Over the whole buffers: products over a part are four times slower in bfloat16, and each has another shape.
    keys = held.key_buffer[0].transpose(1, 2)
    weights = torch.softmax(torch.baddbmm(mask, queries, keys, alpha=scaling), -1)  # (H, G * R, capacity)
    attended = torch.bmm(weights, held.value_buffer[0])
    return attended.view(heads, -1, count, size).permute(2, 0, 1, 3).reshape(count, -1)


def _is_supported(layer: nn.Module, decoder: Decoder) -> bool:
    parts = {name for name, child in layer.named_children() if any(True for _ in child.parameters())}
    if parts != _LAYER_PARTS:
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    in_attention = {name for name, _ in attention.named_children()}
    in_mlp = {name.split(".")[0] for name, _ in mlp.named_parameters()}
    norms = in_attention & _HEAD_NORMS
    head_shape = (decoder.geometry.key_size,)
    norms_whole_head = all(getattr(attention, name).weight.shape == head_shape for name in norms)
    linears = [getattr(attention, name, None) for name in ATTENTION_LINEARS]
    linears += [getattr(mlp, name, None) for name in MLP_LINEARS]
    layer_norms = layer.input_layernorm, layer.post_attention_layernorm
    return (
        in_attention - norms == ATTENTION_LINEARS
        and norms in (set(), _HEAD_NORMS)
        and norms_whole_head
        and in_mlp == MLP_LINEARS
        and all(isinstance(linear, nn.Linear) for linear in linears)
        and hasattr(attention, "scaling")
        # Attention that takes positions beside the rotary tables may change beyond the measured ones (Ministral 3).
        and "position_ids" not in inspect.signature(attention.forward).parameters
        and hasattr(mlp, "act_fn")
        and all(hasattr(norm, "variance_epsilon") for norm in layer_norms)
    )


def _product(linears: Sequence[nn.Linear], packed: Sequence[PackedWeight | None]) -> Product:
    """A function that multiplies rows by all these linear layers, and concatenates the outputs."""
    if (whole := _concatenated(packed)) is not None:
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        return _with_bias(whole, torch.cat(biases) if biases else None)
    each: list[Product] = [
        linear if one is None else _with_bias(one, linear.bias)
        for linear, one in zip(linears, packed, strict=True)
    ]
    return each[0] if len(each) == 1 else lambda rows: torch.cat([product(rows) for product in each], -1)


def _concatenated(packed: Sequence[PackedWeight | None]) -> PackedWeight | None:
    fours = [each for each in packed if isinstance(each, FourBit)]
    if len(fours) == len(packed):
        return FourBit.concatenated(fours)
    eights = [each for each in packed if isinstance(each, EightBit)]
    return EightBit.concatenated(eights) if len(eights) == len(packed) else None


def _with_bias(packed: PackedWeight, bias: Tensor | None) -> Product:
    return packed if bias is None else lambda rows: packed(rows) + bias
