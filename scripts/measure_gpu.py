"""Time to first token on an accelerator, in one command: random weights of a real model's shape, the bundled tokenizer.

    python scripts/measure_gpu.py --folder /tmp/llama-3-8b-random                 # CUDA, Llama-3-8B's shape (16 GB)
    python scripts/measure_gpu.py --folder /tmp/tiny --shape tiny --device cpu    # to try the script itself

Full prefill, reuse, CacheBlend and probe-shift, with the KV in (pinned) memory, in the page cache and on the disk; a
timeline of each, in which copies and layers lie above each other. Speed does not depend on what the weights are, and
quality is not looked at. Needs the default model installed, for its tokenizer. Not yet run on a GPU by the authors.
"""

import argparse
import sys
from pathlib import Path

SHAPES = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def make_model(folder: Path, shape: str, device: str) -> None:
    """Save a Llama of that shape with random bfloat16 weights, unless the folder has one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    from ragblend import Engine

    if (folder / "config.json").exists():
        return
    tokenizer = Engine.open(device="cpu").tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=16384, dtype="bfloat16", **SHAPES[shape]
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device), no_init_weights():
        model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data.normal_(std=0.02)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Make the model, then run `ragblend bench ttft` on it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the model goes, and the results beside it"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--chunks", default="8")
    parser.add_argument("--tokens", default="1024")
    given = parser.parse_args()
    make_model(given.folder, given.shape, given.device)

    from ragblend.app.cli import main as ragblend

    home, results = (
        given.folder.with_name(f"{given.folder.name}-home"),
        given.folder.with_name(f"{given.folder.name}-ttft"),
    )
    command = ["bench", "ttft", "--model", str(given.folder), "--device", given.device, "--home", str(home)]
    return ragblend(
        [
            *command,
            "--chunks",
            given.chunks,
            "--tokens",
            given.tokens,
            "--output",
            str(results),
            "--methods",
            "full,reuse,cacheblend,probe-shift",
            "--ratios",
            "0.05,0.15",
            "--caches",
            "memory,warm,cold",
            "--no-memory",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
