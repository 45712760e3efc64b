"""Encodes passages that have no KV yet, as far as the store's budget allows.

No list of them is kept: the registry says which passages exist, and the store which of them have KV under this model.
Only one process at a time encodes for a home, without the writer lock; passages that are deleted meanwhile get no KV.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from ragblend.app.progress import Pace, silent
from ragblend.app.words import plural
from ragblend.app.workspace import Workspace
from ragblend.engine.scheduling.queue import CallbackCancel
from ragblend.kvstore.errors import Cancelled, StoreLockedError
from ragblend.kvstore.lock import read_holder, writer_lock

StopReason = Literal["", "budget", "left", "elsewhere", "model"]
CONTINUED_BY = "the next `ragblend ingest`, the page, and every question continue it."


@dataclass(frozen=True)
class KvProgress:
    """The progress of one collection's background work; in the first report of a phase done is 0.

    phase: `embedding` is the work of `embed_in_full` and `switch_to_next_embedder`; `converting` is the model's first
    use, which takes a minute. total, tokens, nbytes: of all passages to encode, and their KV; room_bytes: free space in
    the budget; document: the path of the one that the current passage belongs to.
    """

    phase: Literal["embedding", "converting", "loading", "encoding"]
    collection: str
    done: int = 0
    total: int = 0
    tokens: int = 0
    nbytes: int = 0
    room_bytes: int = 0
    document: str = ""
    tokens_per_s: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True)
class KvReport:
    """The result. passages: all of the collection; with_kv: how many of them have KV now (None: unknown).

    encoded, tokens: what this call encoded. stopped: why it ended early: the budget is used up ("budget"), it was
    cancelled ("left"), another process is encoding ("elsewhere"), or the model failed its self-test ("model"); message:
    the same for people.
    """

    passages: int
    with_kv: int | None
    encoded: int = 0
    tokens: int = 0
    stopped: StopReason = ""
    message: str = ""


def encode_missing(
    workspace: Workspace,
    show: Callable[[KvProgress], None] = silent,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> KvReport:
    """Encode the collection's passages without KV: first those that questions needed, then in order of ingest.

    is_cancelled() is called before the model is loaded and between layers; Ctrl-C cancels too. What is encoded is kept.
    Raises StoreFullError and ModelError.
    """
    passages = workspace.library.nodes(workspace.settings.collection)
    if not passages:
        return KvReport(0, 0)
    with ExitStack() as stack:
        try:
            stack.enter_context(writer_lock(workspace.home.encoder_lock))
        except StoreLockedError:
            holder = read_holder(workspace.home.encoder_lock) or {}
            message = f"Process {holder.get('pid')} (`{holder.get('command')}`) is already encoding KV."
            return KvReport(len(passages), None, stopped="elsewhere", message=message)
        try:
            return _encode(workspace, passages, show, is_cancelled)
        except KeyboardInterrupt:  # while the model was converted or loaded
            return KvReport(len(passages), None, stopped="left", message=f"Stopped: {CONTINUED_BY}")


def _encode(
    workspace: Workspace,
    passages: dict[str, str],
    show: Callable[[KvProgress], None],
    is_cancelled: Callable[[], bool],
) -> KvReport:
    engine, name = workspace.engine, workspace.settings.collection
    if engine.needs_conversion:
        show(KvProgress("converting", name))
    missing = engine.missing(list(passages))
    total, count = len(missing.node_ids), len(passages)
    can_have_kv, too_long = count - missing.left_out, ""
    if missing.left_out:
        too_long = f"Too long for {engine.model_name}, or not ingested with it: {plural(missing.left_out, 'passage')}."
    if not total:
        return KvReport(count, can_have_kv, message=too_long)
    with_kv = can_have_kv - total
    if is_cancelled():
        return KvReport(count, with_kv, stopped="left", message=_message("left", with_kv, count))
    show(KvProgress("loading", name, 0, total))
    if not engine.gate.passed:
        message = (
            f"No KV was stored: {engine.model_name} is not fused ({engine.gate.reason}), so its "
            "answers come from full prefill."
        )
        return KvReport(count, 0, stopped="model", message=message)
    done, encoded, tokens, pace = 0, 0, 0, Pace()
    stopped: StopReason = ""
    sizes = missing.tokens, missing.nbytes, missing.room_bytes
    progress = KvProgress("encoding", name, 0, total, *sizes, passages[missing.node_ids[0]])
    show(progress)
    begun = time.monotonic()
    try:
        for new in engine.encode_nodes(missing.node_ids, CallbackCancel(is_cancelled)):
            if new:
                pace.add(time.monotonic() - begun, new)
            document = passages[missing.node_ids[done]]
            done, encoded, tokens = done + 1, encoded + bool(new), tokens + new
            rate, left = pace.per_second, pace.seconds_left(missing.tokens - tokens)
            show(replace(progress, done=done, document=document, tokens_per_s=rate, seconds_left=left))
            begun = time.monotonic()
        stopped = "" if done == total else "budget"
    except (Cancelled, KeyboardInterrupt):
        stopped = "left"
    with_kv += done  # more than `encoded`: equal passages share their KV
    message = " ".join(filter(None, (_message(stopped, with_kv, count), too_long)))
    return KvReport(count, with_kv, encoded, tokens, stopped, message)


def _message(stopped: StopReason, with_kv: int, count: int) -> str:
    if stopped == "budget":
        counts = f"{with_kv:,} of {count:,} passages have KV"
        return f"budget reached: {counts}; the others are encoded when a question uses them"
    if stopped == "left":
        return f"Stopped: {with_kv:,} of {count:,} passages have KV; {CONTINUED_BY}"
    return ""
