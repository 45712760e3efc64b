"""Text for the page: everything escaped, Markdown made safe, numbers for people. All pure."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from html import escape as _escape
from typing import TYPE_CHECKING

import nh3

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

TAGS = {
    "p",
    "br",
    "hr",
    "em",
    "strong",
    "del",
    "code",
    "pre",
    "blockquote",
    "ul",
    "ol",
    "li",
    "a",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
}
# No images at all: one that is fetched tells its server that the document was read.
ATTRIBUTES = {"a": {"href"}, "ol": {"start"}}
SCHEMES = {"http", "https", "mailto"}
OPEN_MARK, CLOSE_MARK = (
    "\ue000",
    "\ue001",
)  # private use: around the number of an insert, until the text is safe
MARKS = re.compile(f"[{OPEN_MARK}{CLOSE_MARK}]")
MARKED = re.compile(f"{OPEN_MARK}([0-9]+){CLOSE_MARK}")
COMMAND = re.compile(r"`([^`\n]{1,200})`")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")


def escape(value: object) -> str:
    """Text that is only text, in content and in attributes; characters that turn the direction are taken out."""
    return _escape(CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def markdown(pieces: str | Sequence[str | int], insert: Callable[[int], str] = str) -> str:
    """Markdown from a document or a model as safe HTML: no script, no style, no image, no raw HTML.

    pieces: a text, or texts with numbers between them; insert(number) gives the (safe) HTML that stands for a number.
    """
    parts = [pieces] if isinstance(pieces, str) else pieces
    text = "".join(
        f"{OPEN_MARK}{part}{CLOSE_MARK}" if isinstance(part, int) else CONTROL.sub("", MARKS.sub("", part))
        for part in parts
    )
    made = nh3.clean(
        _parser().render(text),
        tags=TAGS,
        attributes=ATTRIBUTES,
        url_schemes=SCHEMES,
        link_rel="noopener noreferrer nofollow",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )
    return MARKED.sub(lambda found: insert(int(found[1])), made)


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])


def attributes(**values: object) -> str:
    """` name="value"` for all that is not None or False; `_` in a name becomes `-`; True gives a bare name."""
    made = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        plain = name.strip("_").replace("_", "-")
        made.append(f" {plain}" if value is True else f' {plain}="{escape(value)}"')
    return "".join(made)


def button(label: str, act: str, *, title: str | None = None, kind: str = "quiet", **data: object) -> str:
    """A button that the page's script hands to Python: `act` says what it is for, data what it is about."""
    named = {f"data_{name}": value for name, value in data.items()}
    values = attributes(class_=f"rb-button {kind}", data_act=act, title=title, **named)
    return f'<button type="button"{values}>{label}</button>'


def milliseconds(value: float | None) -> str:
    """870 ms, 1.24 s, 12.3 s; a dash for None."""
    if value is None:
        return "–"
    if value < 1000:
        return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
    return f"{value / 1000:.2f} s" if value < 10_000 else f"{value / 1000:.1f} s"


def size(count: float) -> str:
    """Bytes for people: 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def plural(count: int, noun: str) -> str:
    """1 passage, 2 passages."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """40 s, 3 min, 2 h 5 min."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def progress(share: float, label: str) -> str:
    """A bar, share from 0 to 100."""
    return (
        '<div class="rb-progress" role="progressbar" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{share:.0f}" aria-label="{escape(label)}"><i style="width:{share:.1f}%"></i></div>'
    )


def words(message: str) -> str:
    """A message of the app, escaped; what stands between backticks is a command."""
    return COMMAND.sub(r"<code>\1</code>", escape(message))


def problem(message: str, kind: str = "error") -> str:
    """A box that says what is wrong; kind: error, warning or info."""
    role = "alert" if kind == "error" else "status"
    return f'<div class="rb-note {kind}" role="{role}">{words(message)}</div>'
