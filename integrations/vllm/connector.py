"""RAGBlendConnector: fused prefill as a KV connector of vLLM.

One instance in the scheduler finds passages in a prompt and reports that all but its last token can be loaded; another
in the worker, before that step's forward pass, fuses the prompt and writes its KV into the allocated blocks. If
anything fails, vLLM computes the prompt itself.
"""

import logging
import math
from typing import Any

from ragblend.integrations.vllm.versions import missing_name, refusal, untested_warning

if (_refusal := refusal() or missing_name()) is not None:
    raise ImportError(_refusal)

from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from ragblend.integrations.vllm.messages import FusionReports, StepWork, WorkerStatus
from ragblend.integrations.vllm.metrics import FusionMetrics, FusionStats
from ragblend.integrations.vllm.plugin import is_paused, worker_of
from ragblend.integrations.vllm.routes import change_routes
from ragblend.integrations.vllm.runtime import (
    VllmRuntime,
    decoder_for,
    fuses_a_step_ahead,
    unsupported_reason,
)
from ragblend.integrations.vllm.scheduler import ConnectorScheduler
from ragblend.integrations.vllm.settings import ConnectorSettings
from ragblend.integrations.vllm.tensor_parallel import tensor_parallel_group
from ragblend.integrations.vllm.worker import ConnectorWorker
from ragblend.kvstore.errors import RagBlendError

log = logging.getLogger("ragblend")


class RAGBlendConnector(KVConnectorBase_V1, SupportsHMA):
    """Created by vLLM, once for its scheduler and once for each worker. Raises UsageError for wrong settings."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _use_vllm_logging()
        transfer = vllm_config.kv_transfer_config
        transfer.kv_load_failure_policy = "recompute"  # the scheduler reads it after creating the connector
        self._fuses_ahead = fuses_a_step_ahead(vllm_config, kv_cache_config)
        self._settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER and (message := untested_warning()) is not None:
            log.warning("%s", message)
        self._refusal = self._start(vllm_config, role, kv_cache_config)
        if self._refusal is not None:
            log.warning(
                "RAGBlend fuses nothing here, and vLLM computes all prompts itself: %s", self._refusal
            )

    def _start(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> str | None:
        """Create this process's side; returns the reason if that is not possible."""
        if (reason := unsupported_reason(vllm_config, kv_cache_config)) is not None:
            return reason
        has_model = role != KVConnectorRole.SCHEDULER
        runtime = VllmRuntime(vllm_config, self._settings, has_model)
        if has_model:
            self._worker = ConnectorWorker(runtime, self._settings, self._fuses_ahead)
            return None
        try:
            block_tokens = math.lcm(
                *(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
            )
            self._scheduler = ConnectorScheduler(runtime, self._settings, block_tokens)
        except (RagBlendError, OSError) as error:  # a store of another version, an unreadable home
            runtime.close()
            return str(error)
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # --- the scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.count_cached = lambda request: int(
                kv_cache_manager.get_computed_blocks(request)[1]
            )
            self._scheduler.evict = kv_cache_manager.evict_blocks

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.plan(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.loadable_tokens(request, num_computed_tokens)
        return tokens, self._fuses_ahead and bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        if self._scheduler is None:
            return StepWork()
        is_idle = not scheduler_output.total_num_scheduled_tokens and not is_paused()
        return self._scheduler.take_work(is_idle)

    def update_connector_output(self, connector_output: Any) -> None:
        found = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(found, FusionReports):
            self._scheduler.handle_reports(found)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._scheduler is None else self._scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Keeps the idle engine stepping while passages are to be encoded."""
        return self._scheduler is not None and self._scheduler.has_missing and not is_paused()

    def reset_cache(self) -> bool:
        """Called by vLLM when its weights may have been replaced, so that stored KV may be another model's."""
        if self._scheduler is not None:
            self._scheduler.stop(
                "the connector's cache was reset, as when weights are replaced; restart vLLM to fuse again"
            )
        return True

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Called by vLLM before the first request, with the metadata of all workers, perhaps of another connector.

        Prompts are fused only if all workers can fuse; otherwise an answer would use blocks that one worker did not
        fill.
        """
        statuses = [each for each in metadata.values() if isinstance(each, WorkerStatus)]
        if self._scheduler is not None and statuses and len(statuses) == len(metadata):
            self._scheduler.refusal = next(filter(None, (each.refusal for each in statuses)), None)

    # --- the worker's side

    def get_handshake_metadata(self) -> WorkerStatus | None:
        if self._vllm_config.parallel_config.pipeline_parallel_size > 1:  # vLLM takes none from later stages
            return None
        return WorkerStatus(self._refusal if self._worker is None else self._worker.refusal)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Runs the gate: now model and cache exist, and there is no request yet."""
        if self._worker is not None:
            worker, config, groups = worker_of(self._vllm_config), self._vllm_config, self._kv_cache_config
            group = tensor_parallel_group(config)
            self._worker.start(lambda dtype: decoder_for(worker, config, groups, dtype, group), group)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None and isinstance(self._connector_metadata, StepWork):
            self._worker.run(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers were written before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: KV computed in a context is never stored."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded, failed = (set[str](), set[str]()) if self._worker is None else self._worker.take_loaded()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> FusionReports | None:
        return None if self._worker is None else self._worker.take_reports()

    # --- statistics

    def get_kv_connector_stats(self) -> FusionStats | None:
        return None if self._worker is None else self._worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FusionStats:
        return FusionStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> FusionMetrics:
        change_routes()  # vLLM calls this in the process that answers HTTP
        return FusionMetrics(*given)


def _use_vllm_logging() -> None:
    """Log through vLLM's handlers, which only its own loggers have."""
    ours, theirs = logging.getLogger("ragblend"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = theirs.handlers
        ours.setLevel(theirs.level)
        ours.propagate = False
