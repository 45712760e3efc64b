"""Recognises the text of pages from their pictures, by RapidOCR (extra `ocr`).

The model in its package reads Chinese, Japanese, and languages in Latin letters. The models of other languages
(setting `ocr_language`) are downloaded once, by the caller: the process that reads documents has no network.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragblend.app.library.pdf_pages import page_pictures
from ragblend.app.library.sandbox import MIB, OnPage, run_in_sandbox
from ragblend.app.settings import OCR_LANGUAGES
from ragblend.kvstore.errors import ModelNotFoundError

PACKAGES = ("rapidocr", "onnxruntime", "pypdfium2")
MEMORY_BYTES = 2048 * MIB  # its models take a third of that
SCALE = 200 / 72  # pixels per point: the resolution that text recognition is made for
log = logging.getLogger("ragblend")


def can_recognise() -> bool:
    return all(find_spec(name) is not None for name in PACKAGES)


@dataclass(frozen=True)
class TextRecognition:
    """Text recognition for one language of `OCR_LANGUAGES`. folder: where its model is, or is downloaded to."""

    language: str = "default"
    folder: Path = Path()

    def pages(self, path: Path, numbers: Sequence[int], on_page: OnPage) -> list[tuple[int, str]]:
        """(number, text) of these pages of a PDF (from 1); some seconds per page.

        on_page(done, total) is called before each page and at the end. Raises DocumentError, and ModelNotFoundError if
        the language's model cannot be downloaded.
        """
        model = self._model()
        found = run_in_sandbox(
            recognise_pages, path, numbers, model and str(model), self.language, on_page=on_page,
            memory_bytes=MEMORY_BYTES, readable=[str(model)] if model else [],
        )  # fmt: skip
        return [(number, text) for number, text in found]

    def _model(self) -> Path | None:
        """The language's model, downloaded if it is missing or damaged; None for the one in RapidOCR's package."""
        if self.language == "default":
            return None
        from rapidocr.inference_engine.base import FileInfo, InferSession
        from rapidocr.utils.download_file import DownloadFile, DownloadFileInput
        from rapidocr.utils.typings import EngineType, LangRec, ModelType, OCRVersion, TaskType

        language = LangRec(OCR_LANGUAGES[self.language])
        info = FileInfo(EngineType.ONNXRUNTIME, OCRVersion.PPOCRV5, TaskType.REC, language, ModelType.MOBILE)
        found = InferSession.get_model_url(info)
        url, digest = found["model_dir"], found["SHA256"]
        path = self.folder / Path(url).name
        try:
            DownloadFile.run(DownloadFileInput(url, path, log, digest, verbose=False))
            if DownloadFile.check_file_sha256(path, digest):
                return path
            problem = "the download is damaged"
        except Exception as error:  # requests' errors and RapidOCR's own
            problem = str(error)
        raise ModelNotFoundError(
            f"Downloading the model that recognises {self.language} text, {url}: {problem}. Try again, put the file in "
            f"{self.folder}, or set `ocr_language` to `default`."
        )


def recognise_pages(
    path: Path, numbers: Sequence[int], model: str | None, language: str, on_page: OnPage
) -> list[tuple[int, str]]:
    """Does the work of `TextRecognition.pages` in the sandbox."""
    texts = []
    for done, picture in enumerate(page_pictures(path, numbers, SCALE)):
        on_page(done, len(numbers))
        texts.append("" if picture is None else "\n".join(_engine(model, language)(picture).txts or ()))
    on_page(len(numbers), len(numbers))
    return list(zip(numbers, texts, strict=True))


@cache
def _engine(model: str | None, language: str) -> Any:
    from rapidocr import RapidOCR
    from rapidocr.utils.typings import LangRec, ModelType, OCRVersion

    params: dict[str, Any] = {"Global.log_level": "error"}
    if model is not None:
        params |= {"Rec.model_path": model, "Rec.lang_type": LangRec(OCR_LANGUAGES[language])}
        params |= {"Rec.ocr_version": OCRVersion.PPOCRV5, "Rec.model_type": ModelType.MOBILE}
    return RapidOCR(params=params)
