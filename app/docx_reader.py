"""Word's .docx -> its text: headers, the document, footers, as docx2txt has them, without a tree in memory."""

import re
from pathlib import Path

from ragblend.app.guards import open_archive

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
BREAKS = {f"{WORD}tab": "\t", f"{WORD}br": "\n", f"{WORD}cr": "\n", f"{WORD}p": "\n\n"}


def docx_text(path: Path) -> str:
    """The text of the document, paragraphs apart. Raises DocumentError, ParseError."""
    with open_archive(path) as archive:
        names = archive.namelist()
        headers = [name for name in names if re.match(r"word/header[0-9]*.xml", name)]
        footers = [name for name in names if re.match(r"word/footer[0-9]*.xml", name)]
        return "".join(_text(archive.read(name)) for name in (*headers, "word/document.xml", *footers))


def _text(xml: bytes) -> str:
    from defusedxml.ElementTree import DefusedXMLParser  # no entities, so no billion laughs

    parser = DefusedXMLParser(target=_Text())
    parser.feed(xml)
    text: str = parser.close()
    return text


class _Text:
    """What an XML parser tells of Word's elements, as text."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._in_text = False

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._pieces.append(BREAKS.get(tag, ""))
        self._in_text = tag == f"{WORD}t"

    def data(self, text: str) -> None:
        if self._in_text:
            self._pieces.append(text)

    def end(self, tag: str) -> None:
        self._in_text = False

    def close(self) -> str:
        return "".join(self._pieces)
