"""One decoder as parts: embedding, layers, rotary tables, head. The only file that knows how transformers names them.

A layer is called as transformers itself calls it, with a cache whose `update` is ours; so every RoPE decoder whose
layers take `position_embeddings` works, quantised or not, and no model file is copied or patched.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ragblend.engine.attention import EAGER, NAME, Collect, Collector, additive, position_mask, tiles
from ragblend.engine.rope import HALF, Rope
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
# Their frequencies change with the sequence's length; below this length they are constant.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
View = dict[str, Any]  # the arguments by which an attention learns what its rows may attend to


@dataclass(frozen=True)
class RowBlock:
    """Rows being computed: (R,) positions, and per layer type their rotary tables and what they may attend to.

    collecting: the same for layers in which the attention of the last rows is collected; empty where none is.
    """

    rows: Tensor
    rotary: dict[str, tuple[Tensor, Tensor]]
    views: dict[str, View]
    collecting: dict[str, View]


class Decoder:
    """A causal language model of transformers, taken apart. Raises UnsupportedModelError if it has other parts."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self.model = model
        self.config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        self.base = _base_of(model)
        self.layers: list[nn.Module] = list(self.base.layers)[: self.config.num_hidden_layers]  # type: ignore[arg-type]
        self.layer_types = _layer_types(self.config, len(self.layers))
        self.window: int | None = getattr(self.config, "sliding_window", None)
        self.geometry = kv_geometry(self.config, dtype)
        self.ropes = _ropes(self.base, set(self.layer_types))
        self.layouts = [HALF] * len(self.layers)  # the gate finds out
        self.attention: str = self.config._attn_implementation
        arguments = inspect.signature(self.layers[0].forward).parameters.values()
        passes = any(each.kind is each.VAR_KEYWORD for each in arguments)
        self.tiles = self.attention == NAME and passes and self.device.type == "cpu"
        self.shows_attention = self.attention in (NAME, EAGER) and passes

    def hide_attention(self) -> None:
        """Its layers do not hand on to their attention what they are given: none is collected or cut in tiles."""
        self.shows_attention = self.tiles = False

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def rope(self, layer: int) -> Rope:
        return Rope(self.ropes[self.layer_types[layer]], self.layouts[layer])

    @property
    def attention_share(self) -> float:
        """Parameters of the attention as a share of its layer: what a peek at one layer costs at most."""
        layer = self.layers[min(1, len(self.layers) - 1)]
        attention = sum(p.numel() for name, p in layer.named_parameters() if "attn" in name)
        return attention / max(1, sum(p.numel() for p in layer.parameters()))

    def embed(self, token_ids: Tensor) -> Tensor:
        """(R,) ids -> (1, R, hidden)."""
        embedded: Tensor = self.base.embed_tokens(token_ids[None])  # type: ignore[operator]
        multiplier = getattr(self.config, "embedding_multiplier", None)
        return embedded if multiplier is None else embedded * multiplier

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
        views: dict[str, View] = {}
        collecting: dict[str, View] = {}
        for kind in sorted(set(self.layer_types)):
            given = rows, total_tokens, kind, hidden.dtype, absent
            by_kind = (kind,) if hasattr(self.base.rotary_emb, f"{kind}_inv_freq") else ()
            rotary[kind] = self.base.rotary_emb(hidden, rows[None], *by_kind)  # type: ignore[operator]
            views[kind] = self._view(*given)
            if collected:
                collecting[kind] = self._collecting(*given, collected)
        return RowBlock(rows, rotary, views, collecting)

    def run_layer(
        self, layer: int, hidden: Tensor, block: RowBlock, cache: Any, collect: Collect | None = None
    ) -> Tensor:
        """(1, R, hidden) -> (1, R, hidden), through the cache's `update`. collect: given what rows attend to."""
        kind = self.layer_types[layer]
        view = block.views[kind]
        if collect is not None and block.collecting:
            view = block.collecting[kind]
            view = view | {"collector": replace(view["collector"], collect=collect)}
        out: Tensor | tuple[Tensor, ...] = self.layers[layer](
            hidden,
            position_ids=block.rows[None],
            past_key_values=cache,
            use_cache=True,
            position_embeddings=block.rotary[kind],
            **view,
        )
        return out if isinstance(out, Tensor) else out[0]

    def head(self, hidden: Tensor) -> Tensor:
        """(1, R, hidden) -> (R, vocab) float32 logits."""
        normed = self.base.norm(hidden)  # type: ignore[operator]
        logits: Tensor = self.model.lm_head(normed)[0].float()  # type: ignore[operator]
        if (scale := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / scale
        if (scale := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = (logits / cap).tanh() * cap
        return logits

    def _view(self, rows: Tensor, tokens: int, kind: str, dtype: torch.dtype, absent: Tensor | None) -> View:
        window = self.window if kind == SLIDING else None
        if self.attention not in (NAME, "sdpa"):
            # Eager (soft caps, sinks): adds the mask it is given, and no other.
            return {"attention_mask": additive(position_mask(rows, tokens, window, absent), dtype)}
        if rows.numel() == tokens and (window is None or window >= tokens):
            return {"attention_mask": None}  # attention may take its causal path
        if self.tiles:
            return {"attention_mask": None, "tiles": tiles(rows, window, dtype, absent)}
        return {"attention_mask": position_mask(rows, tokens, window, absent)}

    def _collecting(
        self, rows: Tensor, tokens: int, kind: str, dtype: torch.dtype, absent: Tensor | None, collected: int
    ) -> View:
        """The same where attention is collected of the last rows, which are in no mask but the collector's."""
        first, last = rows[:-collected], rows[-collected:]
        window = self.window if kind == SLIDING else None
        start = 0 if window is None else max(0, int(last[0]) - window + 1)
        mask = additive(position_mask(last, tokens, window, absent, start), dtype)[0, 0]
        of = rows if self.attention == EAGER else first
        view = self._view(of, tokens, kind, dtype, absent) if of.numel() else {"attention_mask": None}
        return view | {"collector": Collector(collected, start, mask)}


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


def regime_tokens(config: Any) -> int | None:
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
