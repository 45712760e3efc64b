"""KV behind the questions: what can be asked already gets its KV in the background, as far as the budget goes.

What has none is nowhere written down: the registry says what there is, the store what of it has KV under this model.
One process does this for a home at a time, without the writer lock: what is deleted meanwhile gets none.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from ragblend.app.progress import Pace, silent
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import Cancelled, StoreLockedError
from ragblend.kvstore.lock import read_holder, writer_lock

StopReason = Literal["", "budget", "left", "elsewhere", "model"]
GOES_ON = "it goes on with the next `ragblend ingest`, with the page, and with every question."


@dataclass(frozen=True)
class KvProgress:
    """How far one collection is; the plan comes first, with done 0.

    phase: `embedding` is what `embed_in_full` does; `converting` is the model's first use, which takes a minute; total,
    tokens and nbytes: of all that is to be encoded, room_bytes: what the budget has left for it; document: whose
    passage is next.
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
    """What became of it. passages: of the collection, with_kv of them have it now (None: not looked at).

    stopped: why it ended before all was done: the budget is used, it was left (Ctrl-C), another process does it, the
    model cannot be fused; message says so to people.
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
    leave: Callable[[], bool] = lambda: False,
) -> KvReport:
    """Encode what has no KV in this collection: what was asked for first, then in the order of ingest.

    leave() ends it before the model is loaded or within a layer, and so does Ctrl-C; what is encoded stays.
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
            said = f"KV is being encoded by process {holder.get('pid')} (`{holder.get('command')}`) already."
            return KvReport(len(passages), None, stopped="elsewhere", message=said)
        try:
            return _encode(workspace, passages, show, leave)
        except KeyboardInterrupt:  # while the model was converted or loaded
            return KvReport(len(passages), None, stopped="left", message=f"Stopped: {GOES_ON}")


def _encode(
    workspace: Workspace,
    passages: dict[str, str],
    show: Callable[[KvProgress], None],
    leave: Callable[[], bool],
) -> KvReport:
    engine, name = workspace.engine, workspace.settings.collection
    if engine.needs_conversion:
        show(KvProgress("converting", name))
    missing = engine.missing(list(passages))
    total, count = len(missing.node_ids), len(passages)
    whole, left_out = count - missing.left_out, ""  # those that have KV when all is done
    if missing.left_out:
        what = f"too long for {engine.model_name}, or were not ingested with it"
        left_out = f"{missing.left_out} passages are {what}."
    if not total:
        return KvReport(count, whole, message=left_out)
    if leave():
        said = _message("left", whole - total, count)
        return KvReport(count, whole - total, stopped="left", message=said)
    show(KvProgress("loading", name, 0, total))
    if not engine.gate.passed:
        failed = f"{engine.model_name} did not pass the self-test ({engine.gate.reason})"
        said = f"No KV was stored: {failed}, so its answers come from full prefill."
        return KvReport(count, 0, stopped="model", message=said)
    left, done, encoded, tokens, pace = missing.tokens, 0, 0, 0, Pace()
    stopped: StopReason = ""

    def shown(document: str) -> None:
        rate, seconds = pace.per_second, pace.seconds_left(left)
        plan = missing.tokens, missing.nbytes, missing.room_bytes
        show(KvProgress("encoding", name, done, total, *plan, document, rate, seconds))

    shown(passages[missing.node_ids[0]])
    begun = time.monotonic()
    try:
        for node_id, new in zip(missing.node_ids, engine.encode_nodes(missing.node_ids, leave), strict=False):
            done, encoded, tokens, left = done + 1, encoded + bool(new), tokens + new, left - new
            if new:
                pace.add(time.monotonic() - begun, new)
            shown(passages[node_id])
            begun = time.monotonic()
        stopped = "" if done == total else "budget"
    except (Cancelled, KeyboardInterrupt):
        stopped = "left"
    with_kv = whole - total + done  # of equal passages one is encoded
    message = " ".join(filter(None, (_message(stopped, with_kv, count), left_out)))
    return KvReport(count, with_kv, encoded, tokens, stopped, message)


def _message(stopped: StopReason, with_kv: int, count: int) -> str:
    if stopped == "budget":
        return f"budget reached: {with_kv:,} of {count:,} passages have KV; the rest is encoded when asked"
    if stopped == "left":
        return f"Stopped: {with_kv:,} of {count:,} passages have KV; {GOES_ON}"
    return ""
