"""A3: recompute what the question attends to in an early layer.

Source: A3 (arXiv 2511.17560), section on attention-aware selection, equations 3 to 5: the attention of the question's
queries to the documents' keys at layer 1, summed over the question, smoothed by average pooling (kernel 5), the highest
taken. As published all heads are merged into one dot product, over the root of the merged size; `heads=each` takes each
head's own softmax instead. Layer 1's keys and queries depend on layer 0 alone, which reuse leaves right, so the probe
costs its rows through layer 0 and the attention of layer 1.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.plan import Kind, Plan
from ragblend.engine.selection.asking import Asking
from ragblend.engine.selection.base import one_of
from ragblend.engine.selection.evidence import Attention, Probed
from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class A3(Asking):
    """The question's attention at one layer. heads: `merged` (as published) or `each`; kernel: of the pooling, odd."""

    layer: int = 1
    heads: str = "merged"
    kernel: int = 5
    name: str = field(default="a3", kw_only=True)

    def __post_init__(self) -> None:
        one_of(self.name, "heads", self.heads, ("merged", "each"))
        if self.kernel < 1 or self.kernel % 2 == 0 or self.layer < 0:
            raise UsageError(f"method {self.name!r}: kernel must be odd and above 0, layer at least 0")

    def watches(self, plan: Plan, layer: int) -> bool:
        return layer == min(self.layer, plan.layers - 1)

    def look(self, plan: Plan, attention: Attention) -> Tensor:
        if self.heads == "each":
            return attention.weights.sum(dim=1, dtype=torch.float32).mean(0)
        queries, keys = attention.queries, attention.keys
        grouped = queries.reshape(keys.shape[0], -1, *queries.shape[1:]).sum(
            1
        )  # heads of a group share their keys
        merged = torch.einsum("hwd,hkd->wk", grouped.float(), keys.float())
        merged *= attention.scaling / queries.shape[0] ** 0.5
        of_documents = plan.kinds[attention.first_key :] > Kind.MISSING
        merged = (merged + attention.mask).masked_fill(~of_documents, -torch.inf)
        return merged.softmax(dim=-1).nan_to_num(0.0).sum(0)  # NaN: a window without any document

    def score(self, plan: Plan, probed: Probed) -> Tensor:
        pool = torch.nn.AvgPool1d(self.kernel, stride=1, padding=self.kernel // 2)
        pooled: Tensor = pool(super().score(plan, probed)[None])[0]
        return pooled
