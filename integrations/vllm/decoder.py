"""The engine's decoder over vLLM's own modules: no weight is held twice.

A layer of vLLM is called as vLLM calls it, but for its attention: for that call it is ours, which lays the new keys
and values over the stored ones and lets scattered rows see what is before them. So every model works whose layers are
`layer(positions, hidden, residual)` around one `self_attn.attn`, and the gate says whether it is right.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.attention import NAME, Collect, rows_attention
from ragblend.engine.decoder import Decoder, RowBlock
from ragblend.integrations.vllm.paged import Blocks, Layers, PagedCache
from ragblend.kvstore.errors import UnsupportedModelError

# Whose `_compute_inv_freq(base)` says all: others change the frequencies with the length, or scale the attention.
ROTARY = ("RotaryEmbedding", "Llama3RotaryEmbedding")


class VllmDecoder(Decoder):
    """A causal language model as vLLM has loaded it. Raises UnsupportedModelError if it has other parts."""

    rounding = 2.0  # two attentions, and residuals that are added in one kernel or in two

    _model: Any

    def __init__(self, model: Any, config: Any, dtype: str, paged: PagedCache) -> None:
        self.model = self._model = model
        self.paged = paged
        self.base: Any = getattr(model, "model", None)
        self.layers = _layers_of(model, config.num_hidden_layers)
        device = next(model.parameters()).device
        super().__init__(config, dtype, NAME, device, passes=True)
        self.attentions = [layer.self_attn.attn for layer in self.layers]
        heads = {(each.num_kv_heads, each.head_size) for each in self.attentions}
        if heads != {(self.geometry.kv_heads, self.geometry.key_size)}:
            raise UnsupportedModelError(f"its layers have key heads of shapes {heads}, not {self.geometry}")
        kinds = zip(self.layer_types, self.layers, strict=True)
        self.ropes = {kind: _inv_freq(layer).to(device) for kind, layer in kinds}
        group = self.attentions[0].num_heads // self.geometry.kv_heads
        self._asked = SimpleNamespace(
            num_key_value_groups=group, is_causal=True
        )  # what torch's attention asks of a module

    @property
    def attention_share(self) -> float:
        return self._attention_parameters / self.layer_parameters

    @property
    def layer_parameters(self) -> int:
        return self._attention_parameters + 3 * int(self.config.hidden_size * self.config.intermediate_size)

    @property
    def _attention_parameters(self) -> int:
        """From the shapes, as the layer's: vLLM may have packed the parameters away."""
        first = self.attentions[0]
        heads = 2 * first.num_heads + 2 * self.geometry.kv_heads
        return int(self.config.hidden_size * first.head_size * heads)

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self._model.embed_input_ids(token_ids)[None]
        return embedded

    def rotary(self, kind: str, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing: vLLM's layers have tables of their own, for positions."""
        return rows, rows

    def run_layer(
        self, layer: int, hidden: Tensor, block: RowBlock, cache: Any, collect: Collect | None = None
    ) -> Tensor:
        attention, view = self.attentions[layer], self.view(layer, block, collect)
        kv_heads, size = self.geometry.kv_heads, self.geometry.key_size

        def by_head(flat: Tensor, heads: int) -> Tensor:  # (R, N * D) -> (1, N, R, D)
            return flat.view(-1, heads, size).transpose(0, 1)[None]

        def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            keys, values = cache.update(by_head(key, kv_heads), by_head(value, kv_heads), layer)
            queries = by_head(query, attention.num_heads)
            out, _ = rows_attention(self._asked, queries, keys, values, scaling=attention.impl.scale, **view)  # type: ignore[arg-type]
            return out.reshape(query.shape)

        with _replaced(attention, attend):
            # Norms write into the residual, which is what was handed in.
            out, residual = self.layers[layer](block.rows, hidden[0].clone(), None)
        summed: Tensor = (out + residual)[None]
        return summed

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.compute_logits(self.base.norm(hidden[0]))
        return logits.float()

    @torch.inference_mode()
    def own_logits(self, token_ids: Sequence[int], computed: int = 0) -> Tensor:
        """By vLLM's forward, through its paged cache and its own attention, while no request has any of its blocks.

        computed: of how many first tokens the KV stands in the `spare_blocks`.
        """
        blocks = self.paged.spare_blocks(len(token_ids))
        hidden = self.paged.forward(self._model, token_ids[computed:], computed, blocks)
        logits: Tensor = self._model.compute_logits(hidden[-1:])[0]
        return logits

    def nothing(self, tokens: int) -> Layers:
        """Zeros for so many tokens, by layer."""
        shape = (self.geometry.kv_heads, tokens, self.geometry.key_size)
        zeros = torch.zeros(shape, dtype=self.geometry.torch_dtype, device=self.device)
        return lambda layer: (zeros, zeros)

    def write(self, layers: Layers, start: int, stop: int, blocks: Blocks) -> None:
        """Positions start..stop of KV, by layer (H, T, D), into a request's blocks."""
        self.paged.write(self.attentions, layers, start, stop, blocks)


@contextmanager
def _replaced(attention: Any, attend: Any) -> Iterator[None]:
    attention.forward = attend
    try:
        yield
    finally:
        del attention.forward


def _layers_of(model: Any, count: int) -> list[Any]:
    name, base = type(model).__name__, getattr(model, "model", None)
    parts = all(hasattr(base, part) for part in ("layers", "norm")) and hasattr(model, "compute_logits")
    layers = list(base.layers)[:count] if parts else []  # type: ignore[union-attr]
    if not layers or len(layers) < count:
        raise UnsupportedModelError(f"{name} is no decoder that can be taken apart")
    for layer in layers:
        impl = getattr(getattr(getattr(layer, "self_attn", None), "attn", None), "impl", None)
        if impl is None or not hasattr(impl, "do_kv_cache_update"):
            raise UnsupportedModelError(f"the layers of {name} have no attention whose KV can be written")
        if getattr(impl, "logits_soft_cap", None) or getattr(impl, "sinks", None) is not None:
            raise UnsupportedModelError(f"the attention of {name} caps its scores, or has sinks")
        if getattr(impl, "alibi_slopes", None) is not None or not hasattr(layer.self_attn, "rotary_emb"):
            raise UnsupportedModelError(f"{name} has no rotary positions")
    return layers


def _inv_freq(layer: Any) -> Tensor:
    rotary = layer.self_attn.rotary_emb
    if type(rotary).__name__ not in ROTARY:
        raise UnsupportedModelError(f"{type(rotary).__name__} is a rotary embedding that is not known here")
    inv_freq: Tensor = rotary._compute_inv_freq(rotary.base).float()
    return inv_freq
