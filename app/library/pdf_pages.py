"""Renders PDF pages with pdfium (extra `ui`): with a passage's boxes on them, or for text recognition."""

import io
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from ragblend.app.library.matching import find, fold
from ragblend.app.library.pdf_reader import open_pdf, page_label
from ragblend.app.library.sandbox import OnPage

# Of a page in the viewer: pixels, pixels, pixels per point.
MAX_WIDTH, MAX_HEIGHT, MAX_SCALE = 1400, 2400, 2.0
MAX_PICTURE_SIDE = 4000  # of a page for text recognition: pixels of the longer side
MAX_PAGES = 50  # on which a passage is searched, at most
Span = tuple[int, int]
PAGE = re.compile(r"^p\. (.+?)(?: – p\. (.+))?$")


@dataclass(frozen=True)
class Box:
    """The box of one line of the passage, in pixels from the picture's upper left corner."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class PageImage:
    """One page as a picture. number: from 1; label: "p. " and the page's own label, such as "p. iv"; png: in base64;
    sizes: pixels.
    """

    number: int
    label: str
    png: str
    width: int
    height: int
    boxes: tuple[Box, ...]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "PageImage":
        return cls(**value | {"boxes": tuple(Box(**box) for box in value["boxes"])})


def located_pages(path: Path, text: str, location: str, part: Span | None, _: OnPage) -> dict[str, Any]:
    """Find a passage's text on the pages that its location may mean.

    Returns `pages`: those that show the text, as JSON of `PageImage`; `count`: the number of all pages; `first`: the
    first page that the location may mean. part: mark only text[start:stop], and return only the pages that show it.
    Runs in the sandbox. Raises DocumentError, and whatever pdfium raises for a file that it cannot read.
    """
    with open_pdf(path) as (document, _reader):
        labels = [page_label(document, number) for number in range(len(document))]
        runs = _page_numbers(labels, location) if labels else []
        found = next(filter(None, (_page_images(document, text, part, numbers) for numbers in runs)), ())
        first = runs[0][0] if runs else 1
        return {"pages": list(map(asdict, found)), "count": len(labels), "first": first}


def unmarked_page(path: Path, number: int, _: OnPage) -> dict[str, Any]:
    """One page (from 1; or the nearest one that exists), in the form of `located_pages`. Runs in the sandbox."""
    with open_pdf(path) as (document, _reader):
        count = len(document)
        number = max(1, min(number, count))
        pages = [asdict(_image(document, number, ()))] if count else []
        return {"pages": pages, "count": count, "first": number}


def _page_numbers(labels: list[str], location: str) -> list[list[int]]:
    """The runs of pages (from 1) that a location may mean: several if its label occurs several times."""
    named = PAGE.match(location)
    if named is None:
        return [list(range(1, len(labels) + 1))] if len(labels) <= MAX_PAGES else []
    first, last = named.group(1), named.group(2) or named.group(1)
    starts = [n for n, label in enumerate(labels, start=1) if label == first]
    stops = [n for n, label in enumerate(labels, start=1) if label == last]
    ends = {start: min((stop for stop in stops if stop >= start), default=start) for start in starts}
    return [list(range(start, stop + 1)) for start, stop in ends.items() if stop - start < MAX_PAGES]


def _page_images(document: Any, text: str, part: Span | None, numbers: Sequence[int]) -> list[PageImage]:
    """The pages (from 1) that show the text or its part, which is marked; [] if the text is not on these pages."""
    found = _find_on_pages([document[number - 1] for number in numbers], text, part)
    return [_image(document, page, spans) for page, spans in zip(numbers, found, strict=False) if spans]


def page_pictures(path: Path, numbers: Sequence[int], scale: float) -> Iterator[Any]:
    """Pages (from 1) as arrays (height, width, 3) of uint8, BGR; None for a page that pdfium cannot read.

    scale: pixels per point; it is reduced if the longer side would exceed MAX_PICTURE_SIDE.
    """
    from pypdfium2 import PdfiumError

    with open_pdf(path) as (document, _reader):
        for number in numbers:
            picture = None
            with suppress(PdfiumError), closing(document[number - 1]) as page:
                fitting = min(scale, MAX_PICTURE_SIDE / max(page.get_size()))
                picture = page.render(scale=fitting).to_numpy()[..., :3].copy()
            yield picture


def _find_on_pages(pages: Sequence[Any], text: str, part: Span | None) -> list[list[Span]]:
    """For each page the (start, stop) character indexes of the text, which may span pages; [] if it is not found."""
    characters = list(map(_characters, pages))
    starts = [0, *accumulate(map(len, characters))]
    found = find(text, fold(list(chain.from_iterable(characters))), part) or ()
    spans = (
        [
            (max(start, first) - first, min(stop, last) - first)
            for start, stop in found
            if start < last and stop > first
        ]
        for first, last in pairwise(starts)
    )
    return list(spans) if found else []


def _characters(page: Any) -> list[str]:
    """The page's characters by pdfium's indexes, which differ from those of its text as a string."""
    from pypdfium2 import raw

    with closing(page.get_textpage()) as textpage:
        codes = (raw.FPDFText_GetUnicode(textpage, index) for index in range(textpage.count_chars()))
        return ["" if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF else chr(code) for code in codes]


def _image(document: Any, number: int, spans: Sequence[Span]) -> PageImage:
    page, label = document[number - 1], f"p. {page_label(document, number - 1)}"
    width, height = page.get_size()
    scale = min(MAX_SCALE, MAX_WIDTH / width, MAX_HEIGHT / height)
    bitmap = page.render(scale=scale)
    boxes = [box for span in spans for box in _boxes(page, span, bitmap)]
    out = io.BytesIO()
    bitmap.to_pil().save(out, "PNG", optimize=False, compress_level=6)
    png = b64encode(out.getvalue()).decode()
    return PageImage(number, label, png, bitmap.width, bitmap.height, tuple(boxes))


def _boxes(page: Any, span: Span, bitmap: Any) -> Iterator[Box]:
    """The boxes of these characters' lines, clipped to the picture of the page, which may be rotated and cropped."""
    to_bitmap = bitmap.get_posconv(page).to_bitmap
    with closing(page.get_textpage()) as textpage:
        for index in range(textpage.count_rects(span[0], span[1] - span[0])):
            left, bottom, right, top = textpage.get_rect(index)
            (x1, y1), (x2, y2) = to_bitmap(left, top), to_bitmap(right, bottom)
            upper_left = max(0, min(x1, x2)), max(0, min(y1, y2))
            box = Box(*upper_left, min(bitmap.width, max(x1, x2)), min(bitmap.height, max(y1, y2)))
            if box.left < box.right and box.top < box.bottom:
                yield box
