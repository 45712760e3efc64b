"""A model as parts: embedding, layers, rotary tables, head. Only this file uses transformers' names for them.

`Decoder` is the interface for any runtime. `TransformersDecoder` calls a layer as transformers does, with a cache whose
`update` is ours; so every RoPE decoder whose layers take `position_embeddings` works, quantised or not, and no model
file is copied or patched.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ragblend.engine.kernels import available
from ragblend.engine.model.attention import (
    OWN_ATTENTION,
    OWN_EAGER,
    AttentionCollector,
    CollectAttention,
    ScatteredRows,
    additive_mask,
    causal_mask,
    masked_from,
    position_mask,
    tiles,
)
from ragblend.engine.model.convolution import convolution_heads, use_own_convolution
from ragblend.engine.model.rope import HALF, Rope
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.errors import UnsupportedModelError

FULL, SLIDING, CONVOLUTION = "full_attention", "sliding_attention", "conv"
# Attribute names of a model's parts; LFM2's models have the second ones.
NORM_NAMES, ROTARY_NAMES = ("norm", "embedding_norm"), ("rotary_emb", "pos_emb")
SAME_IN_ALL_LAYERS = {"head_dim", "num_key_value_heads", "sliding_window"}
# RoPE types whose frequencies change with the sequence's length, and are constant up to `constant_rope_tokens`.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# More rows than this pass through a layer in several blocks, which keeps activations small beside the KV. Results are
# the same: a row sees only what is before it, and blocks are in order.
BLOCK_ROWS = 1024
AttentionArguments = dict[str, Any]  # mask, tiles, scattered, collector


@dataclass(frozen=True)
class RowBlock:
    """Rows being computed: (R,) positions, and by layer type their rotary tables and attention arguments.

    arguments, collecting_arguments: the attention arguments without and with collection of the last rows' attention;
    the latter may be empty. total_tokens: of the sequence, or of the beginning that the rows may see; seen (S,):
    positions of the keys that attention gets, None for all.
    """

    rows: Tensor
    rotary: dict[str, tuple[Tensor, Tensor]]
    arguments: dict[str, AttentionArguments]
    collecting_arguments: dict[str, AttentionArguments]
    total_tokens: int
    seen: Tensor | None = None


class Decoder(ABC):
    """A causal language model taken apart, on one device.

    layer_types: by layer, one of `known_types`; ropes: inv_freq by layer type; layouts: by layer, detected by the gate;
    tiles: whether attention takes rows in tiles; kernels: whether Triton kernels are used where they work;
    passes_arguments: whether layers pass arguments of ours on to attention; shows_attention: whether attention can be
    collected. error_factor: the factor on the error that the gate allows between `own_logits` and the parts, for parts
    that use other kernels than the model.
    """

    model: nn.Module
    error_factor = 1.0
    known_types: tuple[str, ...] = (FULL, SLIDING)

    def __init__(
        self, config: Any, dtype: str, attention: str, device: torch.device, passes_arguments: bool
    ) -> None:
        """attention: name of the implementation that layers call, and pass arguments on to if passes_arguments."""
        self.config, self.attention, self.device = config, attention, device
        self.geometry = kv_geometry(config, dtype)
        self.layer_types = _layer_types(config, self.geometry.layers, self.known_types)
        self.window: int | None = getattr(config, "sliding_window", None)
        self.layouts = [HALF] * self.geometry.layers
        self.ropes: dict[str, Tensor] = {}
        self.tiles = attention == OWN_ATTENTION and passes_arguments and device.type == "cpu"
        self.kernels = device.type == "cuda"
        self.passes_arguments = attention == OWN_ATTENTION and passes_arguments
        self.shows_attention = attention in (OWN_ATTENTION, OWN_EAGER) and passes_arguments

    def disable_attention_collection(self) -> None:
        """Disable what needs arguments of ours, for layers that do not pass arguments on to their attention."""
        self.shows_attention = self.tiles = self.passes_arguments = False

    @property
    def attention_layers(self) -> list[int]:
        """All layers but the convolutions."""
        return [layer for layer, kind in enumerate(self.layer_types) if kind != CONVOLUTION]

    def rope(self, layer: int) -> Rope:
        return Rope(self.ropes[self.layer_types[layer]], self.layouts[layer])

    def has_kernels(self, name: str, *more: object) -> bool:
        """Whether the kernels of that module in `kernels` work here for the keys and values of all layers.

        more: the last arguments of the module's `supports`.
        """
        if not self.kernels or not available(self.device):
            return False
        g, supports = self.geometry, import_module(f"ragblend.engine.kernels.{name}").supports
        ropes = {(rope.size // 2, rope.layout) for rope in map(self.rope, range(g.layers))}
        return all(
            supports(self.device, g.dtype, g.key_size, g.value_size, *each, *more) for each in sorted(ropes)
        )

    @property
    @abstractmethod
    def attention_share(self) -> float:
        """Attention's share of a layer's parameters: at most the cost of computing only a layer's keys and values."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """(R,) ids -> (1, R, hidden)."""

    @abstractmethod
    def rotary(self, kind: str, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for layers of that type and rows (R,), in hidden's dtype."""

    @abstractmethod
    def run_layer(
        self, layer: int, hidden: Tensor, block: RowBlock, cache: Any, collect: CollectAttention | None = None
    ) -> Tensor:
        """(1, R, hidden) -> (1, R, hidden), through the cache's `update`. collect: called with the attention."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """(1, R, hidden) -> (R, vocab) float32 logits."""

    @abstractmethod
    def own_logits(self, token_ids: Sequence[int]) -> Tensor:
        """(vocab,) logits after the last token by the model's own forward: the gate's reference."""

    def row_block(
        self,
        rows: Tensor,
        total_tokens: int,
        hidden: Tensor,
        collected: int = 0,
        absent: Tensor | None = None,
    ) -> RowBlock:
        """Rotary tables and masks of these rows in a sequence of total_tokens.

        collected: the number of last rows whose attention can be collected; absent (T,) bool: keys that no row sees.
        """
        rotary: dict[str, tuple[Tensor, Tensor]] = {}
        arguments: dict[str, AttentionArguments] = {}
        collecting_arguments: dict[str, AttentionArguments] = {}
        for kind in sorted(set(self.layer_types)):
            given = rows, total_tokens, kind, hidden.dtype, absent
            rotary[kind] = self.rotary(kind, rows, hidden)
            arguments[kind] = self._arguments_of(*given)
            if collected and kind != CONVOLUTION:
                collecting_arguments[kind] = self._collecting_arguments(*given, collected)
        return RowBlock(rows, rotary, arguments, collecting_arguments, total_tokens)

    def with_keys(self, block: RowBlock, keys: Tensor, dtype: torch.dtype) -> RowBlock:
        """The same block, restricted to the keys at positions (S,), which include those of the rows themselves."""
        arguments: dict[str, AttentionArguments] = {
            kind: {"attention_mask": additive_mask(causal_mask(block.rows, keys, self._window(kind)), dtype)}
            for kind in block.rotary
        }
        return replace(block, arguments=arguments, collecting_arguments={}, seen=keys)

    def attention_arguments(
        self, layer: int, block: RowBlock, collect: CollectAttention | None
    ) -> AttentionArguments:
        """The attention arguments of one layer."""
        kind = self.layer_types[layer]
        if collect is None or not block.collecting_arguments:
            return block.arguments[kind]
        arguments = block.collecting_arguments[kind]
        return arguments | {"collector": replace(arguments["collector"], collect=collect)}

    def _window(self, kind: str) -> int | None:
        """Tokens that a row sees in layers of that type, its own included; None for all before it."""
        return self.window if kind == SLIDING else None

    def _arguments_of(
        self, rows: Tensor, tokens: int, kind: str, dtype: torch.dtype, absent: Tensor | None
    ) -> AttentionArguments:
        window = self._window(kind)
        if kind == CONVOLUTION:
            return {"attention_mask": None}
        if self.attention not in (OWN_ATTENTION, "sdpa"):
            # Eager (soft caps, sinks) applies only the mask that it is given.
            return {"attention_mask": additive_mask(position_mask(rows, tokens, window, absent), dtype)}
        if rows.numel() == tokens and (window is None or window >= tokens):
            return {"attention_mask": None}  # plain causal attention
        if self.tiles:
            return {"attention_mask": None, "tiles": tiles(rows, window, dtype, absent)}
        if absent is None and self._has_kernel(dtype, window is not None):
            return {"attention_mask": None, "scattered": ScatteredRows(rows, window)}
        return {"attention_mask": position_mask(rows, tokens, window, absent)}

    def _has_kernel(self, dtype: torch.dtype, windowed: bool) -> bool:
        """Whether Triton's kernel works here for such heads."""
        usable = self.kernels and self.passes_arguments and available(self.device)
        if not usable or self.geometry.key_size != self.geometry.value_size:
            return False
        from ragblend.engine.kernels.rows_attention import supports

        group = self.config.num_attention_heads // _attention_heads(self.config)
        return supports(self.device, dtype, self.geometry.key_size, group, windowed)

    def _collecting_arguments(
        self, rows: Tensor, tokens: int, kind: str, dtype: torch.dtype, absent: Tensor | None, collected: int
    ) -> AttentionArguments:
        """The attention arguments with a collector for the last rows, to which only the collector's mask applies."""
        first, last = rows[:-collected], rows[-collected:]
        window = self._window(kind)
        least = int(last[0]) + 1
        start = 0 if window is None else max(0, least - window)
        mask = additive_mask(position_mask(last, tokens, window, absent, start), dtype)[0, 0]
        masked_from_key = masked_from(start, least, tokens, window, absent)
        of = rows if self.attention == OWN_EAGER else first
        arguments: AttentionArguments = {"attention_mask": None}
        if of.numel():
            arguments = self._arguments_of(of, tokens, kind, dtype, absent)
        return arguments | {"collector": AttentionCollector(collected, start, mask, masked_from_key)}


class TransformersDecoder(Decoder):
    """A model of transformers. Raises UnsupportedModelError for an unknown structure."""

    known_types = (FULL, SLIDING, CONVOLUTION)

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self.model = model
        self.base = _base_of(model)
        self._norm, self._rotary = _part(self.base, NORM_NAMES), _part(self.base, ROTARY_NAMES)
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        self.layers: list[nn.Module] = list(self.base.layers)[: config.num_hidden_layers]  # type: ignore[arg-type]
        arguments = inspect.signature(self.layers[0].forward).parameters.values()
        passes_arguments = any(each.kind is each.VAR_KEYWORD for each in arguments)
        device = next(model.parameters()).device
        super().__init__(config, dtype, config._attn_implementation, device, passes_arguments)
        self.ropes = _ropes(self._rotary, set(self.layer_types))
        for layer, kind in zip(self.layers, self.layer_types, strict=False):
            if kind == CONVOLUTION:
                use_own_convolution(layer)

    @property
    def attention_share(self) -> float:
        layer = self.layers[self.attention_layers[:2][-1]]
        attention = sum(p.numel() for name, p in layer.named_parameters() if "attn" in name)
        return attention / max(1, sum(p.numel() for p in layer.parameters()))

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.base.embed_tokens(token_ids[None])  # type: ignore[operator]
        multiplier = getattr(self.config, "embedding_multiplier", None)
        return embedded if multiplier is None else embedded * multiplier

    def rotary(self, kind: str, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        kind = _rotated_kind(kind)
        by_kind = (kind,) if hasattr(self._rotary, f"{kind}_inv_freq") else ()
        tables: tuple[Tensor, Tensor] = self._rotary(hidden, rows[None], *by_kind)
        return tables

    def run_layer(
        self, layer: int, hidden: Tensor, block: RowBlock, cache: Any, collect: CollectAttention | None = None
    ) -> Tensor:
        out: Tensor | tuple[Tensor, ...] = self.layers[layer](
            hidden,
            position_ids=block.rows[None],
            past_key_values=cache,
            use_cache=True,
            position_embeddings=block.rotary[self.layer_types[layer]],
            **self.attention_arguments(layer, block, collect),
        )
        return out if isinstance(out, Tensor) else out[0]

    def head(self, hidden: Tensor, product: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """product: replaces the output layer's own."""
        normed = self._norm(hidden)[0]
        logits: Tensor = (product or self.model.lm_head)(normed).float()  # type: ignore[operator]
        if (scale := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / scale
        if (scale := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = (logits / cap).tanh() * cap
        return logits

    @torch.inference_mode()
    def own_logits(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self.device)
        logits: Tensor = self.model(ids, use_cache=False).logits[0, -1]
        return logits


def _base_of(model: nn.Module) -> nn.Module:
    base = getattr(model, "model", None)
    base = getattr(base, "language_model", base)
    name = type(model).__name__
    if not isinstance(base, nn.Module) or not hasattr(model, "lm_head"):
        raise UnsupportedModelError(f"{name} is no decoder with a language head that can be taken apart")
    for part in (("embed_tokens",), ("layers",), NORM_NAMES, ROTARY_NAMES):
        if _part(base, part) is None:
            raise UnsupportedModelError(f"{name} has no {part[0]!r}: only decoders with RoPE can be fused")
    return base


def _part(base: nn.Module, names: Sequence[str]) -> Any:
    return next((getattr(base, name) for name in names if hasattr(base, name)), None)


def _layer_types(config: Any, layers: int, known: Sequence[str]) -> list[str]:
    declared = getattr(config, "layer_types", None)
    if declared is None:
        sliding = getattr(config, "sliding_window", None) is not None
        return [SLIDING if sliding else FULL] * layers
    other = sorted(set(declared[:layers]) - set(known))
    if other:
        raise UnsupportedModelError(
            f"layers of type {', '.join(other)} keep a state that is not per token KV"
        )
    return list(declared[:layers])


def kv_geometry(config: Any, dtype: str) -> Geometry:
    """The shape of the model's KV, from its config. Raises UnsupportedModelError."""
    layers = config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError("the model compresses or shares its KV between layers (MLA, KV sharing)")
    if differing := SAME_IN_ALL_LAYERS & set(getattr(config, "per_layer_attributes", None) or ()):
        names = ", ".join(sorted(differing))
        raise UnsupportedModelError(f"the layers keep KV of different shapes ({names} differ, as in Gemma 4)")
    kv_heads = _attention_heads(config)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if CONVOLUTION in (getattr(config, "layer_types", None) or ()):
        kv_heads = max(kv_heads, convolution_heads(config.hidden_size, size))
    return Geometry(layers, kv_heads, size, size, dtype)


def _attention_heads(config: Any) -> int:
    """Number of key heads in layers with attention."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def rope_parameters(config: Any) -> dict[str, Any]:
    """The model's RoPE parameters, by layer type where they differ."""
    return dict(getattr(config, "rope_parameters", None) or {})


def constant_rope_tokens(config: Any) -> int | None:
    """Sequence length up to which the RoPE frequencies are constant; None if they always are."""
    found, name = rope_parameters(config), "original_max_position_embeddings"
    each = [value for value in found.values() if isinstance(value, dict)] or [found]
    if not {p.get("rope_type") for p in each} & set(LENGTH_DEPENDENT_ROPE):
        return None
    return int(found.get(name) or getattr(config, name, None) or config.max_position_embeddings)


def _rotated_kind(kind: str) -> str:
    """The layer type whose rotary tables are used: convolutions, which rotate nothing, have none."""
    return FULL if kind == CONVOLUTION else kind


def _ropes(rotary: nn.Module, kinds: set[str]) -> dict[str, Tensor]:
    """inv_freq by layer type, copied: transformers replaces its own when the length changes."""
    found = dict[str, Tensor]()
    for kind in kinds:
        inv_freq = getattr(rotary, f"{_rotated_kind(kind)}_inv_freq", getattr(rotary, "inv_freq", None))
        if not isinstance(inv_freq, Tensor):
            name = type(rotary).__name__
            raise UnsupportedModelError(f"{name} has no inverse frequencies for {kind} layers")
        found[kind] = inv_freq.detach().clone().float()
    return found
