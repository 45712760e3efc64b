"""Eviction: once the first token is out, each key head keeps of the passages only what the question attends to.

Source: SnapKV (arXiv 2404.14469, NeurIPS'24), section 4, which A3 (arXiv 2511.17560) applies to fused documents: the
attention of the prompt's last rows, summed over them and pooled over neighbouring tokens, votes for the tokens that a
layer and head keep; what stands outside the passages (system, question) is always kept. Votes of the query heads that
share a key head are added, for they share its keys. Layers with a sliding window keep all they have: their masks go by
where keys stand. Cost: the last rows pass through the layers once more, after the first token.
"""

import torch
from torch import Tensor, nn

from ragblend.engine.cache import Append, FusedCache, Scatter
from ragblend.engine.model.attention import AttentionCollector
from ragblend.engine.model.decoder import FULL, Decoder
from ragblend.engine.prompts.segments import Prompt
from ragblend.kvstore.errors import UnsupportedModelError

WINDOW_ROWS = 32
KERNEL = 7  # of the pooling, as published


@torch.inference_mode()
def evict(decoder: Decoder, prompt: Prompt, cache: FusedCache, keep_tokens: int) -> int:
    """Leave keep_tokens tokens of the passages to each key head; returns how many it lost (0: there were no more).

    The cache holds the whole prompt and nothing behind it. Raises UnsupportedModelError where attention is not shown.
    """
    passages = _passages(prompt, decoder.device)
    losing = int(passages.sum()) - keep_tokens
    if losing <= 0 or cache.evicted_tokens or FULL not in decoder.layer_types:
        return cache.evicted_tokens
    if not decoder.shows_attention:
        raise UnsupportedModelError(
            "keep_tokens needs to see what the question attends to, which this model's layers do not show; leave it out"
        )
    kept = _votes(decoder, prompt, cache, passages, keep_tokens)
    for layer, held in enumerate(cache.fused):
        # transformers asks one layer of each type how long its mask has to be, and finds it by this.
        held.is_sliding = layer not in kept
        if layer in kept:
            held.keep(kept[layer])
    return losing


def _votes(
    decoder: Decoder, prompt: Prompt, cache: FusedCache, passages: Tensor, keep_tokens: int
) -> dict[int, Tensor]:
    """Run the last rows once more, over what they wrote themselves: by layer (H, kept) ascending positions to keep.

    Stops behind the last layer that votes.
    """
    tokens, kept = passages.numel(), dict[int, Tensor]()
    always = (~passages).nonzero().squeeze(1)
    rows = torch.arange(max(0, tokens - WINDOW_ROWS), tokens, device=decoder.device)
    hidden = decoder.embed(torch.tensor(prompt.token_ids, device=decoder.device)[rows])
    block = decoder.row_block(rows, tokens, hidden, collected=rows.numel())

    def vote(
        collector: AttentionCollector, queries: Tensor, keys: Tensor, scaling: float, weights: Tensor
    ) -> None:
        heads = keys.shape[0]
        votes = weights.float().sum(1).view(heads, -1, tokens).sum(1).masked_fill_(~passages, 0)
        pooled = nn.functional.max_pool1d(votes[None], KERNEL, stride=1, padding=KERNEL // 2)[0]
        chosen = pooled.masked_fill_(~passages, -torch.inf).topk(keep_tokens, dim=1).indices
        kept[layer] = torch.cat([always.expand(heads, -1), chosen], dim=1).sort(dim=1).values

    voting = [layer for layer, kind in enumerate(decoder.layer_types) if kind == FULL]
    cache.step = Scatter(rows if rows.numel() < tokens else None)
    try:
        for layer in range(voting[-1] + 1):
            collect = vote if layer in voting else None
            hidden = decoder.run_layer(layer, hidden, block, cache, collect)
    finally:
        cache.step = Append()
    return kept


def _passages(prompt: Prompt, device: torch.device) -> Tensor:
    """(T,) bool: tokens of chunks. The last one is the question's, whatever it is of."""
    found = torch.zeros(len(prompt.token_ids), dtype=torch.bool)
    for start, stop in prompt.places:
        found[start:stop] = True
    found[-1:] = False
    return found.to(device)
