"""The gate inside vLLM: the engine's self-test, and a test that vLLM's attention reads KV written into blocks."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.model.gate import TOLERANCE, GateCheck, GateVerdict, relative_error, run_gate

if TYPE_CHECKING:
    from ragblend.integrations.vllm.decoder import VllmDecoder

log = logging.getLogger("ragblend")


def run_vllm_gate(decoder: "VllmDecoder", token_ids: Sequence[int]) -> GateVerdict:
    """The verdict, its numbers logged. Only while no request has any block. Raises what vLLM's layers raise."""
    verdict = run_gate(decoder, token_ids)
    written = _check_written_blocks(decoder, token_ids)
    if not written.passed:
        reason = f"{written.name}: error {written.error:.2g}, allowed {written.allowed:.2g}"
        verdict = replace(verdict, passed=False, reason="; ".join(filter(None, (verdict.reason, reason))))
    verdict = replace(verdict, checks=(*verdict.checks, written))
    for check in verdict.checks:
        failed = "" if check.passed else ", NOT PASSED"
        log.info("gate: %s: error %.2g, allowed %.2g%s", check.name, check.error, check.allowed, failed)
    return verdict


def _check_written_blocks(decoder: "VllmDecoder", token_ids: Sequence[int]) -> GateCheck:
    """Compare the last token computed over KV written into vLLM's blocks with a prompt computed by vLLM alone."""
    before = len(token_ids) - 1
    kv = ChunkEncoder(decoder, ()).encode(token_ids[:before])
    expected = decoder.own_logits(token_ids)
    blocks = decoder.paged.spare_blocks(len(token_ids))
    decoder.write(decoder.zeros(before), 0, before, blocks)  # erases KV that computing `expected` left there
    decoder.write(
        lambda layer: (kv.keys[layer].to(decoder.device), kv.values[layer].to(decoder.device)),
        0,
        before,
        blocks,
    )
    error = relative_error(decoder.own_logits(token_ids, before), expected)
    allowed = TOLERANCE[decoder.geometry.dtype] * decoder.rounding
    return GateCheck("KV written into blocks equals vLLM's own", error <= allowed, error, allowed)
