"""vLLM in this process, or as a server beside it, with tiny models that its kernels take."""

import contextlib
import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models

from ragblend.engine.engine import Engine
from ragblend.engine.prompts.segments import Chunk

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


STORED = [passage(number) for number in range(5)]


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


@dataclass(frozen=True)
class Listening:
    """`vllm serve` with the connector, over a store that was filled in another process; log: of its process."""

    url: str
    log: Path
    folder: Path
    home: Path


@contextlib.contextmanager
def listening_on(folder: Path, home: Path, dtype: str, *more: str, **extra: Any) -> Iterator[Listening]:
    """extra: settings of the connector; more: options of the server. Its log is beside the home."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "RAGBlendConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"home": str(home)} | extra,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--dtype", dtype, "--port", str(port), "--enforce-eager"]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer), *more]
    log, url = home.parent / "log", f"http://127.0.0.1:{port}"
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        yield Listening(url, log, folder, home)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(url: str, body: dict) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def counted(url: str) -> dict[str, float]:
    """What the server's /metrics have of ours."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as metrics:
        found = re.findall(r"^vllm:ragblend_(\w+)_total\{.*\} (\S+)$", metrics.read().decode(), re.M)
    return {name: float(count) for name, count in found}
