"""vLLM's plugin: registers the connector, and tracks what vLLM gives no connector: workers and paused schedulers.

Every process loads the plugins of the group `vllm.general_plugins` before it makes its scheduler or worker; a worker is
tracked just before its connector is made. Both are forgotten when they are gone.
"""

import weakref
from contextlib import suppress
from typing import Any

CONNECTOR = "RAGBlendConnector"
_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_paused: "weakref.WeakSet[Any]" = weakref.WeakSet()


def register() -> None:
    """Called by vLLM in every process, perhaps more than once. Leaves an unsupported vLLM as it is."""
    from ragblend.integrations.vllm.versions import refusal

    # In an unsupported vLLM too: the connector then says what is wrong, but only to those who ask for it.
    with suppress(ImportError, AttributeError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:
            where = "ragblend.integrations.vllm.connector"
            KVConnectorFactory.register_connector(CONNECTOR, where, CONNECTOR)
    if refusal() is not None:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _track_workers(WorkerWrapperBase)
    _track_pauses(Scheduler)


def _track_workers(wrapper: Any) -> None:
    original = wrapper.initialize_from_config
    if getattr(original, "tracks_workers", False):
        return

    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        _workers.add(self.worker)
        return original(self, *args, **kwargs)

    initialize_from_config.tracks_workers = True  # type: ignore[attr-defined]
    wrapper.initialize_from_config = initialize_from_config


def _track_pauses(scheduler: Any) -> None:
    original = scheduler.set_pause_state
    if getattr(original, "tracks_pauses", False):
        return

    def set_pause_state(self: Any, pause_state: Any) -> None:
        original(self, pause_state)
        if self.pause_state:
            _paused.add(self)
        else:
            _paused.discard(self)

    set_pause_state.tracks_pauses = True  # type: ignore[attr-defined]
    scheduler.set_pause_state = set_pause_state


def is_paused() -> bool:
    """Whether vLLM's scheduler is paused here, perhaps to be given other weights."""
    return bool(_paused)


def worker_of(vllm_config: Any) -> Any:
    """The worker of this process with that configuration; None where the plugin was not loaded."""
    return next((worker for worker in _workers if worker.vllm_config is vllm_config), None)
