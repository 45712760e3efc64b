"""One decoder as parts: embedding, layers, rotary tables, head. The only file that knows how transformers names them.

`Decoder` is what the engine asks of a model, whoever runs it. `TransformersDecoder` calls a layer as transformers does,
with a cache whose `update` is ours; so every RoPE decoder whose layers take `position_embeddings` works, quantised or
not, and no model file is copied or patched.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ragblend.engine.model.attention import (
    EAGER,
    NAME,
    AttentionCollector,
    CollectAttention,
    additive_mask,
    causal_mask,
    masked_from,
    position_mask,
    tiles,
)
from ragblend.engine.model.rope import HALF, Rope
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
# Their frequencies change with the sequence's length; below this length they are constant.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# More rows than this pass through a layer in several blocks. That changes nothing they compute (a row sees only what is
# before it, and blocks are in order), and keeps activations small beside the KV.
BLOCK_ROWS = 1024
AttentionArguments = dict[str, Any]  # the arguments by which an attention learns what its rows may attend to


@dataclass(frozen=True)
class RowBlock:
    """Rows being computed: (R,) positions, and per layer type their rotary tables and what they may attend to.

    total_tokens: of the sequence that they are in, or of as much of it as they may see; collecting: the same for layers
    in which the attention of the last rows is collected; empty where none is; seen (S,): positions of the keys that
    they are given, None for all.
    """

    rows: Tensor
    rotary: dict[str, tuple[Tensor, Tensor]]
    views: dict[str, AttentionArguments]
    collecting: dict[str, AttentionArguments]
    total_tokens: int
    seen: Tensor | None = None


class Decoder(ABC):
    """A causal language model taken apart, on one device, by whatever runs it.

    layer_types: by layer, FULL or SLIDING; ropes: inv_freq by layer type; layouts: by layer, found out by the gate;
    tiles: whether attention takes rows in tiles; shows_attention: whether it can be collected. rounding: how many times
    a dtype's usual error lies between `own_logits` and the same by parts, where that is computed by other kernels.
    """

    model: nn.Module
    rounding = 1.0

    def __init__(self, config: Any, dtype: str, attention: str, device: torch.device, passes: bool) -> None:
        """attention: the name of the one that layers call; passes: whether they hand on to it what they are given."""
        self.config, self.attention, self.device = config, attention, device
        self.geometry = kv_geometry(config, dtype)
        self.layer_types = _layer_types(config, self.geometry.layers)
        self.window: int | None = getattr(config, "sliding_window", None)
        self.layouts = [HALF] * self.geometry.layers
        self.ropes: dict[str, Tensor] = {}
        self.tiles = attention == NAME and passes and device.type == "cpu"
        self.shows_attention = attention in (NAME, EAGER) and passes

    def disable_attention_collection(self) -> None:
        """Its layers do not hand on to their attention what they are given: none is collected or cut in tiles."""
        self.shows_attention = self.tiles = False

    def rope(self, layer: int) -> Rope:
        return Rope(self.ropes[self.layer_types[layer]], self.layouts[layer])

    @property
    @abstractmethod
    def attention_share(self) -> float:
        """Parameters of the attention as a share of its layer: what a peek at one layer costs at most."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """(R,) ids -> (1, R, hidden)."""

    @abstractmethod
    def rotary(self, kind: str, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What layers of that type are given for rows (R,) of dtype hidden's: cos and sin."""

    @abstractmethod
    def run_layer(
        self, layer: int, hidden: Tensor, block: RowBlock, cache: Any, collect: CollectAttention | None = None
    ) -> Tensor:
        """(1, R, hidden) -> (1, R, hidden), through the cache's `update`. collect: given what rows attend to."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """(1, R, hidden) -> (R, vocab) float32 logits."""

    @abstractmethod
    def own_logits(self, token_ids: Sequence[int]) -> Tensor:
        """(vocab,) logits behind the last token by the model's own forward, which the gate compares with."""

    def row_block(
        self,
        rows: Tensor,
        total_tokens: int,
        hidden: Tensor,
        collected: int = 0,
        absent: Tensor | None = None,
    ) -> RowBlock:
        """Rotary tables and masks of these rows in a sequence of total_tokens.

        collected: how many of the last rows can have their attention collected; absent (T,) bool: keys that no row
        may attend to.
        """
        rotary: dict[str, tuple[Tensor, Tensor]] = {}
        views: dict[str, AttentionArguments] = {}
        collecting: dict[str, AttentionArguments] = {}
        for kind in sorted(set(self.layer_types)):
            given = rows, total_tokens, kind, hidden.dtype, absent
            rotary[kind] = self.rotary(kind, rows, hidden)
            views[kind] = self._view(*given)
            if collected:
                collecting[kind] = self._collecting(*given, collected)
        return RowBlock(rows, rotary, views, collecting, total_tokens)

    def with_keys(self, block: RowBlock, keys: Tensor, dtype: torch.dtype) -> RowBlock:
        """The same rows, given the keys at positions (S,) alone, themselves among them."""
        views: dict[str, AttentionArguments] = {
            kind: {"attention_mask": additive_mask(causal_mask(block.rows, keys, self._window(kind)), dtype)}
            for kind in block.rotary
        }
        return replace(block, views=views, collecting={}, seen=keys)

    def attention_arguments(
        self, layer: int, block: RowBlock, collect: CollectAttention | None
    ) -> AttentionArguments:
        """The arguments of that layer's attention."""
        kind = self.layer_types[layer]
        if collect is None or not block.collecting:
            return block.views[kind]
        view = block.collecting[kind]
        return view | {"collector": replace(view["collector"], collect=collect)}

    def _window(self, kind: str) -> int | None:
        """Tokens that a row sees in layers of that type, itself included; None for all before it."""
        return self.window if kind == SLIDING else None

    def _view(
        self, rows: Tensor, tokens: int, kind: str, dtype: torch.dtype, absent: Tensor | None
    ) -> AttentionArguments:
        window = self._window(kind)
        if self.attention not in (NAME, "sdpa"):
            # Eager (soft caps, sinks): adds the mask it is given, and no other.
            return {"attention_mask": additive_mask(position_mask(rows, tokens, window, absent), dtype)}
        if rows.numel() == tokens and (window is None or window >= tokens):
            return {"attention_mask": None}  # attention may take its causal path
        if self.tiles:
            return {"attention_mask": None, "tiles": tiles(rows, window, dtype, absent)}
        return {"attention_mask": position_mask(rows, tokens, window, absent)}

    def _collecting(
        self, rows: Tensor, tokens: int, kind: str, dtype: torch.dtype, absent: Tensor | None, collected: int
    ) -> AttentionArguments:
        """The same where attention is collected of the last rows, which are in no mask but the collector's."""
        first, last = rows[:-collected], rows[-collected:]
        window = self._window(kind)
        least = int(last[0]) + 1
        start = 0 if window is None else max(0, least - window)
        mask = additive_mask(position_mask(last, tokens, window, absent, start), dtype)[0, 0]
        ragged = masked_from(start, least, tokens, window, absent)
        of = rows if self.attention == EAGER else first
        view = self._view(of, tokens, kind, dtype, absent) if of.numel() else {"attention_mask": None}
        return view | {"collector": AttentionCollector(collected, start, mask, ragged)}


