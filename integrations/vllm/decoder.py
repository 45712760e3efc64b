"""The engine's decoder on vLLM's own modules: no weight is loaded twice.

vLLM's layers are called as vLLM calls them, but during the call their attention is replaced by ours, which writes the
new keys and values over the stored ones and supports scattered rows. So every model works whose layers are
`layer(positions, hidden, residual)` around one `self_attn.attn`; the gate checks it.

If several workers share the model, the engine uses the first one's decoder, and the remaining ones `follow` it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.model.attention import OWN_ATTENTION, CollectAttention, rows_attention
from ragblend.engine.model.decoder import Decoder, RowBlock
from ragblend.integrations.vllm.paged import Blocks, Layers, PagedCache
from ragblend.integrations.vllm.tensor_parallel import LeaderAborted, TensorParallelGroup
from ragblend.kvstore.errors import UnsupportedModelError

# Rotary embeddings that are fully described by `_compute_inv_freq(base)`. Others change their frequencies with the
# length, or scale the attention.
ROTARY = ("RotaryEmbedding", "Llama3RotaryEmbedding")
END = "end"  # broadcast by the first worker after its last operation
# Queries (1, N, R, D), keys and values (1, H, R, D) -> (R, N * D)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class VllmDecoder(Decoder):
    """A causal language model as vLLM has loaded it. Raises UnsupportedModelError for an unknown structure."""

    error_factor = 2.0  # the two attentions differ, and residuals are added in one kernel or in two

    _model: Any

    def __init__(
        self, model: Any, config: Any, dtype: str, paged: PagedCache, group: TensorParallelGroup
    ) -> None:
        self.model = self._model = model
        self.paged, self._group = paged, group
        self.base: Any = getattr(model, "model", None)
        self.layers = _layers_of(model, config.num_hidden_layers)
        device = next(model.parameters()).device
        super().__init__(config, dtype, OWN_ATTENTION, device, passes_arguments=True)
        self.attentions = [layer.self_attn.attn for layer in self.layers]
        heads = {(each.num_kv_heads, each.head_size) for each in self.attentions}
        held = max(1, self.geometry.kv_heads // group.size)
        if heads != {(held, self.geometry.key_size)}:
            raise UnsupportedModelError(f"its layers have key heads of shapes {heads}, not {self.geometry}")
        self._held = group.own_heads(self.geometry.kv_heads, held)
        self._queries = self.attentions[0].num_heads * group.size
        kinds = zip(self.layer_types, self.layers, strict=True)
        self.ropes = {kind: _inv_freq(layer).to(device) for kind, layer in kinds}
        # The attributes that torch's attention reads of a module.
        queries_per_key = self._queries // self.geometry.kv_heads
        self._attention_module = SimpleNamespace(num_key_value_groups=queries_per_key, is_causal=True)

    @property
    def attention_share(self) -> float:
        """Calculated from shapes, because vLLM may have packed the parameters."""
        config, first = self.config, self.attentions[0]
        heads = 2 * self._queries + 2 * self.geometry.kv_heads
        attention = config.hidden_size * first.head_size * heads
        return float(attention / (attention + 3 * config.hidden_size * config.intermediate_size))

    def embed(self, token_ids: Tensor) -> Tensor:
        with self._group.operation("embed", token_ids=token_ids):
            return self._embed(token_ids)[None]

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self._model.embed_input_ids(token_ids)
        return embedded

    def rotary(self, kind: str, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The positions, unchanged: vLLM's layers have their own rotary tables."""
        return rows, rows

    def run_layer(
        self, layer: int, hidden: Tensor, block: RowBlock, cache: Any, collect: CollectAttention | None = None
    ) -> Tensor:
        view, scaling = self.attention_arguments(layer, block, collect), self.attentions[layer].impl.scale

        def attend(queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
            keys, values = cache.update(new_keys, new_values, layer)
            out, _ = rows_attention(self._attention_module, queries, keys, values, scaling=scaling, **view)  # type: ignore[arg-type]
            return out.reshape(queries.shape[2], queries.shape[1] * queries.shape[3])

        with self._group.operation("layer", layer=layer, rows=block.rows, hidden=hidden[0]):
            return self._layer(layer, block.rows, hidden[0], attend)[None]

    def _layer(self, layer: int, rows: Tensor, hidden: Tensor, attend: Attend | None = None) -> Tensor:
        """(R, hidden) -> (R, hidden); the attention runs in the first worker. attend: None in the others."""
        size, group, attention = self.geometry.key_size, self._group, self.attentions[layer]

        def by_head(flat: Tensor) -> Tensor:  # (R, ...) -> (1, N, R, D)
            return flat.reshape(len(rows), flat.shape[1:].numel() // size, size).transpose(0, 1)[None]

        def all_heads(parts: Tensor) -> Tensor:  # (R, workers, own queries, keys and values) -> (R, N * D)
            assert attend is not None
            sizes = [attention.num_heads * size] + [attention.num_kv_heads * size] * 2
            query, key, value = parts.split(sizes, dim=-1)
            step = max(1, group.size // self.geometry.kv_heads)  # how many workers have the same key heads
            return attend(by_head(query), by_head(key[:, ::step]), by_head(value[:, ::step]))

        def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if group.size > 1:
                own = torch.cat((query, key, value), dim=-1)
                return group.gather_and_scatter(own, None if attend is None else all_heads).view(query.shape)
            assert attend is not None
            return attend(by_head(query), by_head(key), by_head(value)).view(query.shape)

        with _replaced_forward(attention, forward):
            # Norms write into the residual, which is the tensor that was passed in.
            out, residual = self.layers[layer](rows, hidden.clone(), None)
        summed: Tensor = out + residual
        return summed

    def head(self, hidden: Tensor) -> Tensor:
        with self._group.operation("head", hidden=hidden[0]):
            logits = self._head(hidden[0])
        assert logits is not None, "vLLM's first worker has the logits"
        return logits.float()

    def _head(self, hidden: Tensor) -> Tensor | None:
        logits: Tensor | None = self._model.compute_logits(self.base.norm(hidden))
        return logits

    def own_logits(self, token_ids: Sequence[int], computed: int = 0) -> Tensor:
        """Logits of vLLM's forward pass, with its paged cache and its own attention, while no request has blocks.

        computed: how many first tokens already have KV in the `spare_blocks`.
        """
        with self._group.operation("own_logits", token_ids=list(token_ids), computed=computed):
            logits = self._own_logits(token_ids, computed)
        assert logits is not None, "vLLM's first worker has the logits"
        return logits[0]

    @torch.inference_mode()
    def _own_logits(self, token_ids: Sequence[int], computed: int) -> Tensor | None:
        blocks = self.paged.spare_blocks(len(token_ids))
        hidden = self.paged.forward(self._model, token_ids[computed:], computed, blocks)
        logits: Tensor | None = self._model.compute_logits(hidden[-1:])
        return logits

    def zeros(self, tokens: int) -> Layers:
        """Zero KV for this many tokens, by layer."""
        shape = (self.geometry.kv_heads, tokens, self.geometry.key_size)
        zeros = torch.zeros(shape, dtype=self.geometry.torch_dtype, device=self.device)
        return lambda layer: (zeros, zeros)

    def write(self, layers: Layers, start: int, stop: int, blocks: Blocks) -> None:
        """Write KV by layer, (H, stop - start, D), to positions start..stop of a request's blocks."""
        with self._group.operation("write", start=start, stop=stop, blocks=[list(group) for group in blocks]):
            self._write(start, stop, blocks, layers)

    def _write(self, start: int, stop: int, blocks: Blocks, layers: Layers | None = None) -> None:
        shared = self._group.share_layers(layers)

        def own_heads(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = shared(layer)
            return keys[self._held], values[self._held]

        self.paged.write(self.attentions, own_heads, start, stop, blocks)

    def follow(self) -> None:
        """Run the operations that the first worker broadcasts, until it calls `finish`."""
        operations: dict[str, Callable[..., object]] = {
            "embed": self._embed,
            "layer": self._layer,
            "head": self._head,
            "own_logits": self._own_logits,
            "write": self._write,
        }
        while (name := (arguments := self._group.receive()).pop("name")) != END:
            with suppress(LeaderAborted), torch.inference_mode():
                operations[name](**arguments)

    def finish(self) -> None:
        """Called by the first worker: lets the others return from `follow`."""
        self._group.broadcast(END)


@contextmanager
def _replaced_forward(attention: Any, forward: Any) -> Iterator[None]:
    attention.forward = forward
    try:
        yield
    finally:
        del attention.forward


def _layers_of(model: Any, count: int) -> list[Any]:
    name, base = type(model).__name__, getattr(model, "model", None)
    parts = all(hasattr(base, part) for part in ("layers", "norm")) and hasattr(model, "compute_logits")
    layers = list(base.layers)[:count] if parts else []  # type: ignore[union-attr]
    if not layers or len(layers) < count:
        raise UnsupportedModelError(f"{name} is not a decoder with known layers")
    for layer in layers:
        impl = getattr(getattr(getattr(layer, "self_attn", None), "attn", None), "impl", None)
        if impl is None or not hasattr(impl, "do_kv_cache_update"):
            raise UnsupportedModelError(f"the layers of {name} have no attention that writes KV")
        if getattr(impl, "logits_soft_cap", None) or getattr(impl, "sinks", None) is not None:
            raise UnsupportedModelError(f"the attention of {name} caps its scores, or has sinks")
        if getattr(impl, "alibi_slopes", None) is not None or not hasattr(layer.self_attn, "rotary_emb"):
            raise UnsupportedModelError(f"{name} has no rotary positions")
    return layers


def _inv_freq(layer: Any) -> Tensor:
    rotary = layer.self_attn.rotary_emb
    if type(rotary).__name__ not in ROTARY:
        raise UnsupportedModelError(f"{type(rotary).__name__} is not a supported rotary embedding")
    inv_freq: Tensor = rotary._compute_inv_freq(rotary.base).float()
    return inv_freq
