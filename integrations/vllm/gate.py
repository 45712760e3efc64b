"""The gate inside vLLM: the engine's self-test, and a test that vLLM's attention reads KV written into blocks."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.model.gate import TOLERANCE, GateCheck, GateVerdict, relative_error, run_gate
from ragblend.integrations.vllm.settings import REPORT
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.integrations.vllm.decoder import VllmDecoder

log = logging.getLogger("ragblend")


def run_vllm_gate(decoder: "VllmDecoder", token_ids: Sequence[int]) -> GateVerdict:
    """Run the gate and log its numbers; only while no request has blocks. Raises what vLLM's layers raise."""
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
    written_tokens = len(token_ids) - 1
    kv = ChunkEncoder(decoder, ()).encode(token_ids[:written_tokens])
    expected = decoder.own_logits(token_ids)
    blocks = decoder.paged.spare_blocks(len(token_ids))
    decoder.write(
        decoder.zeros(written_tokens), 0, written_tokens, blocks
    )  # erases KV that computing `expected` left there
    decoder.write(
        lambda layer: (kv.keys[layer].to(decoder.device), kv.values[layer].to(decoder.device)),
        0,
        written_tokens,
        blocks,
    )
    error = relative_error(decoder.own_logits(token_ids, written_tokens), expected)
    allowed = TOLERANCE[decoder.geometry.dtype] * decoder.error_factor
    return GateCheck("KV written into blocks equals vLLM's own", error <= allowed, error, allowed)


def refusal_of(model: str, home: Path, dtype: str | None) -> str | None:
    """Load the model in a vLLM in this process, which runs the gate; returns why it would fuse nothing, or None.

    Raises UsageError without a supported vLLM.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    extra = {"home": str(home), "encode_missing": False}
    transfer = {
        "kv_connector": "RAGBlendConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    try:
        from vllm import LLM, SamplingParams

        llm = LLM(model, dtype=dtype or "auto", enforce_eager=True, kv_transfer_config=transfer)
    except ImportError as error:
        raise UsageError(f"the gate cannot run in vLLM here: {error}") from error
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {REPORT: ""}})
    [output] = llm.generate([{"prompt_token_ids": [0]}], sampling, use_tqdm=False)
    report = (output.kv_transfer_params or {}).get("ragblend")
    if report is None:
        return "the connector could not start; the log says why"
    refusal: str | None = report["refusal"]
    return refusal
