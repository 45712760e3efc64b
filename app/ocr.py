"""Text of scanned pages, by RapidOCR (the extra `ocr`). Its models are in its package: nothing is downloaded."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragblend.app.pdf_pages import page_picture

PACKAGES = ("rapidocr", "onnxruntime", "pypdfium2")
DOTS_PER_POINT = 200 / 72  # what text recognition is made for
_one_at_a_time = threading.Lock()
OnPage = Callable[[int, int], None]


def is_installed() -> bool:
    """Whether the extra is there."""
    return all(find_spec(name) is not None for name in PACKAGES)


def recognised(path: Path, numbers: Sequence[int], on_page: OnPage) -> Iterator[tuple[int, str]]:
    """(number, text) of these pages of a PDF, from 1, line by line; some seconds a page.

    on_page(done, total) is called before each page and at the end, and may raise to leave.
    """
    for done, number in enumerate(numbers):
        on_page(done, len(numbers))
        picture = page_picture(path, number, DOTS_PER_POINT)
        with _one_at_a_time:
            found = _engine()(picture)
        yield number, "\n".join(found.txts or ())
    on_page(len(numbers), len(numbers))


@cache
def _engine() -> Any:
    from rapidocr import RapidOCR

    return RapidOCR(params={"Global.log_level": "error"})
