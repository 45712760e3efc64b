"""vLLM's plugin: registers the connector, and tracks workers and paused schedulers, which vLLM does not pass to
connectors.

Every process loads the plugins of the group `vllm.general_plugins` before it makes its scheduler or worker; a worker is
tracked just before its connector is created. References are weak.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

CONNECTOR = "RAGBlendConnector"
_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_paused: "weakref.WeakSet[Any]" = weakref.WeakSet()


def register() -> None:
    """Called by vLLM in every process, perhaps more than once. Does not patch an unsupported vLLM."""
    from ragblend.integrations.vllm.versions import missing_name, refusal

    # Also in an unsupported vLLM: the connector then reports the problem, but only if it is used.
    with suppress(ImportError, AttributeError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:
            where = "ragblend.integrations.vllm.connector"
            KVConnectorFactory.register_connector(CONNECTOR, where, CONNECTOR)
    if (refusal() or missing_name()) is not None:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _call_before(WorkerWrapperBase, "initialize_from_config", _track_worker)
    _call_before(Scheduler, "set_pause_state", _track_pause)


def _call_before(owner: Any, name: str, track: Callable[..., None]) -> None:
    """Patch a method to call `track` with its arguments first. Idempotent."""
    original = getattr(owner, name)
    if getattr(original, "is_tracked", False):
        return

    def tracked(*args: Any, **kwargs: Any) -> Any:
        track(*args, **kwargs)
        return original(*args, **kwargs)

    tracked.is_tracked = True  # type: ignore[attr-defined]
    setattr(owner, name, tracked)


def _track_worker(wrapper: Any, *_: Any, **__: Any) -> None:
    _workers.add(wrapper.worker)


def _track_pause(scheduler: Any, pause_state: Any) -> None:
    (_paused.add if pause_state else _paused.discard)(scheduler)


def is_paused() -> bool:
    """Whether vLLM's scheduler is paused in this process, perhaps to load other weights."""
    return bool(_paused)


def worker_of(vllm_config: Any) -> Any:
    """The worker of this process with that configuration; None where the plugin was not loaded."""
    return next((worker for worker in _workers if worker.vllm_config is vllm_config), None)
