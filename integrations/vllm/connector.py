"""RAGBlendConnector: fused prefill as a KV connector of vLLM. Start here.

One instance in the scheduler finds passages in a prompt and answers that all but its last token can be loaded; another
in the worker, before the forward of that step, fuses the prompt and writes its KV into the blocks that it was given.
Whatever goes wrong on the way, the prompt is vLLM's own.
"""

import logging
import sys
from typing import Any

from ragblend.integrations.vllm.versions import refusal, warning

if (_refusal := refusal()) is not None:
    raise ImportError(_refusal)

from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from ragblend.integrations.vllm.messages import Fused, Orders, Verdict
from ragblend.integrations.vllm.metrics import FusedMetrics, FusedStats
from ragblend.integrations.vllm.plugin import is_paused, worker_of
from ragblend.integrations.vllm.runtime import VllmRuntime, decoder_for, failure_policy, unsupported
from ragblend.integrations.vllm.scheduling import SchedulerSide
from ragblend.integrations.vllm.settings import Settings
from ragblend.integrations.vllm.team import team_of
from ragblend.integrations.vllm.working import WorkerSide
from ragblend.kvstore.errors import RagBlendError

log = logging.getLogger("ragblend")


class RAGBlendConnector(KVConnectorBase_V1, SupportsHMA):
    """Made by vLLM, once for its scheduler and once for each worker. Raises UsageError for settings that are wrong."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        transfer = vllm_config.kv_transfer_config
        # Read by the scheduler after this.
        transfer.kv_load_failure_policy = failure_policy(vllm_config, kv_cache_config)
        self._settings = Settings.of(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER and (said := warning()) is not None:
            log.warning("%s", said)
        self._refusal = self._begun(vllm_config, role, kv_cache_config)
        if self._refusal is not None:
            log.warning("RAGBlend fuses nothing here, and all prompts are vLLM's own: %s", self._refusal)

    def _begun(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> str | None:
        """Why this side does nothing, if so."""
        if (why := unsupported(vllm_config, kv_cache_config)) is not None:
            return why
        has_model = role != KVConnectorRole.SCHEDULER
        runtime = VllmRuntime(vllm_config, self._settings, has_model)
        if has_model:
            can_tell = len(kv_cache_config.kv_cache_groups) == 1
            computes = can_tell and vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
            longest = self._settings.step_tokens if computes else sys.maxsize
            self._worker = WorkerSide(runtime, can_tell, longest)
            return None
        try:
            self._scheduler = SchedulerSide(runtime, self._settings)
        except (RagBlendError, OSError) as error:  # a store of another version, a home that cannot be read
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
            self._scheduler.find_cached = lambda request: int(
                kv_cache_manager.get_computed_blocks(request)[1]
            )
            self._scheduler.evict = kv_cache_manager.evict_blocks

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        if self._scheduler is None:
            return Orders()
        idle = not scheduler_output.total_num_scheduled_tokens and not is_paused()
        return self._scheduler.orders(idle)

    def update_connector_output(self, connector_output: Any) -> None:
        found = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(found, Fused):
            self._scheduler.done(found)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._scheduler is None else self._scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Has the engine go on stepping while passages wait to be encoded and nobody else needs it."""
        return self._scheduler is not None and self._scheduler.has_missing and not is_paused()

    def reset_cache(self) -> bool:
        """Told by vLLM when its weights may have been replaced: stored KV may be another model's from then on."""
        if self._scheduler is not None:
            self._scheduler.end(
                "the connector's cache was reset, as after new weights; start vLLM anew to fuse again"
            )
        return True

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Told by vLLM before the first request, from all workers; in a MultiConnector it may be another connector's.

        Only workers that all consent do: what a worker does not fill would be answered from.
        """
        verdicts = [each for each in metadata.values() if isinstance(each, Verdict)]
        if self._scheduler is not None and verdicts and len(verdicts) == len(metadata):
            self._scheduler.refusal = next(filter(None, (each.refusal for each in verdicts)), None)

    # --- the worker's side

    def get_handshake_metadata(self) -> Verdict | None:
        if self._vllm_config.parallel_config.pipeline_parallel_size > 1:  # vLLM takes none from later stages
            return None
        return Verdict(self._refusal if self._worker is None else self._worker.refusal)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The first moment at which there are a model and a cache, and no request: the gate's."""
        if self._worker is not None:
            worker, config, groups = worker_of(self._vllm_config), self._vllm_config, self._kv_cache_config
            team = team_of(config)
            self._worker.begin(lambda dtype: decoder_for(worker, config, groups, dtype, team), team)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None and isinstance(self._connector_metadata, Orders):
            self._worker.work(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All was written before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """KV out of a context is never stored."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> Fused | None:
        return None if self._worker is None else self._worker.take_reports()

    # --- seen from outside

    def get_kv_connector_stats(self) -> FusedStats | None:
        return None if self._worker is None else self._worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FusedStats:
        return FusedStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> FusedMetrics:
        return FusedMetrics(*given)


def _log_as_vllm_does() -> None:
    """vLLM writes down what its own loggers say, and no other's."""
    ours, theirs = logging.getLogger("ragblend"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = theirs.handlers
        ours.setLevel(theirs.level)
        ours.propagate = False
