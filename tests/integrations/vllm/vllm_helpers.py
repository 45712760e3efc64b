"""vLLM in this process, with tiny models that its kernels take."""

import contextlib
import gc
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models

from ragblend.engine.engine import Engine
from ragblend.engine.prompt import Chunk

# Before vLLM is imported: one process, on a memory that every machine has, and no thread bound to a core.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
SHAPE = {"hidden_size": 128, "head_dim": 32}  # the smallest heads that its CPU kernels have
WORDS = " ".join(tiny_models.CORPUS).replace("?", "").split()
QUESTION = "Where were both ledgers in the storm?"


def passage(seed: int, words: int = 60) -> str:
    """Words in an order of their own: no passage is part of another."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


@dataclass
class Server:
    """vLLM with the connector, and the built-in engine on the same model and home."""

    folder: Path
    home: Path
    llm: Any
    engine: Engine

    def ids(self, texts: list[str], question: str = QUESTION) -> list[int]:
        """A prompt of passages, as ids."""
        prompt = self.engine.chat_prompt(None, [Chunk(text) for text in texts], question)
        return list(self.engine.tokenize(prompt).token_ids)

    def ask(
        self, prompts: list[list[int]], params: list[dict | None] | None = None, **sampling: Any
    ) -> list[Any]:
        """vLLM's outputs, greedy, with all log-probabilities; params: kv_transfer_params of each."""
        from vllm import SamplingParams

        options = {"temperature": 0, "max_tokens": 8, "logprobs": -1, "ignore_eos": True} | sampling
        given = [
            SamplingParams(**options, extra_args=None if each is None else {"kv_transfer_params": each})
            for each in params or [None] * len(prompts)
        ]
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], given, use_tqdm=False)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.close()
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def serve(folder: Path, home: Path, extra: dict[str, Any] | None = None, **options: Any) -> Server:
    """Start both; passages are encoded by the engine."""
    from vllm import LLM

    transfer = {
        "kv_connector": "RAGBlendConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"home": str(home), "minimum_tokens": 32} | (extra or {}),
    }
    llm = LLM(
        str(folder),
        **{
            "dtype": "float32",
            "max_model_len": tiny_models.CONTEXT_TOKENS,
            "max_num_seqs": 8,
            "block_size": 32,
            "enforce_eager": True,
            "disable_log_stats": False,
            "max_logprobs": -1,
            "kv_transfer_config": transfer,
        }
        | options,
    )
    return Server(folder, home, llm, Engine.open(str(folder), home, device="cpu", dtype="float32"))
