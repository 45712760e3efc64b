"""Queues the background work that a prefilled prompt causes: storing, encoding and promoting KV for later questions."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ragblend.engine.node_encoder import LocalNodeEncoder
from ragblend.engine.profiling import measure_layers
from ragblend.engine.prompts.paths import compute_next_node, path_of, store_computed
from ragblend.engine.request import Request, keys_of
from ragblend.engine.results import Prefilled
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.background import Priority
from ragblend.engine.scheduling.queue import CallbackCancel
from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import Cancelled, StoreFullError
from ragblend.kvstore.keys import ChunkKey

log = logging.getLogger("ragblend")


def queue_background_work(runtime: Runtime, request: Request, prefilled: Prefilled) -> None:
    """Queue a prefilled prompt's background work. Call it after the answer: earlier, it would slow down decoding."""
    report, background = prefilled.report, runtime.background
    if report.hits:
        background.add(runtime.store.save_ledger, priority=Priority.STORE)
    if prefilled.computed:  # at most one such task waits, because each holds a whole context in memory
        store = partial(store_computed, runtime, request.collection, prefilled.computed)
        background.add(store, store_computed)
    elif request.policy.uses_tree:
        compute = partial(compute_next_node, runtime, request.prompt, request.collection)
        background.add(compute, compute_next_node)
    queue_storing_arrived(runtime, request, prefilled)
    for collection, node_ids in runtime.take_unstored().items():
        LocalNodeEncoder(runtime, collection).queue_nodes(node_ids)
    if report.misses and request.policy.name != "full" and not request.policy.exact:
        for chunk in request.prompt.chunks:
            if chunk.token_ids:
                LocalNodeEncoder(runtime, request.collection_of(chunk)).queue_encoding(chunk)
    if (
        report.hits
        and runtime.load == "auto"
        and runtime.profile is None
        and not runtime.speeds.cannot_measure
    ):
        background.add(partial(_measure_layers, runtime), _measure_layers, Priority.MEASURE)
    if report.hits and runtime.store.tiers:
        name = (request.collection, *(chunk.encoded_ids for chunk in request.prompt.chunks))
        background.add(partial(_promote, runtime, replace(request, session=None)), name)


def queue_storing_arrived(runtime: Runtime, request: Request, prefilled: Prefilled) -> None:
    """Queue storing the KV that came from the shared store, unless another such task is waiting."""
    if prefilled.arrived:
        work = partial(_store_arrived, runtime, request, prefilled.arrived)
        runtime.background.add(work, _store_arrived, Priority.STORE)


def _store_arrived(runtime: Runtime, request: Request, arrived: Mapping[ChunkKey, Blob]) -> None:
    try:
        for chunk, _, key in keys_of(runtime, request):
            if key in arrived:
                nodes = LocalNodeEncoder(runtime, request.collection_of(chunk))
                nodes.store_chunk(chunk, key, partial(arrived.__getitem__, key))
    except StoreFullError as error:
        log.warning("KV from the shared store is not stored here: %s", error)


def _measure_layers(runtime: Runtime) -> None:
    """Measure the layers for the controller, unless the model was closed meanwhile. Raises Cancelled if a request
    waits: the next one queues it again.
    """
    cancel = CallbackCancel(lambda: runtime.background.should_stop(Priority.MEASURE))
    with runtime.queue.turn(cancel, background=True) as turn:
        if runtime.is_ready and runtime.profile is None:
            runtime.speeds.cannot_measure = True  # an error would be repeated after every answer
            try:
                runtime.save_profile(measure_layers(runtime, turn))
            except Cancelled:
                runtime.speeds.cannot_measure = False
                raise


def _promote(runtime: Runtime, request: Request) -> None:
    """Copy KV that was used to the next faster tier."""
    prompt, geometry = request.prompt, runtime.fingerprint.geometry
    for node, _ in path_of(runtime, prompt, request.collection) if request.policy.uses_tree else ():
        with runtime.store_lock:
            runtime.store.promote(node.key, node.token_ids, geometry, node.start, node.parent)
    for chunk, prefix, key in () if request.policy.exact else keys_of(runtime, request):
        with runtime.store_lock:
            runtime.store.promote(key, chunk.encoded_ids, geometry, len(prefix))
