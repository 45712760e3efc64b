"""The list of documents: pages, searches, states, and that it reads only what it shows."""

from ragblend.app.library import readers
from ragblend.app.library.ingest import ingest


def fill(library, count):
    states = {n: "failed" if n % 10 == 0 else "done" for n in range(count)}
    rows = [
        (f"id{n}", f"/docs/{n % 7}/Größe {n:05}.pdf", state, f"2026-01-{n % 28 + 1:02}")
        for n, state in states.items()
    ]
    with library.transaction() as sql:
        sql.executemany(
            "INSERT INTO documents (id, path, collection, state, updated_at) VALUES (?, ?, 'default', ?, ?)",
            rows,
        )


def test_pages_searches_and_states(library):
    fill(library, 100)
    library.begin("other", "/docs/x.txt")
    page = library.page("default", limit=10)
    assert (len(page.documents), page.total) == (10, 100)
    assert page.counts == {"pending": 0, "done": 90, "failed": 10}
    paths = [document.path for document in page.documents]
    assert paths == sorted(paths) and page.documents[0].name == "Größe 00000.pdf"
    following = library.page("default", offset=10, limit=10)
    assert following.documents[0].path > paths[-1]
    found = library.page("default", search="größe 0004")
    assert found.total == 11 and found.counts == page.counts
    assert library.page("default", search="GRÖSSE /3/").total == 14
    assert library.page("default", search="100%").total == 0
    assert library.page("default", search="'; --").total == 0
    assert {d.state for d in library.page("default", state="failed").documents} == {"failed"}
    assert [document.name for document in library.page("other").documents] == ["x.txt"]


def test_only_the_shown_page_is_read(library):
    """20,000 documents took seconds when each had its passages counted."""
    fill(library, 3000)
    steps = []
    library._sql.set_progress_handler(lambda: steps.append(1) and None, 1000)
    library.page("default", limit=50)
    first = len(steps)
    library.page("default", search="größe 01", limit=50)
    library._sql.set_progress_handler(None, 0)
    assert first < 100 and len(steps) - first < 300


def test_failures_have_reasons_and_scans_are_named(workspace, documents, make, monkeypatch):
    monkeypatch.setattr(readers, "can_recognise", lambda: False)
    make["pdf"](documents / "scan.pdf", ["", ""])
    (documents / "bad.pdf").write_bytes(b"%PDF-1.4 no")
    ingest(workspace, [documents])
    rows = {document.name: document for document in workspace.library.page("default").documents}
    assert rows["scan.pdf"].scanned and "ocrmypdf" in rows["scan.pdf"].reason
    assert not rows["bad.pdf"].scanned and "damaged" in rows["bad.pdf"].reason
    assert rows["sky.txt"].passages == 1 and rows["sky.txt"].size > 10 and not rows["sky.txt"].uploaded
