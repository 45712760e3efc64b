"""Tiny seeded models of every kind that the engine meets, saved as their own classes save them.

Random weights of the usual size give flat attention, in which a wrong mask or rotation hardly shows: these are large
enough that a row looks at few others (`test_oracles.test_attention_is_not_flat` checks it).
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import DynamicCache, PreTrainedTokenizerFast

LAYERS, WINDOW_TOKENS, CONTEXT_TOKENS, REGIME_TOKENS = 4, 24, 2048, 320
BOS, EOS, TURN, END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
CORPUS = [
    "The harbour master kept two ledgers and wrote the names of the ships, the hour they came and what they carried.",
    "When the storm of the ninth of November broke the northern mole, both ledgers were in the lamp room.",
    "Passages: Answer from the passages above, in one or two short sentences. Question: where, who, why, how many?",
    "You answer questions about the passages you are given. If they do not hold the answer, say so.",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen2.5's teaches calls, in fewer words.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}"
    "{% if message.content or not message.tool_calls %}{{ '\n' + message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
HEAD = {"head_dim": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Queries grow with their positions, a step each 64 tokens.
GROWING = YARN | {"llama_4_scaling_beta": 0.1, "max_position_embeddings": CONTEXT_TOKENS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": REGIME_TOKENS,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = DEFAULT | {"partial_rotary_factor": 0.5}
NEXT = {
    "num_experts": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "mlp_only_layers": list(range(LAYERS)),
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW_TOKENS}
GEMMA = SLIDING | {"query_pre_attn_scalar": 16}
# With one key head, attention keeps less per token than the convolutions.
CONVOLVES = {"layer_types": ["conv", "full_attention"] * 2, "num_key_value_heads": 1, "conv_bias": True}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": DEFAULT}

# name: (family, what its config says beside the common shape)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", HEAD),
    "llama-llama3": ("Llama", HEAD | {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", HEAD | {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", HEAD | {"rope_parameters": YARN}),
    "llama-dynamic": ("Llama", HEAD | {"rope_parameters": DYNAMIC}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", HEAD),
    "mistral": ("Mistral", HEAD | {"sliding_window": WINDOW_TOKENS}),
    "gemma3": ("Gemma3", HEAD | GEMMA),
    "phi3": ("Phi3", {}),
    "phi3-partial": ("Phi3", {"rope_parameters": PARTIAL}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": REGIME_TOKENS},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0, 1], "use_sliding_window": False}),
    "ministral3": ("Ministral3", HEAD | {"rope_parameters": GROWING}),
    "cohere": ("Cohere", {}),
    "glm4": ("Glm4", HEAD),
    "granite": ("Granite", {"embedding_multiplier": 2.0, "logits_scaling": 2.0}),
    "olmo2": ("Olmo2", {}),
    "gemma2": ("Gemma2", HEAD | GEMMA),
    "gpt-oss": ("GptOss", HEAD | SLIDING | EXPERTS),
    "lfm2": ("Lfm2", CONVOLVES),
    "gpt2": ("GPT2", {}),
    "linear-attention": ("Qwen3Next", HEAD | NEXT),
    "mamba": ("Mamba", {"state_size": 8}),
}
_CLASSES = {"GPT2": ("GPT2LMHeadModel", "GPT2Config"), "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig")}
PROMISED = "llama llama-llama3 llama-linear llama-yarn qwen2 qwen3 mistral gemma3 phi3 phi3-partial"
SUPPORTED = tuple(PROMISED.split())
# Not on the list of what is promised, but they load: interleaved pairs, multipliers, soft caps, sinks, layers
# without RoPE, queries scaled by position, convolutions. Right or refused, never wrong.
OTHERS = ("cohere", "glm4", "granite", "olmo2", "gemma2", "gpt-oss", "smollm3", "ministral3", "lfm2")
UNSUPPORTED = ("gpt2", "linear-attention", "mamba")
# These two begin a text with <s> by themselves; the others (as SmolLM2 and Qwen) do not.
WITH_BOS = ("llama-yarn", "gemma3", "mistral")


def make_tokenizer(adds_bos: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a few sentences: every text can be written, and bytes are whole characters only together."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS, TURN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[TURN, END],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(name: str, seed: int = 0, **shape: Any) -> Any:
    """The model in float32, with weights that bite; shape: of its config, where another is wanted."""
    family, extra = KINDS[name]
    names = _CLASSES.get(family, (f"{family}ForCausalLM", f"{family}Config"))
    model_class, config_class = (getattr(transformers, each) for each in names)
    torch.manual_seed(seed)
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    model = model_class(config_class(vocab_size=400, **(SHAPE | ends | extra | shape))).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases and norms, which would be all 0 or all 1
                parameter.add_(0.2 * torch.randn_like(parameter))
            if any(
                name in part for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
            ):  # normed queries and keys would give flat attention
                parameter.add_(0.6)
    return model


def save_model(
    name: str, folder: Path, seed: int = 0, is_endless: bool = False, template: str = TEMPLATE, **shape: Any
) -> Path:
    """is_endless: no answer ends by itself; the logits of the end tokens are 0."""
    model, tokenizer = make_model(name, seed, **shape), make_tokenizer(name in WITH_BOS)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids([EOS, END])
    if is_endless:
        with torch.no_grad():
            model.lm_head.weight[model.generation_config.eos_token_id] = 0
    model.save_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def load_reference(folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """The same checkpoint through transformers alone, with its plainest attention unless told."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Any, token_ids: Any) -> torch.Tensor:
    """(T, vocab) float32, in one plain forward."""
    return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


@torch.inference_mode()
def reference_kv(model: Any, token_ids: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(H, T, D) keys and values of every layer, by transformers' own cache without a window."""
    cache = DynamicCache()
    model(torch.tensor([list(token_ids)]), past_key_values=cache, use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]
