"""The library as HTML: documents by page, the ingest queue, watched folders. All pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ragblend.ui import icons
from ragblend.ui.render_chat import day
from ragblend.ui.render_text import attributes, button, duration, escape, plural, problem, progress, size

if TYPE_CHECKING:
    from ragblend.app.job_store import FileJob
    from ragblend.app.jobs import Added, Overview
    from ragblend.app.listing import DocumentPage, ListedDocument
    from ragblend.app.watching import Watched

WORKING = ("parsing", "embedding", "encoding")
PHASES = {"parsing": "reading", "embedding": "embedding", "encoding": "encoding"}
STATES = {"done": "ready", "pending": "not finished", "failed": "failed"}
IN_QUEUE = "in the queue"


def documents(
    page: "DocumentPage", offset: int, limit: int, search: str = "", queued: Collection[str] = ()
) -> str:
    """One page of documents, each with its state, and the way to the others. queued: paths that wait for their turn."""
    if not page.documents:
        words = f"No document matches “{escape(search)}”." if search else "No documents here yet."
        return f'<p class="rb-empty">{words}</p>'
    rows = "".join(_document(document, document.path in queued) for document in page.documents)
    return (
        '<div class="scroll"><table class="rb-documents"><thead><tr><th scope="col">Document</th><th '
        'scope="col">State</th>'
        '<th scope="col" class="number">Passages</th><th scope="col" class="number">Size</th><th '
        'scope="col">Changed</th>'
        f'<th scope="col"><span class="rb-hidden">Actions</span></th></tr></thead><tbody>{rows}</tbody></table></div>'
        f"{pager(page.total, offset, limit, 'document')}"
    )


def _document(document: "ListedDocument", is_queued: bool) -> str:
    state = IN_QUEUE if is_queued else escape(STATES.get(document.state, document.state))
    can_be_tried = document.state != "done" and not is_queued
    tag = ' <span class="rb-tag">scanned: no text in it</span>' if document.scanned else ""
    reason = f'<div class="reason">{escape(document.reason)}</div>' if document.reason else ""
    retry = button(icons.RETRY, "retry-document", title="Try again", kind="icon", id=document.id)
    remove = button(
        icons.BIN,
        "delete-document",
        title=f"Delete {document.name}",
        kind="icon",
        id=document.id,
        confirm="Delete?",
    )
    where = "a copy in the library" if document.uploaded else document.path
    return (
        f'<tr class="s-{escape(document.state)}"><td><span class="name" '
        f'title="{escape(document.path)}">{escape(document.name)}'
        f'</span>{tag}<div class="where">{escape(where)}</div>{reason}</td>'
        f'<td><span class="rb-state s-{"pending" if is_queued else escape(document.state)}">{state}</span></td>'
        f'<td class="number">{document.passages:,}</td><td class="number">{size(max(document.size, 0))}</td>'
        f"<td>{day(document.updated_at)}</td>"
        f'<td class="tools">{retry if can_be_tried else ""}{remove}</td></tr>'
    )


def collection_tools(name: str, documents: int) -> str:
    """What can be done to the whole collection."""
    said = f"Delete all of “{name}”"
    confirm = f"Delete {plural(documents, 'document')} for good?"
    return f'<div class="tools">{button(escape(said), "delete-collection", kind="outlined", confirm=confirm)}</div>'


def pager(total: int, offset: int, limit: int, noun: str) -> str:
    """`51 to 100 of 20,000 documents`, with buttons to the pages before and after."""
    first, last = offset + 1, min(offset + limit, total)
    if total <= limit:
        return f'<nav class="rb-pager" aria-label="Pages"><span>{plural(total, noun)}</span></nav>'
    back = attributes(data_act="page", data_offset=max(0, offset - limit), disabled=offset == 0)
    onward = attributes(data_act="page", data_offset=offset + limit, disabled=last >= total)
    return (
        f'<nav class="rb-pager" aria-label="Pages"><button type="button" class="rb-button outlined"{back}>Back</button>'
        f"<span>{first:,} to {last:,} of {plural(total, noun)}</span>"
        f'<button type="button" class="rb-button outlined"{onward}>On</button></nav>'
    )


def queue(overview: "Overview") -> str:
    """How far the ingest is: one bar, what is being done, how long it still takes, what holds it up."""
    if overview.total == 0:
        return ""
    parts = [problem(overview.waiting, "warning") if overview.waiting else ""]
    done, total = overview.finished, overview.total
    if done >= total:
        return f'<div class="rb-queue">{"".join(parts)}{_finished(overview.counts)}</div>'
    share = 100 * done / total
    parts.append(
        f'<div class="head"><strong>{"Paused" if overview.paused else "Reading documents"}</strong>'
        f"<span>{done:,} of {plural(total, 'file')}{_pace(overview)}</span></div>"
        + progress(share, "Files read")
    )
    if overview.current is not None and not overview.paused:
        parts.append(_current(overview.current))
    pause = (
        button("Go on", "resume", kind="outlined")
        if overview.paused
        else button("Pause", "pause", kind="outlined")
    )
    parts.append(f'<div class="tools">{pause}{button("Cancel", "cancel", kind="outlined")}</div>')
    return f'<div class="rb-queue">{"".join(parts)}</div>'


def _pace(overview: "Overview") -> str:
    pace = f" · {overview.files_per_minute:.0f} files a minute" if overview.files_per_minute else ""
    left = f" · {duration(overview.seconds_left)} left" if overview.seconds_left else ""
    return "" if overview.paused else pace + left


def _current(job: "FileJob") -> str:
    phase = PHASES.get(job.state, job.state)
    share = 100 * job.done / job.total if job.total else 0
    noun = "scanned page" if job.state == "parsing" else "passage"
    count = f" {job.done:,} of {plural(job.total, noun)}" if job.total else ""
    return (
        f'<div class="current"><span class="name">{escape(job.name)}</span><span>{escape(phase)}{count}</span>'
        f'<div class="rb-progress thin" aria-hidden="true"><i style="width:{share:.1f}%"></i></div></div>'
    )


def _finished(counts: Mapping[Any, int]) -> str:
    said = ", ".join(f"{count:,} {escape(state)}" for state, count in counts.items() if count)
    retry = ""
    if counts.get("failed") or counts.get("cancelled"):
        retry = button("Try those again", "retry-all", kind="outlined")
    return (
        f'<div class="head"><strong>Finished</strong><span>{said}</span></div>'
        f'<div class="tools">{retry}{button("Clear", "clear", kind="outlined")}</div>'
    )


def jobs(rows: Sequence["FileJob"], total: int, finished: bool) -> str:
    """The files of the queue one by one, with reasons; finished: none of them is waiting or being read any more."""
    if not rows:
        return ""
    files = plural(total, "file")
    heading = f"What became of {files}" if finished else f"{files} in the queue"
    made = "".join(_job(job) for job in rows)
    more = f'<p class="rb-small">and {total - len(rows):,} more</p>' if total > len(rows) else ""
    return f'<details class="rb-jobs"><summary>{heading}</summary><ul>{made}</ul>{more}</details>'


def _job(job: "FileJob") -> str:
    reason = f'<div class="reason">{escape(job.reason)}</div>' if job.reason else ""
    tools = ""
    if job.state in ("failed", "cancelled"):
        tools = button(icons.RETRY, "retry-job", title="Try again", kind="icon", id=job.id)
    elif job.state in ("queued", *WORKING):
        tools = button(icons.CLOSE, "cancel-job", title="Cancel", kind="icon", id=job.id)
    return (
        f'<li><span class="name" title="{escape(job.path)}">{escape(job.name)}</span>'
        '<span class="rb-state '
        f's-{escape(job.state)}">{escape(PHASES.get(job.state, job.state))}</span>{tools}{reason}</li>'
    )


def added(result: "Added") -> str:
    """What became of an upload or a folder."""
    made = [problem(f"{plural(result.files, 'file')} put in the queue.", "info")]
    if result.skipped:
        names = ", ".join(result.skipped[:5]) + (" …" if len(result.skipped) > 5 else "")
        made.append(
            problem(f"{plural(len(result.skipped), 'file')} of other kinds left out: {names}", "warning")
        )
    made += [problem(f"{path}: {reason}") for path, reason in result.failed[:10]]
    return "".join(made)


def watched(folders: Sequence["Watched"]) -> str:
    """The watched folders, each with what is wrong with it, if anything is."""
    if not folders:
        return ""
    rows = "".join(
        f'<li><span class="name">{escape(folder.path)}</span> <span class="rb-tag">{escape(folder.collection)}</span>'
        f"{'' if folder.active else problem(folder.reason or 'not watched now', 'warning')}"
        f"{button(icons.CLOSE, 'unwatch', title='Watch no longer', kind='icon', id=folder.id)}</li>"
        for folder in folders
    )
    return f'<h4 class="rb-section">Watched folders</h4><ul class="rb-watched">{rows}</ul>'


def deleted(removed: Sequence, names: Sequence[str] = ()) -> str:
    """What a deletion freed."""
    if not removed:
        return problem("Nothing was deleted.", "warning")
    freed = sum(one.bytes_freed for one in removed)
    passages = sum(one.passages for one in removed)
    return problem(
        f"Deleted {plural(len(removed), 'document')}: {plural(passages, 'passage')}, {size(freed)} of stored KV freed.",
        "info",
    )
