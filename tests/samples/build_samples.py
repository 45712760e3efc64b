"""Builds the PDF and DOCX samples from their sources: `python tests/samples/build_samples.py`.

The built files are committed, so only someone who edits `source/` needs this, with reportlab and python-docx
installed. The Markdown and HTML samples are written by hand in `documents/`.
"""

from collections.abc import Iterator
from pathlib import Path

from sample_docx import docx_bytes
from sample_markup import read_source
from sample_pdf import pdf_bytes

from ragblend.app.samples import documents_folder

SOURCE = Path(__file__).parent / "source"
WRITERS = {".pdf": pdf_bytes, ".docx": docx_bytes}
BUILT = (
    "letters-of-tobit-crane.pdf",
    "dunlin-maintenance-manual.pdf",
    "minutes-annual-meeting-2024.docx",
    "causeway-survey-2023.docx",
)


def build() -> Iterator[tuple[str, bytes]]:
    """File name and content of each built sample."""
    for name in BUILT:
        source = read_source((SOURCE / name).with_suffix(".md"))
        yield name, WRITERS[Path(name).suffix](source)


def main() -> None:
    """Write the built samples over the committed ones."""
    for name, content in build():
        (documents_folder() / name).write_bytes(content)
        print(f"{name}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
