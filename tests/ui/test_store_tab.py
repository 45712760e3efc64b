"""The Store tab checks and repairs every collection, and leaves encoding to the queue."""

import threading

import pytest

pytest.importorskip("gradio", reason="the page needs the extra `ui`")

import gradio as gr
from serverless import built
from waiting import idle, until

from ragblend.app.library.ingest import ingest
from ragblend.kvstore.errors import UsageError
from ragblend.ui.page_context import PageContext
from ragblend.ui.tab_store import StoreTab


class Tab:
    """The tab over two collections of one document each, on a model that costs nothing."""

    def __init__(self, services):
        self.services, self.engine = services, services.workspaces.first.engine
        self.engine.store = services.workspaces.first.store
        with gr.Blocks() as self.blocks, gr.Tab() as tab:
            self.tab = StoreTab(PageContext(services), tab)

    def last_said(self, steps):
        return list(steps)[-1][self.tab.message]


@pytest.fixture
def tab(tmp_path, fake_engine):
    with built(tmp_path, Tab) as (made, _):
        for collection, said in (("default", "The sky is blue."), ("letters", "The boat is red.")):
            (tmp_path / f"{collection}.txt").write_text(said)
            ingest(made.services.workspaces.of(collection), [tmp_path / f"{collection}.txt"])
        yield made


def test_every_collection_is_checked_and_repaired(tab) -> None:
    """Only the first collection's index was checked."""
    index = tab.services.workspaces.of("letters").index
    nodes = index.node_ids()
    index.delete(list(nodes))
    said = tab.last_said(tab.tab.check())
    assert "1 problem found" in said
    assert "letters: 1 passages of the registry are not in the index" in said
    assert "2 vectors indexed" in tab.last_said(tab.tab.repair())
    assert index.node_ids() == nodes
    assert "No problems found." in tab.last_said(tab.tab.check())


def test_a_store_that_cannot_be_opened_says_why(tab, monkeypatch) -> None:
    def refuses(name):
        raise UsageError("this machine has no cuda")

    refreshed = next(
        fn for fn in tab.blocks.fns.values() if fn.fn is not None and fn.fn.__name__ == "refresh"
    )
    monkeypatch.setattr(type(tab.services.workspaces.first), "engine", property(refuses))
    said = tab.tab.refresh()
    assert "no cuda" in said[tab.tab.message]
    assert set(said) <= set(refreshed.outputs)


def test_repair_on_the_page_does_not_encode(tab) -> None:
    """A whole collection was encoded under the writer's lock, and nothing could end it."""
    threads, jobs = [], tab.services.jobs
    jobs.start()
    assert idle(jobs)
    for file in tab.engine.folder.iterdir():
        file.unlink()
    tab.engine.on_encode = lambda text: threads.append(threading.current_thread().name)
    assert "indexed" in tab.last_said(tab.tab.repair())
    assert "MainThread" not in threads
    until(lambda: len(tab.engine.stored()) == 2)
