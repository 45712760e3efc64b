"""The engine's runtime inside vLLM: vLLM's weights, config and dtype; our store, keys, tokenizer and gate."""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ragblend.engine.config import EngineConfig, resolve_home
from ragblend.engine.model.decoder import Decoder
from ragblend.engine.model.device import reader_count
from ragblend.engine.model.gate import GateVerdict
from ragblend.engine.model.hub import is_hub_id
from ragblend.engine.model.load import LoadedModel
from ragblend.engine.runtime import Runtime
from ragblend.engine.runtime_base import once
from ragblend.integrations.vllm.settings import ConnectorSettings
from ragblend.kvstore.errors import UnsupportedModelError
from ragblend.kvstore.memory import MemoryTier

if TYPE_CHECKING:
    from ragblend.integrations.vllm.decoder import VllmDecoder
    from ragblend.integrations.vllm.tensor_parallel import TensorParallelGroup


class VllmRuntime(Runtime):
    """The runtime of one vLLM process. The scheduler's has no model, and uses only store, nodes and keys."""

    def __init__(self, vllm_config: Any, settings: ConnectorSettings, has_model: bool = True) -> None:
        model = vllm_config.model_config
        device = vllm_config.device_config.device_type
        dtype = str(model.dtype).removeprefix("torch.")
        # load="all": the same question gets the same answer, whatever is in the page cache.
        config = EngineConfig(
            str(model.model),
            device,
            dtype,
            settings.collection,
            store_budget_bytes=settings.store_bytes,
            remote=settings.remote,
            load="all",
        )
        super().__init__(config, resolve_home(settings.home))
        self._vllm_model, self._has_model = model, has_model

    def _tiers(self) -> list[MemoryTier]:
        # Without a model the device is not used: even querying its free memory would take some of it.
        return super()._tiers() if self._has_model else []

    @once
    def model_config(self) -> Any:
        return self._vllm_model.hf_text_config

    @once
    def loader_threads(self) -> ThreadPoolExecutor:
        """The loader's threads, on all cores that vLLM may use: it reserves one for connectors."""
        return ThreadPoolExecutor(reader_count(self.device), "ragblend-loader", initializer=_unbind)

    def adopt(self, decoder: Decoder, verdict: GateVerdict) -> None:
        """Use the model through this decoder, with the gate's verdict."""
        vars(self)["loaded"] = LoadedModel(decoder.model, decoder, None)
        vars(self)["gate"] = verdict


def _unbind() -> None:
    """Let this thread run on the scheduler's cores; it inherited the worker's binding to one core."""
    scheduler = multiprocessing.parent_process()
    if scheduler is not None and scheduler.pid is not None and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(scheduler.pid))


def fuses_a_step_ahead(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether prompts are fused one step before vLLM computes their last token (an asynchronous load).

    This is needed where vLLM could not recompute a prompt within the step if fusing it failed: with asynchronous
    scheduling the next token is already scheduled; the second model runner keeps its progress on the device; with a
    sliding window there are no blocks before the first failed one; and with several KV cache groups vLLM does not know
    to which group a failed block belongs.
    """
    is_async = getattr(vllm_config.scheduler_config, "async_scheduling", False)
    is_v2_runner = getattr(vllm_config, "use_v2_model_runner", False)
    kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    return is_async or is_v2_runner or kinds != ["FullAttentionSpec"]


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """The reason why nothing can be fused in this instance of vLLM; None if prompts can."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    for name in ("pipeline", "decode_context", "prefill_context"):
        size = getattr(parallel, f"{name}_parallel_size", 1)
        if size > 1:
            return f"{name.replace('_', ' ')} parallel of {size} is not supported; only 1 is"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported: a draft model would lack the KV of fused prompts"
    if vllm_config.lora_config is not None:
        return "LoRA is not supported: stored KV is the base model's"
    if model.quantization is not None:
        return f"quantization {model.quantization} is not supported: its KV differs from the stored one"
    if str(cache.cache_dtype) not in ("auto", str(model.dtype).removeprefix("torch.")):
        return f"the KV cache's dtype {cache.cache_dtype} is not supported; only the model's own is"
    if is_hub_id(
        str(model.model)
    ):  # RAGBlend loads its config and tokenizer from the default revision and cache
        for name, found in (
            ("revision", model.revision),
            ("download_dir", vllm_config.load_config.download_dir),
        ):
            if found is not None:
                return f"a {name} ({found}) of a hub model is not supported: name its folder instead"
    if getattr(model, "enable_sleep_mode", False) or getattr(vllm_config, "weight_transfer_config", None):
        return "sleep mode and weight transfer are not supported: stored KV is the checkpoint's own"
    if getattr(model, "hf_config_path", None) not in (None, model.model):
        return f"a config from elsewhere ({model.hf_config_path}) is not supported: stored KV is the checkpoint's own"
    if model.hf_overrides:
        return "hf_overrides are not supported: keys of stored KV depend on the checkpoint's own config"
    if str(vllm_config.load_config.load_format) == "dummy":
        return "random weights (load_format dummy) are not supported: stored KV is the model's own"
    if model.tokenizer != model.model:
        return f"a tokenizer ({model.tokenizer}) that is not the model's is not supported"
    if model.is_multimodal_model or model.runner_type != "generate":
        return "only text generation is supported"
    kinds = {type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups}
    known = {"FullAttentionSpec", "SlidingWindowSpec"}
    if kinds - known:
        return f"KV caches of the kinds {', '.join(sorted(kinds - known))} are not supported"
    return None


def decoder_for(
    worker: Any, vllm_config: Any, kv_cache_config: Any, dtype: str, group: "TensorParallelGroup"
) -> "VllmDecoder":
    """Make the decoder of that worker's model. Raises UnsupportedModelError."""
    from ragblend.integrations.vllm.decoder import VllmDecoder
    from ragblend.integrations.vllm.paged import PagedCache

    if worker is None:
        raise UnsupportedModelError(
            "vLLM's plugin of RAGBlend was not loaded (VLLM_PLUGINS must name `ragblend`, or be unset), or the "
            "connector is in a MultiConnector, which is not supported"
        )
    runner = worker.model_runner
    paged = PagedCache(runner, vllm_config, kv_cache_config)
    return VllmDecoder(runner.get_model(), vllm_config.model_config.hf_text_config, dtype, paged, group)
