"""vLLM in this process, or as a server beside it, with tiny models that its kernels support."""

import contextlib
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models
from shared_servers import free_port

from ragblend.engine.engine import Engine
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.kvstore.keys import ChunkKey

# Set before vLLM is imported: one process, little memory, and no thread bound to a core.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
SHAPE = {"hidden_size": 128, "head_dim": 32}  # the smallest heads of its CPU kernels
WORDS = " ".join(tiny_models.CORPUS).replace("?", "").split()
TIMEOUT_S = 300  # reached only by what is broken
QUESTION = "Where were both ledgers in the storm?"


def passage(seed: int, words: int = 60) -> str:
    """Words in a random order: no passage is part of another."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


STORED = [passage(number) for number in range(5)]


def asked(engine: Any, texts: list[str], question: str = QUESTION) -> Prompt:
    """A prompt of passages."""
    return engine.chat_prompt(None, [Chunk(text) for text in texts], question)


def transfer_config(home: Path, **extra: Any) -> dict[str, Any]:
    extra = {"home": str(home)} | extra
    return {"kv_connector": "RAGBlendConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def kv_files(home: Path) -> list[Path]:
    return sorted(
        path for path in (home / "kv").rglob("*") if path.is_file() and path.stat().st_size > 50_000
    )


def flip_byte(file: Path) -> None:
    """Damage a file in its middle."""
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 0xFF
    file.write_bytes(held)


def report_of(output: Any) -> dict[str, Any]:
    """The connector's report in an output of vLLM."""
    return output.kv_transfer_params["ragblend"]


@dataclass
class Server:
    """vLLM with the connector, and the built-in engine on the same model and home."""

    folder: Path
    home: Path
    llm: Any
    engine: Engine

    def prompt(self, texts: list[str], question: str = QUESTION) -> Prompt:
        """A prompt of passages, with its token ids."""
        return self.engine.tokenize(asked(self.engine, texts, question))

    def ids(self, texts: list[str], question: str = QUESTION) -> list[int]:
        """The same as token ids."""
        return list(self.prompt(texts, question).token_ids)

    def passage_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.engine.runtime.tokenizing.passage_ids(text))

    def key_of(self, text: str) -> ChunkKey:
        """The key of a passage's KV behind the canonical prefix."""
        runtime = self.engine.runtime
        return runtime.key_of(runtime.canonical_prefix, self.passage_ids(text), "default")

    def is_stored(self, text: str) -> bool:
        return self.engine.runtime.store.contains(self.key_of(text))

    @property
    def core(self) -> Any:
        """vLLM's engine core."""
        return self.llm.llm_engine.engine_core.engine_core

    def idle(self, steps: int = 5) -> None:
        """Step as the server's own loop does while `has_pending_push_work`."""
        for _ in range(steps):
            self.core.step_fn()

    def files(self) -> list[Path]:
        """The files of stored KV."""
        return kv_files(self.home)

    def ask(
        self,
        prompts: list[list[int]],
        params: list[dict | None] | None = None,
        salt: str | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """vLLM's outputs, greedy, with all log-probabilities; params: kv_transfer_params of each; salt: cache_salt."""
        from vllm import SamplingParams

        options = {"temperature": 0, "max_tokens": 8, "logprobs": -1, "ignore_eos": True} | sampling
        given = [
            SamplingParams(**options, extra_args=None if each is None else {"kv_transfer_params": each})
            for each in params or [None] * len(prompts)
        ]
        salted = {} if salt is None else {"cache_salt": salt}
        return self.llm.generate(
            [{"prompt_token_ids": ids, **salted} for ids in prompts], given, use_tqdm=False
        )

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.close()
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def serve(folder: Path, home: Path, extra: dict[str, Any] | None = None, **options: Any) -> Server:
    """Start both; the engine encodes passages."""
    from vllm import LLM

    transfer = transfer_config(home, **{"minimum_tokens": 32} | (extra or {}))
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
    """`vllm serve` with the connector, over a store that another process filled; log: of the server."""

    url: str
    log: Path
    folder: Path
    home: Path


@contextlib.contextmanager
def listening_on(folder: Path, home: Path, dtype: str, *more: str, **extra: Any) -> Iterator[Listening]:
    """extra: settings of the connector; more: options of the server. Its log is beside the home."""
    port = free_port()
    transfer = transfer_config(home, **extra)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--dtype", dtype, "--port", str(port), "--enforce-eager"]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer), *more]
    log, url = home.parent / "log", f"http://127.0.0.1:{port}"
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        until(lambda: is_healthy(url, process, log))
        yield Listening(url, log, folder, home)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(condition: Any) -> Any:
    """Wait until the condition is true, and return what it gave."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)
    return found


def is_healthy(url: str, process: subprocess.Popen, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False


def post(url: str, body: dict, **headers: str) -> Any:
    headers |= {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def chat(url: str, content: str, headers: dict[str, str] | None = None, **more: Any) -> Any:
    """The answer to a chat message."""
    message = {"role": "user", "content": content}
    body = {"model": "tiny", "messages": [message], "max_tokens": 4, "temperature": 0} | more
    return post(f"{url}/v1/chat/completions", body, **headers or {})


def metrics(url: str, pattern: str) -> list[Any]:
    """What matches in the server's /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as found:
        return re.findall(pattern, found.read().decode(), re.M)


def counted(url: str) -> dict[str, float]:
    """The connector's counters."""
    found = metrics(url, r"^vllm:ragblend_(\w+)_total\{.*\} (\S+)$")
    return {name: float(count) for name, count in found}
