"""Documents whose size or shape is an attack are read within the limits or refused, and the next one is read."""

import fault_documents
import pytest

from ragblend.app.library import sandbox
from ragblend.app.library.readers import read_document
from ragblend.kvstore.errors import OversizedDocumentError, UnreadableDocumentError

pytest.importorskip("pypdf")
MIB = 2**20


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("maker", "suffix", "full", "reduced", "parts"),
    [
        (fault_documents.nested_html, ".html", 300_000, 30_000, 1),
        (fault_documents.nested_headings_html, ".html", 10_000, 300, "size"),
        (fault_documents.nested_tables_html, ".html", 30_000, 3_000, 1),
        (fault_documents.nested_captions_html, ".html", 30_000, 3_000, 1),
        (fault_documents.merged_xlsx, ".xlsx", 1_000_000, 10_000, 1),
        (fault_documents.paragraphs_docx, ".docx", 1_000_000, 10_000, 1),
        (fault_documents.rows_csv, ".csv", 299_999, 20_000, "size"),
        (fault_documents.repeated_epub, ".epub", 301, 301, 1),
        (fault_documents.pages_pdf, ".pdf", 10_000, 200, "size"),
        (fault_documents.headings_markdown, ".md", 299_999, 20_000, "size"),
        (fault_documents.endless_text, ".txt", 31_000_000, MIB, 1),
        (fault_documents.spaces, ".txt", 31_000_000, MIB, 1),
    ],
)
def test_read(tmp_path, count, maker, suffix, full, reduced, parts):
    size = count(full, reduced)
    found = read_document(maker(tmp_path / f"a{suffix}", size)).parts
    assert len(found) == (size if parts == "size" else parts)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("maker", "suffix", "full", "reduced", "memory", "error"),
    [
        (fault_documents.one_line_html, ".html", 50_000_000, 2_000_000, 16, OversizedDocumentError),
        (fault_documents.empty_tags_html, ".html", 20_000_000, 500_000, 64, OversizedDocumentError),
        (fault_documents.operators_pdf, ".pdf", 4_000_000, 500_000, 32, OversizedDocumentError),
        (fault_documents.rows_csv, ".csv", 1_000_000, 300_001, 1024, OversizedDocumentError),
        (fault_documents.endless_text, ".txt", 50_000_000, 32_000_001, 1024, OversizedDocumentError),
        (fault_documents.bomb_pdf, ".pdf", 1024 * MIB, 100 * MIB, 1024, OversizedDocumentError),
        (fault_documents.looping_pdf, ".pdf", 1_000_000, 100, 1024, UnreadableDocumentError),
    ],
)
def test_refused_by_name(tmp_path, count, monkeypatch, maker, suffix, full, reduced, memory, error):
    """With little memory for the reduced size, so that the same limit is met."""
    path = maker(tmp_path / f"a{suffix}", count(full, reduced))
    monkeypatch.setattr(
        sandbox.run_in_sandbox,
        "__kwdefaults__",
        sandbox.run_in_sandbox.__kwdefaults__ | {"memory_bytes": count(1024, memory) * MIB},
    )
    with pytest.raises(error, match=r"a\.\w+: .*([Ll]imit|damaged|Split|larger)"):
        read_document(path)
    monkeypatch.undo()
    (tmp_path / "next.txt").write_text("The next one is read.")
    assert read_document(tmp_path / "next.txt")
