"""Next-token logits with one passage alone in the prompt, where its stored KV is exact and no other one misleads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ragblend.engine.model.decoder import Decoder
from ragblend.engine.results import Prefilled


class PassageView:
    """The prompt with one passage, extended by the answer as logits are requested."""

    def __init__(self, decoder: Decoder, prefilled: Prefilled) -> None:
        self._decoder = decoder
        self._cache = prefilled.cache
        self._logits = prefilled.logits
        self._seen_tokens = 0

    @torch.inference_mode()
    def logits(self, answer: Sequence[int]) -> Tensor:
        """(vocab,) float32, after these tokens of the answer, which must begin with those of the previous call."""
        pending = answer[self._seen_tokens :]
        if pending:
            ids = torch.tensor([pending], device=self._decoder.device)
            out = self._decoder.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            self._logits, self._seen_tokens = out.logits[0, -1].float(), len(answer)
        return self._logits
