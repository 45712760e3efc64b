"""A policy of your own: it selects the stored tokens that are recomputed.

    python examples/own_policy.py            # the bundled SmolLM2; or a hub id, a folder, a .gguf file

This one recomputes the end of each passage, the opposite of `epic`. docs/add-a-policy.md describes the whole interface
of a policy; `bench quality` measures how good it is.
"""

import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend import Chunk, Engine
from ragblend.engine.plan import Plan
from ragblend.engine.selection import ProbeResult
from ragblend.engine.selection.base import Policy, pick_top

PASSAGES = [
    "The ferry leaves at seven, and at nine on Sundays. It takes forty minutes and carries no cars. " * 4,
    "The ferry is called Marigold and was built in Leith. Her sister Clover lies in the museum. " * 4,
    "Tickets are sold on the pier. Dogs travel free; a bicycle costs as much as a child. " * 4,
]


@dataclass(frozen=True)
class Tails(Policy):
    """The last tokens of each passage, as many as the ratio allows."""

    name: str = field(default="tails", kw_only=True)

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        positions = torch.arange(plan.tokens, device=plan.token_ids.device)
        to_end = torch.full((plan.tokens,), plan.tokens, device=positions.device)
        for span in plan.spans:
            to_end[span.start : span.stop] = span.stop - positions[span.start : span.stop]
        # Tokens without stored KV (the question, separators) are always among the rows.
        return pick_top(plan, positions, -to_end.float(), round(plan.ratio * plan.stored_tokens))


def main() -> None:
    engine = Engine.open(sys.argv[1] if len(sys.argv) > 1 else "default")
    engine.encode(PASSAGES)
    prompt = engine.chat_prompt(None, [Chunk(text) for text in PASSAGES], "What is the ferry called?")
    full = engine.prefill(prompt, method="full").logits.log_softmax(-1)
    for method in ("reuse", "epic", Tails(), "probe-shift"):
        read = engine.prefill(prompt, method=method, ratio=0.3)
        divergence = (full.exp() * (full - read.logits.log_softmax(-1))).sum()
        share = read.report.recomputed_fraction
        print(f"{read.report.method}: {share:.0%} recomputed, KL from full prefill {divergence:.4f}")
    engine.close()


if __name__ == "__main__":
    main()
