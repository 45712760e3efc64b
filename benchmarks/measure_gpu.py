"""Time to first token on an accelerator, in one command: random weights of a real model's shape, the bundled tokenizer.

    python -m benchmarks.measure_gpu llama-3-8b-random             # CUDA, Llama-3-8B's shape (16 GB)
    python -m benchmarks.measure_gpu tiny --device cpu             # another shape, to try this file itself

Full prefill, reuse, CacheBlend and probe-shift, with the KV in (pinned) memory, in the page cache and on the disk; a
timeline of each, in which copies and layers lie above each other. Speed does not depend on what the weights are, and
quality is not looked at. Needs the default model installed, for its tokenizer. Not yet run on a GPU by the authors.
"""

import sys
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
    with torch.device("cpu" if shape == TINY else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: str, *more: str) -> int:
    """Make the model, then run `ragblend bench ttft` on it; more: that command's own options."""
    make_model(Path(folder), TINY if "cpu" in more else LLAMA_3_8B)
    from ragblend.app.cli import main as ragblend

    return ragblend(
        [*TTFT.split(), "--model", folder, "--home", f"{folder}-home", "--output", f"{folder}-ttft", *more]
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
