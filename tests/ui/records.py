"""The app's records as the views get them, with one text wherever a text may be."""

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.chats import ChatMessage
from ragblend.app.library.documents import Document, FileFacts
from ragblend.app.library.job_store import FileJob
from ragblend.app.library.jobs import QueueOverview

WHEN = "2026-03-04T10:00:00+00:00"
TIER = {"hits": 30, "misses": 10, "this_process": {"hits": 3, "misses": 1, "evictions": 0}}


def source(text):
    return AnswerSource(1, "n", "d", "default", text, text, 0.5, text)


def message(text, role="assistant", report=None):
    return ChatMessage(1, 1, role, text, WHEN, (source(text),), report or {})


def hood(text="m", **values):
    segment = {"label": text, "number": 1, "tokens": 5, "runs": [["r", 3], ["c", 2]], "text": text}
    times = dict.fromkeys(("retrieve_ms", "load_ms", "stall_ms", "prefill_ms", "ttft_ms", "total_ms"), 1.0)
    named = dict.fromkeys(("model", "device", "dtype", "method", "notice", "full_prefill_why"), text)
    more = {
        "ratio": 0.15,
        "hood": 1,
        "segments": [segment],
        "tokens": {"prompt": 5, "reused": 3},
        "tokens_per_s": 4.0,
        "full_prefill_ms": None,
        "full_prefill_is": "",
        "timeline": [[text, text, 0.0, 1.0, 1, 0]],
        "memory_bytes": {text: 5},
        "hits": 1,
        "misses": 0,
    }
    return times | named | more | values


def document(text="/x/a.pdf", **values):
    named = dict.fromkeys(("id", "path", "collection", "recipe"), text)
    more = {"state": "done", "reason": "", "facts": FileFacts(5, 0, ""), "passages": 2, "updated_at": WHEN}
    return Document(**(named | more | values))


def job(text="/x/a.md", **values):
    named = {"collection": text, "path": text, "added_at": WHEN, "finished_at": None}
    more = {"id": 1, "kind": "ingest", "state": "embedding", "reason": "", "size": 5}
    return FileJob(**(named | more | values))


def queue(**values):
    defaults = {
        "counts": {"done": 1},
        "total": 4,
        "finished": 1,
        "files_per_minute": 20.0,
        "seconds_left": 90.0,
        "paused": False,
        "waiting": None,
        "current": None,
        "changes": 7,
    }
    return QueueOverview(**(defaults | values))


def stats(policy="pgdsf"):
    disk = TIER | {"bytes": 50, "budget_bytes": 100}
    return {"bytes": 50, "budget_bytes": 100, "entries": 7, "policy": policy, "tiers": {"disk": disk}}
