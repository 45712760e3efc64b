"""The page's header, and what tells whether the ingest queue has moved. Pure."""

from typing import TYPE_CHECKING, Any

from ragblend.ui.render_text import escape, plural, problem

if TYPE_CHECKING:
    from ragblend.app.jobs import Overview
    from ragblend.app.settings import Settings


def header(line: str = "") -> str:
    """The name, and one line about what is going on."""
    return (
        '<div class="rb-top"><img class="logo" src="/ragblend/icon.svg" alt="" width="24" height="24"><h1>RAGBlend</h1>'
        f'<span class="state">{escape(line)}</span></div>'
    )


def banner(*problems: str | None) -> str:
    """What keeps the page from being of use, over all tabs; empty when all is well."""
    return "".join(problem(text, "warning") for text in problems if text)


def state_line(overview: "Overview", settings: "Settings", is_loading: bool = False) -> str:
    """What is being done, else which model answers."""
    if overview.total > overview.finished:
        word = "paused at" if overview.paused else "waiting at" if overview.waiting else "reading"
        return f"{word} {overview.finished:,} of {plural(overview.total, 'file')}"
    if is_loading:
        return "loading the model …"
    name = "the bundled model" if settings.model == "default" else settings.model
    return f"{name} · {settings.method}"


def fingerprint(overview: "Overview", view: tuple[Any, ...] = ()) -> str:
    """Another text as soon as there is anything new to draw; its first line is what the list depends on.

    view: the collection, search, state and page that are shown. A list that was asked for in one view may come when
    another is shown already; the next look finds another text then, and it is drawn again.
    """
    job = overview.current
    now = (job.id, job.state, job.done, job.total) if job else ()
    return (
        f"{overview.changes} {view!r}\n{overview.finished} {overview.total} {overview.paused} {overview.waiting} "
        f"{sorted(overview.counts.items())} {now}"
    )


def listed_in(fingerprint: str) -> str:
    """What of it moves when a file is begun, or ends, in whatever state, or another view is shown."""
    return fingerprint.partition("\n")[0]
