"""vLLM's plugin: names the connector, and notes what vLLM hands no connector: the worker, which has the model, and
whether the scheduler is paused.

Every process loads the plugins of the group `vllm.general_plugins` before it makes its scheduler or worker; a worker is
noted here right before its connector is made. Both are forgotten when they go.
"""

import weakref
from contextlib import suppress
from typing import Any

CONNECTOR = "RAGBlendConnector"
_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_paused: "weakref.WeakSet[Any]" = weakref.WeakSet()


def register() -> None:
    """Called by vLLM in every process, perhaps more than once. What is not known is left as it is."""
    from ragblend.integrations.vllm.versions import refusal

    # Of a vLLM that is not known, too: the connector says then what does not fit. Its users may not want us at all.
    with suppress(ImportError, AttributeError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:
            where = "ragblend.integrations.vllm.connector"
            KVConnectorFactory.register_connector(CONNECTOR, where, CONNECTOR)
    if refusal() is not None:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _note_workers(WorkerWrapperBase)
    _note_pauses(Scheduler)


def _note_workers(wrapper: Any) -> None:
    begin = wrapper.initialize_from_config
    if getattr(begin, "notes_workers", False):
        return

    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        _workers.add(self.worker)
        return begin(self, *args, **kwargs)

    initialize_from_config.notes_workers = True  # type: ignore[attr-defined]
    wrapper.initialize_from_config = initialize_from_config


def _note_pauses(scheduler: Any) -> None:
    pause = scheduler.set_pause_state
    if getattr(pause, "notes_pauses", False):
        return

    def set_pause_state(self: Any, pause_state: Any) -> None:
        pause(self, pause_state)
        if self.pause_state:
            _paused.add(self)
        else:
            _paused.discard(self)

    set_pause_state.notes_pauses = True  # type: ignore[attr-defined]
    scheduler.set_pause_state = set_pause_state


def is_paused() -> bool:
    """Whether somebody has stopped vLLM here for a while, perhaps to give it other weights."""
    return bool(_paused)


def worker_of(vllm_config: Any) -> Any:
    """The worker of this process with that configuration; None where the plugin was not loaded."""
    return next((worker for worker in _workers if worker.vllm_config is vllm_config), None)
