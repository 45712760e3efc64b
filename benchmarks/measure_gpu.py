"""Times the first token on an accelerator with random weights of a real model's shape and the bundled tokenizer.

    python -m benchmarks.measure_gpu llama-3-8b-random             # CUDA, Llama-3-8B's shape (16 GB)
    python -m benchmarks.measure_gpu tiny --device cpu             # another shape, to try this file itself

Full prefill, reuse, CacheBlend and probe-shift, with the KV in (pinned) memory, in the page cache and on disk; a
timeline of each, which shows copies beside layers; then decoding, by the model's own forward and by recorded rows.
Speed does not depend on the weights, and quality is not measured. Needs the default model, for its tokenizer.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = LLAMA_3_8B | {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 4}
REPEATS, CONTEXTS = 5, "500,8192"
TTFT = (
    "bench ttft --chunks 8 --tokens 1024 --methods full,reuse,cacheblend,probe-shift --ratios 0.05,0.15 "
    "--caches memory,warm,cold --no-memory"
)


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Save a Llama of that shape with random bfloat16 weights, unless the folder has one."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ragblend import Engine

    if (folder / "config.json").exists():
        return
    tokenizer = Engine.open(device="cpu").tokenizer
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=16384, **shape)
    torch.manual_seed(0)
    with torch.device("cpu" if shape == TINY else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def bounds(device: str) -> str:
    """One line about the device's limits: bytes per second from pinned memory and within it, and FLOP per second."""
    import torch

    from ragblend.engine.model.device import device_name, transfer_stream

    big, transfers = 1 << 28, transfer_stream(torch.device(device))
    host = transfers.staging(torch.empty(big, dtype=torch.uint8, device="meta"))
    there, other = (torch.empty(big, dtype=torch.uint8, device=device) for _ in range(2))
    square = torch.randn(4096, 4096, device=device).bfloat16()

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS + 1):
            transfers.synchronize()
            begun = time.perf_counter()
            work()
            transfers.synchronize()
            times.append(time.perf_counter() - begun)
        return statistics.median(times[1:])

    into = big / seconds(lambda: there.copy_(host, non_blocking=True)) / 1e9
    within = 2 * big / seconds(lambda: other.copy_(there)) / 1e9
    products = 2 * 4096**3 / seconds(lambda: square @ square) / 1e12
    name = device_name(transfers.device)
    return f"{name}, torch {torch.__version__}: {into:.0f} GB/s into it, {within:.0f} within, {products:.0f} TFLOP/s"


def main(folder: str, *more: str) -> int:
    """Make the model, run `ragblend bench ttft` on it, and decode; more: that command's own options."""
    device, home = "cpu" if "cpu" in more else "cuda", f"{folder}-home"
    make_model(Path(folder), TINY if device == "cpu" else LLAMA_3_8B)
    print(bounds(device), flush=True)
    from benchmarks import measure_decode
    from ragblend.app.cli.main import main as ragblend

    given = ["--model", folder, "--home", home, "--output", f"{folder}-ttft"]
    if code := ragblend([*TTFT.split(), *given, *more]):
        return code
    measure_decode.main(folder, Path(home), device, context=CONTEXTS)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
