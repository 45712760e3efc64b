"""Files are read by the product and by an independent parser, and counted by kind."""

import pytest
from document_files import write_docx, write_epub, write_pdf

from benchmarks.independent_parsers import DIALECTS, declared_encoding
from benchmarks.measure_readers import files_of, judge, table


def write(path, content):
    path.write_bytes(content)
    return path


MAKE = {
    "docx": lambda folder: write_docx(folder / "a.docx", ["The deposit is 400 crowns."]),
    "pdf": lambda folder: write_pdf(folder / "a.pdf", ["The key hangs behind the door."]),
    "epub": lambda folder: write_epub(folder / "a.epub", [("1.xhtml", "One", "<p>Tides rise.</p>")]),
    "html": lambda folder: write(folder / "a.html", b"<nav>Menu</nav><p>Tides rise and fall twice a day."),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_plain_file_is_complete(tmp_path, kind):
    found = judge(kind, MAKE[kind](tmp_path))
    assert (found.verdict, found.share, found.doubled, found.missing) == ("complete", 1, 0, []), found


def test_doubled_lost_and_refused_text_is_counted(tmp_path, monkeypatch):
    page = MAKE["html"](tmp_path)
    rows = [judge("html", page), judge("pdf", write(tmp_path / "b.pdf", b"no such thing"))]
    for text in ("Tides rise and fall twice a day. " * 2, "Tides rise and fall twice", "other"):
        monkeypatch.setattr(
            "benchmarks.measure_readers.run_in_sandbox",
            lambda work, path, *more, text=text, **options: (
                {"parts": [(text, "")], "notes": []}
                if work.__name__ == "parse"
                else ["tides", "rise", "and", "fall", "twice", "a", "day"]
            ),
        )
        rows.append(judge("html", page))
    assert [row.verdict for row in rows] == ["complete", "no text", "wrong", "partly", "wrong"]
    assert table(rows).splitlines()[2:] == [
        "| html | 4 | 4 | 1 | 1 | 0 | 2 | 3 | 25.0% |",
        "| pdf | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0.0% |",
    ]


def test_tables_are_rewritten_in_each_dialect(tmp_path):
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus/a.csv", b'name,note\npump,"tighten, then wait"\nvalve,it\'s "shut"\n')
    write(tmp_path / "corpus/ragged.csv", b"a,b\n1\n")
    files = files_of("csv", tmp_path / "corpus", 10, tmp_path)
    assert [path.name for path in files] == [f"{name}~a.csv" for name in DIALECTS]
    assert judge("csv", files[1]).verdict == "complete"


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("ru/koi8-r.txt", "koi8-r"), ("iso-8859-2-czech/a.txt", "iso8859-2"), ("notes/readme.txt", None)],
)
def test_encoding_of_a_corpus_file(tmp_path, name, encoding):
    assert declared_encoding(tmp_path / name) == encoding
