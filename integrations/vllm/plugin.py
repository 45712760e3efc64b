"""vLLM's plugin: names the connector, and keeps hold of each worker, through which the connector reaches the model.

vLLM hands a connector no model. Every process loads the plugins of the group `vllm.general_plugins` before it makes its
worker; a worker is noted here right before its connector is made, and forgotten with it.
"""

import weakref
from typing import Any

CONNECTOR = "RAGBlendConnector"
_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()


def register() -> None:
    """Called by vLLM in every process, perhaps more than once. What is not known is left as it is."""
    from ragblend.integrations.vllm.versions import refusal

    if refusal() is not None:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "ragblend.integrations.vllm.connector", CONNECTOR)
    _note_workers(WorkerWrapperBase)


def _note_workers(wrapper: Any) -> None:
    begin = wrapper.initialize_from_config
    if getattr(begin, "notes_workers", False):
        return

    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        _workers.add(self.worker)
        return begin(self, *args, **kwargs)

    initialize_from_config.notes_workers = True  # type: ignore[attr-defined]
    wrapper.initialize_from_config = initialize_from_config


def worker_of(vllm_config: Any) -> Any:
    """The worker of this process with that configuration; None where the plugin was not loaded."""
    return next((worker for worker in _workers if worker.vllm_config is vllm_config), None)