class TransformersDecoder(Decoder):
    """A model of transformers. Raises UnsupportedModelError if it has other parts."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self.model = model
        self.base = _base_of(model)
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        self.layers: list[nn.Module] = list(self.base.layers)[: config.num_hidden_layers]  # type: ignore[arg-type]
        arguments = inspect.signature(self.layers[0].forward).parameters.values()
        passes = any(each.kind is each.VAR_KEYWORD for each in arguments)
        device = next(model.parameters()).device
        super().__init__(config, dtype, config._attn_implementation, device, passes)
        self.ropes = _ropes(self.base, set(self.layer_types))

    @property
    def attention_share(self) -> float:
        layer = self.layers[min(1, len(self.layers) - 1)]
        attention = sum(p.numel() for name, p in layer.named_parameters() if "attn" in name)
        return attention / max(1, sum(p.numel() for p in layer.parameters()))

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.base.embed_tokens(token_ids[None])  # type: ignore[operator]
        multiplier = getattr(self.config, "embedding_multiplier", None)
        return embedded if multiplier is None else embedded * multiplier

    def rotary(self, kind: str, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        by_kind = (kind,) if hasattr(self.base.rotary_emb, f"{kind}_inv_freq") else ()
        tables: tuple[Tensor, Tensor] = self.base.rotary_emb(hidden, rows[None], *by_kind)  # type: ignore[operator]
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
        """product: the output layer's, of packed weights."""
        normed = self.base.norm(hidden)[0]  # type: ignore[operator]
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
    for part in ("embed_tokens", "layers", "norm", "rotary_emb"):
        if not hasattr(base, part):
            raise UnsupportedModelError(f"{name} has no {part!r}: only decoders with RoPE can be fused")
    return base


def _layer_types(config: Any, layers: int) -> list[str]:
    declared = getattr(config, "layer_types", None)
    if declared is None:
        sliding = getattr(config, "sliding_window", None) is not None
        return [SLIDING if sliding else FULL] * layers
    other = sorted(set(declared[:layers]) - {FULL, SLIDING})
    if other:
        raise UnsupportedModelError(
            f"layers of type {', '.join(other)} keep a state that is not per token KV"
        )
    return list(declared[:layers])


def kv_geometry(config: Any, dtype: str) -> Geometry:
    """The shape of the model's KV, from its config alone. Raises UnsupportedModelError."""
    layers = config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError("the model compresses or shares its KV between layers (MLA, KV sharing)")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(layers, kv_heads, size, size, dtype)


def rope_parameters(config: Any) -> dict[str, Any]:
    """The model's RoPE parameters, by layer type where they differ."""
    return dict(getattr(config, "rope_parameters", None) or {})


def constant_rope_tokens(config: Any) -> int | None:
    """Length up to which the frequencies are constant; None if they always are."""
    found, name = rope_parameters(config), "original_max_position_embeddings"
    each = [value for value in found.values() if isinstance(value, dict)] or [found]
    if not {p.get("rope_type") for p in each} & set(LENGTH_DEPENDENT_ROPE):
        return None
    return int(found.get(name) or getattr(config, name, None) or config.max_position_embeddings)


def _ropes(base: nn.Module, kinds: set[str]) -> dict[str, Tensor]:
    """inv_freq by layer type. Copies: transformers replaces the live one when the length changes its regime."""
    rotary, found = base.rotary_emb, dict[str, Tensor]()
    for kind in kinds:
        inv_freq = getattr(rotary, f"{kind}_inv_freq", getattr(rotary, "inv_freq", None))
        if not isinstance(inv_freq, Tensor):
            name = type(rotary).__name__
            raise UnsupportedModelError(f"{name} has no inverse frequencies for {kind} layers")
        found[kind] = inv_freq.detach().clone().float()
    return found
