"""Text of scanned pages, by RapidOCR (the extra `ocr`). Its models are in its package: nothing is downloaded."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragblend.app.apart import MIB, OnPage
from ragblend.app.pdf_pages import page_pictures

PACKAGES = ("rapidocr", "onnxruntime", "pypdfium2")
DOTS_PER_POINT = 200 / 72  # what text recognition is made for
MEMORY_BYTES = 2048 * MIB  # its models take a third of that


def is_installed() -> bool:
    """Whether the extra is there."""
    return all(find_spec(name) is not None for name in PACKAGES)


def recognised(path: Path, numbers: Sequence[int], on_page: OnPage) -> list[tuple[int, str]]:
    """(number, text) of these pages of a PDF, from 1, line by line; some seconds a page. For a process of its own.

    on_page(done, total) is called before each page and at the end.
    """
    texts = []
    for done, picture in enumerate(page_pictures(path, numbers, DOTS_PER_POINT)):
        on_page(done, len(numbers))
        texts.append("\n".join(_engine()(picture).txts or ()))
    on_page(len(numbers), len(numbers))
    return list(zip(numbers, texts, strict=True))


@cache
def _engine() -> Any:
    from rapidocr import RapidOCR

    return RapidOCR(params={"Global.log_level": "error"})
