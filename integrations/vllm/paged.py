"""vLLM's paged KV cache in a worker: slots of tokens, writing KV, and vLLM's own forward pass over it.

It is written by each attention backend's own operator, and never read back, because each backend has its own layout of
a block.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ragblend.integrations.vllm.planning import slots_of

# Keys and values of a layer, (H, T, D), on the cache's device.
Layers = Callable[[int], tuple[Tensor, Tensor]]
# Of one request: block ids by KV cache group, from its first token on.
Blocks = Sequence[Sequence[int]]


class PagedCache:
    """The cache of one worker. runner: vLLM's model runner; config: how layers are grouped into blocks."""

    def __init__(self, runner: Any, vllm_config: Any, config: Any) -> None:
        self._runner, self._vllm_config = runner, vllm_config
        self.block_sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        self._groups = {
            name: number for number, group in enumerate(config.kv_cache_groups) for name in group.layer_names
        }
        self._device = runner.device

    def write(self, attentions: Sequence[Any], layers: Layers, start: int, stop: int, blocks: Blocks) -> None:
        """Write the KV of positions start..stop, given by layer, into a request's blocks."""
        groups = [self._slots(group, blocks, start, stop) for group in range(len(self.block_sizes))]
        for layer, attention in enumerate(attentions):
            positions, slots = groups[self._groups[attention.layer_name]]
            kv = layers(layer)
            keys, values = (each[:, positions].transpose(0, 1).contiguous() for each in kv)  # (t, H, D)
            attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    def _slots(self, group: int, blocks: Blocks, start: int, stop: int) -> tuple[Tensor | slice, Tensor]:
        """Which of the positions start..stop have a block in that group, as an index from `start`, and their slots."""
        positions, slots = slots_of(blocks[group], self.block_sizes[group], start, stop)
        has_all = len(positions) == stop - start
        index = slice(None) if has_all else torch.tensor(positions, device=self._device) - start
        return index, torch.tensor(slots, dtype=torch.int64, device=self._device)

    def spare_blocks(self, tokens: int) -> list[list[int]]:
        """Block ids for this many tokens, descending, while no request has blocks; block 0 is vLLM's null block."""
        counts = [-(-tokens // size) for size in self.block_sizes]
        return [list(range(sum(counts[: n + 1]), sum(counts[:n]), -1)) for n in range(len(counts))]

    def forward(self, model: Any, token_ids: Sequence[int], start: int, blocks: Blocks) -> Tensor:
        """vLLM's own forward pass over token_ids, from position `start` on, as a step's only request: (R, hidden)."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        rows, stop, device = len(token_ids), start + len(token_ids), self._device
        begins = torch.tensor([0, rows], dtype=torch.int32)
        metadata: dict[str, Any] = {}
        mapping: dict[str, Tensor] = {}
        for number, groups in enumerate(self._runner.attn_groups):
            slots = torch.tensor(
                slots_of(blocks[number], self.block_sizes[number], start, stop)[1], device=device
            )
            common = CommonAttentionMetadata(
                query_start_loc=begins.to(device),
                query_start_loc_cpu=begins,
                seq_lens=torch.tensor([stop], dtype=torch.int32, device=device),
                seq_lens_cpu_upper_bound=torch.tensor([stop], dtype=torch.int32),
                num_reqs=1,
                num_actual_tokens=rows,
                max_query_len=rows,
                max_seq_len=stop,
                block_table_tensor=torch.tensor([blocks[number]], dtype=torch.int32, device=device),
                slot_mapping=slots,
                positions=torch.arange(start, stop, device=device),
            )
            for group in groups:
                built = group.get_metadata_builder().build(0, common)
                metadata |= dict.fromkeys(group.layer_names, built)
                mapping |= dict.fromkeys(group.layer_names, slots)
        ids = torch.tensor(list(token_ids), device=device)
        context = set_forward_context(
            metadata, self._vllm_config, num_tokens=rows, slot_mapping=mapping, skip_compiled=True
        )
        with context, torch.inference_mode():
            hidden: Tensor = model(ids, torch.arange(start, stop, device=device))
        return hidden
