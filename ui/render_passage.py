"""A cited passage in its place: the page's picture with boxes, or the text with a mark; or that it was not found."""

from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragblend.ui.render_text import escape, problem

if TYPE_CHECKING:
    from ragblend.app.citations import SourceRow
    from ragblend.app.highlight import Box, Highlight, NotLocated, PageHighlight, PageImage, TextHighlight

EMPTY = '<p class="rb-empty">Choose a number in an answer to see its source here.</p>'


def source_view(source: "SourceRow", found: "Highlight") -> str:
    """The panel for one citation."""
    kind = type(found).__name__  # by name, so that this module needs nothing that draws PDFs
    views = {"PageHighlight": _pages, "TextHighlight": _text, "NotLocated": _not_located}
    inner = _head(source) + views[kind](found)  # type: ignore[operator]
    return f'<section class="rb-passage" aria-label="Source {source.number}">{inner}</section>'


def _head(source: "SourceRow") -> str:
    return (
        '<header><span class="rb-cite model" '
        f'aria-hidden="true">{source.number}</span><div><h3>{escape(source.document)}</h3>'
        f"<p>{escape(source.location)} · similarity {source.score:.2f}</p></div></header>"
    )


def _pages(found: "PageHighlight") -> str:
    return "".join(_page(image, found.document) for image in found.pages)


def _page(image: "PageImage", document: str) -> str:
    data = b64encode(image.png).decode()
    label = f"{document}, {image.label}: page with the passage marked"
    boxes = _boxes(image.boxes, image.width, image.height)
    return (
        f'<figure class="rb-page"><div class="sheet"><img alt="{escape(label)}" width="{int(image.width)}" '
        f'height="{int(image.height)}" src="data:image/png;base64,{data}">{boxes}</div>'
        f"<figcaption>{escape(image.label)}</figcaption></figure>"
    )


def _boxes(boxes: Sequence["Box"], width: int, height: int) -> str:
    made = []
    for box in boxes:
        left, top = 100 * box.left / width, 100 * box.top / height
        wide, high = 100 * (box.right - box.left) / width, 100 * (box.bottom - box.top) / height
        made.append(
            f'<mark class="rb-box" style="left:{left:.2f}%;top:{top:.2f}%;width:{wide:.2f}%;height:{high:.2f}%"></mark>'
        )
    return "".join(made)


def _text(found: "TextHighlight") -> str:
    before, passage = found.text[: found.start], found.text[found.start : found.stop]
    after = found.text[found.stop :]
    head = '<span class="cut">… </span>' if found.cut_before else ""
    tail = '<span class="cut"> …</span>' if found.cut_after else ""
    marked = f'<mark class="rb-mark">{escape(passage)}</mark>'
    return f'<div class="rb-document">{head}{escape(before)}{marked}{escape(after)}{tail}</div>'


def _not_located(found: "NotLocated") -> str:
    return (
        f"{problem(found.reason, 'warning')}<p>The passage as it was read:</p>"
        f'<blockquote class="rb-document">{escape(found.passage)}</blockquote>'
    )
