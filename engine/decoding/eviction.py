"""KV eviction after the first token: each key head keeps only the passage tokens that the question attends to.

Source: SnapKV (arXiv 2404.14469, NeurIPS'24), section 4, which A3 (arXiv 2511.17560) applies to fused documents. The
attention of the prompt's last rows, summed over rows and pooled over neighbouring tokens, votes for the tokens to keep
in each layer and head. Tokens outside the passages (system, question) are always kept. Query heads that share a key
head add their votes. Layers with a sliding window keep everything: their masks depend on the keys' buffer rows.
Cost: the last rows pass through the layers once more, after the first token.
"""

import torch
from torch import Tensor, nn

from ragblend.engine.cache import Append, FusedCache, Scatter
from ragblend.engine.model.attention import AttentionCollector
from ragblend.engine.model.decoder import FULL, Decoder
from ragblend.engine.prompts.segments import Prompt
from ragblend.kvstore.errors import UnsupportedModelError

WINDOW_ROWS = 32
POOLED_TOKENS = 7  # neighbouring tokens that are pooled, as published


@torch.inference_mode()
def evict(decoder: Decoder, prompt: Prompt, cache: FusedCache, keep_tokens: int) -> int:
    """Keep keep_tokens passage tokens per key head; returns how many tokens each head evicted.

    The cache must hold the whole prompt and nothing else. Raises UnsupportedModelError if the layers do not expose
    their attention.
    """
    passages = _passage_mask(prompt, decoder.device)
    evicted_tokens = int(passages.sum()) - keep_tokens
    if evicted_tokens <= 0 or cache.evicted_tokens or FULL not in decoder.layer_types:
        return cache.evicted_tokens
    if not decoder.shows_attention:
        raise UnsupportedModelError(
            "keep_tokens needs the question's attention, which this model's layers do not expose; leave it out"
        )
    kept = _kept_positions(decoder, prompt, cache, passages, keep_tokens)
    for layer, held in enumerate(cache.fused):
        # transformers asks one layer of each type for the length of its mask, and picks it by this.
        held.is_sliding = layer not in kept
        if layer in kept:
            held.keep(kept[layer])
    return evicted_tokens


def _kept_positions(
    decoder: Decoder, prompt: Prompt, cache: FusedCache, passages: Tensor, keep_tokens: int
) -> dict[int, Tensor]:
    """Compute the last rows again over the whole KV; returns the positions to keep, by layer (H, kept), ascending."""
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
        pooled = nn.functional.max_pool1d(votes[None], POOLED_TOKENS, stride=1, padding=POOLED_TOKENS // 2)[0]
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


def _passage_mask(prompt: Prompt, device: torch.device) -> Tensor:
    """(T,) bool: tokens of chunks; never the last token, which always counts as the question's."""
    found = torch.zeros(len(prompt.token_ids), dtype=torch.bool)
    for start, stop in prompt.places:
        found[start:stop] = True
    found[-1:] = False
    return found.to(device)
