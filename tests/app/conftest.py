"""A workspace with the fakes of app_fakes.py, and makers of documents."""

import json
import sys
import zipfile
from functools import cached_property
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no folder of tests on the path

from app_fakes import FakeEmbedder, FakeEngine
from shared_servers import redis_server  # noqa: F401

from ragblend.app.workspace import Workspace, Workspaces


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def fakes(home, monkeypatch):
    """Every workspace has an engine of its own, and every home an embedder."""
    engine, embedder = cached_property(lambda _: FakeEngine(home)), cached_property(lambda _: FakeEmbedder())
    engine.__set_name__(Workspace, "engine")
    embedder.__set_name__(Workspaces, "embedder")
    monkeypatch.setattr(Workspace, "engine", engine)
    monkeypatch.setattr(Workspaces, "embedder", embedder)


@pytest.fixture
def open_workspace(home, fakes):
    """Opens the home as a new process would: nothing is shared with earlier workspaces but the files."""
    opened = []

    def open_(**overrides):
        opened.append(Workspace.open(home, **{"chunk_tokens": 16, "max_new_tokens": 32} | overrides))
        return opened[-1]

    yield open_
    for workspace in opened:
        workspace.close()


@pytest.fixture
def workspace(open_workspace):
    return open_workspace()


@pytest.fixture
def workspaces(home, fakes):
    """All collections of a home."""
    with Workspaces.open(home, chunk_tokens=16, max_new_tokens=32) as opened:
        yield opened


@pytest.fixture
def cli(home, monkeypatch):
    """Runs the command line on the fakes; gives the exit code. The engine is `cli.engine`."""
    from ragblend.app.cli import main

    engine, embedder = FakeEngine(home), FakeEmbedder()
    monkeypatch.setenv("RAGBLEND_CHUNK_TOKENS", "16")
    monkeypatch.setattr(Workspace, "engine", engine)
    monkeypatch.setattr(Workspace, "embedder", embedder)

    def run(*arguments):
        return main([*map(str, arguments), "--home", str(home)])

    run.engine, run.embedder = engine, embedder
    return run


@pytest.fixture
def told(cli, capfd):
    """What a command says with --json: one object on stdout."""

    def run(*arguments, code=0):
        capfd.readouterr()
        assert cli(*arguments, "--json") == code
        (line,) = capfd.readouterr().out.splitlines()
        return json.loads(line)

    return run


@pytest.fixture
def documents(tmp_path):
    """Three small documents about different things."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "sky.txt").write_text("The sky over the harbour is blue in the morning.")
    (folder / "bread.md").write_text(
        "# Bread\n\nThe baker needs rye flour and salt, and every morning at four he kneads the dough by hand.\n\n"
        "# Ovens\n\nOvens are hot."
    )
    (folder / "boats.txt").write_text("Three boats lie at the quay. The red boat belongs to Ada. It is old.")
    return folder


def write_pdf(path, pages, password=None):
    """A PDF with one line of text a page; an empty text makes a page with a drawing alone."""
    from reportlab.lib.pdfencrypt import StandardEncryption
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(path), encrypt=StandardEncryption(password, canPrint=0) if password else None)
    for text in pages:
        canvas.drawString(72, 700, text) if text else canvas.rect(72, 600, 100, 100)
        canvas.showPage()
    canvas.save()
    return path


def write_docx(path, paragraphs):
    import docx

    document = docx.Document()
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    document.save(str(path))
    return path


def write_epub(path, chapters):
    """chapters: (file name, title, body), in the order of the spine; files are stored in the opposite order."""
    items = "".join(
        f'<item id="c{n}" href="{name}" media-type="application/xhtml+xml"/>'
        for n, (name, _, _) in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    namespace = 'xmlns="http://www.idpf.org/2007/opf"'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr(
            "META-INF/container.xml",
            '<container><rootfiles><rootfile full-path="OEBPS/b.opf"/></rootfiles></container>',
        )
        for name, title, body in reversed(chapters):
            page = f"<html><head><title>{title}</title></head><body>{body}</body></html>"
            archive.writestr(f"OEBPS/{name}", page)
        archive.writestr(
            "OEBPS/b.opf",
            f"<package {namespace}><manifest>{items}</manifest><spine>{spine}</spine></package>",
        )
    return path


@pytest.fixture
def make():
    """The makers of documents, by suffix."""
    return {"pdf": write_pdf, "docx": write_docx, "epub": write_epub}
