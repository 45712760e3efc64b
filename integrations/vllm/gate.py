"""The gate inside vLLM: the engine's questions, and whether KV written into blocks is KV to vLLM's own attention."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.model.gate import TOLERANCE, GateCheck, GateVerdict, relative_error, run_gate

if TYPE_CHECKING:
    from ragblend.integrations.vllm.decoder import VllmDecoder

log = logging.getLogger("ragblend")


def judged(decoder: "VllmDecoder", token_ids: Sequence[int]) -> GateVerdict:
    """The verdict, its numbers written to the log. While no request has any block. Raises what vLLM's layers raise."""
    verdict = run_gate(decoder, token_ids)
    written = _written(decoder, token_ids)
    if not written.passed:
        said = f"{written.name}: error {written.error:.2g}, allowed {written.allowed:.2g}"
        verdict = replace(verdict, passed=False, reason="; ".join(filter(None, (verdict.reason, said))))
    verdict = replace(verdict, checks=(*verdict.checks, written))
    for check in verdict.checks:
        said = "" if check.passed else ", NOT PASSED"
        log.info("gate: %s: error %.2g, allowed %.2g%s", check.name, check.error, check.allowed, said)
    return verdict


def _written(decoder: "VllmDecoder", token_ids: Sequence[int]) -> GateCheck:
    """One token by vLLM over KV that was computed here and written into its blocks, beside all of them by vLLM."""
    before = len(token_ids) - 1
    computed = ChunkEncoder(decoder, ()).encode(token_ids[:before])
    expected = decoder.own_logits(token_ids)
    blocks = decoder.paged.spare_blocks(len(token_ids))
    decoder.write(decoder.nothing(before), 0, before, blocks)  # not what `expected` left there
    decoder.write(
        lambda layer: (computed.keys[layer].to(decoder.device), computed.values[layer].to(decoder.device)),
        0,
        before,
        blocks,
    )
    error = relative_error(decoder.own_logits(token_ids, before), expected)
    allowed = TOLERANCE[decoder.geometry.dtype] * decoder.rounding
    return GateCheck("KV written into blocks equals vLLM's own", error <= allowed, error, allowed)
