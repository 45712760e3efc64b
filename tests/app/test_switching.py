"""Another embedder: everything is embedded anew beside the old vectors, which answer until all is there."""

import numpy as np
import pytest
from app_fakes import FakeEmbedder, Killed
from waiting import idle

from ragblend.app.answering.retrieval import search
from ragblend.app.library import maintenance
from ragblend.app.library.ingest import ingest, ingest_paths
from ragblend.app.library.registry import Library
from ragblend.app.library.removal import remove_document
from ragblend.app.library.switching import switch_to_next_embedder
from ragblend.app.workspace import Workspaces
from ragblend.integrations.chroma import VectorIndex
from ragblend.integrations.embeddings import DEFAULT
from ragblend.kvstore.errors import ModelNotFoundError

BOATS = "Three boats lie at the quay. The red boat belongs to Ada."


class OtherEmbedder(FakeEmbedder):
    """Its vectors have another length."""

    def embed_question(self, text, cancel=None):
        vector = super().embed_question(text)[:48] + 1e-3
        return vector / np.linalg.norm(vector)

    def _vectors(self, halves):
        return np.array([self.embed_question(half) for half in halves])


@pytest.fixture
def embedders(open_workspace, monkeypatch):
    """By name; "other" and "third" are not the default one."""
    made = {}

    def embedder(self, model):
        return made.setdefault(model, FakeEmbedder() if model == DEFAULT else OtherEmbedder())

    monkeypatch.setattr(Workspaces, "embedder", embedder)
    return made


@pytest.fixture
def ingested(open_workspace, embedders, documents):
    """Three documents by the default embedder."""
    workspace = open_workspace()
    ingest(workspace, [documents])
    return workspace


def sizes(workspace):
    return {len(row) for _, rows in workspace.library.embeddings("default") for each in rows for row in each}


def found(workspace):
    return [source.document for source in search([workspace], BOATS, 1)]


def test_the_old_vectors_answer_until_all_are_there(ingested, open_workspace, embedders):
    changed, seen = open_workspace(embedder="other"), []
    changed.workspaces.embedder("other").on_embed = lambda _: seen.append(
        (changed.embedder_name, sizes(changed), found(changed))
    )
    progress = []
    assert switch_to_next_embedder(changed, lambda *stage, **_: progress.append(stage))
    assert set(map(str, seen)) == {str(("default", {64}, ["boats.txt"]))} and len(seen) == 3
    total = changed.library.count_passages("default")
    assert ("embed", total, total, "sky.txt") in progress
    assert changed.embedder_name == "other" and sizes(changed) == {48} and found(changed) == ["boats.txt"]
    assert changed.index.node_ids() == changed.library.known(list(changed.library.nodes("default")))
    assert VectorIndex(changed.home.chroma, "default").node_ids() == set(), "the old index is deleted"
    assert maintenance.check_index(changed) == []
    before = list(embedders["other"].embedded)
    again = open_workspace()  # the collection keeps it, whatever the settings leave out
    assert (
        switch_to_next_embedder(again)
        and again.embedder_name == "other"
        and embedders["other"].embedded == before
    )


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Library, "store_next_embeddings"),
        (VectorIndex, "upsert"),
        (Library, "switch_embedder"),
        (VectorIndex, "drop"),
    ],
)
def test_a_kill_anywhere_loses_nothing(
    ingested, open_workspace, embedders, documents, monkeypatch, owner, name
):
    with monkeypatch.context() as patch:
        calls, original = [], getattr(owner, name)

        def dying(*values):
            calls.append(name)
            if len(calls) == 2 or name != "store_next_embeddings":
                raise Killed
            return original(*values)

        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            switch_to_next_embedder(open_workspace(embedder="other"))
    done = list(embedders["other"].embedded)
    resumed = open_workspace()
    assert found(resumed) == ["boats.txt"] and sizes(resumed) == ({48} if name == "drop" else {64})
    ingest(resumed, [documents])
    assert resumed.embedder_name == "other" and sizes(resumed) == {48} and found(resumed) == ["boats.txt"]
    again = embedders["other"].embedded[len(done) :]
    assert done[0] not in again and bool(again) == (name == "store_next_embeddings"), (
        "what is stored is not embedded again"
    )
    assert VectorIndex(resumed.home.chroma, "default").node_ids() == set()


def test_what_comes_and_goes_meanwhile(ingested, open_workspace, documents):
    """A removed document leaves both indexes; a new one is embedded by both."""
    changed = open_workspace(embedder="other")
    cancelled = []
    assert not switch_to_next_embedder(
        changed, is_cancelled=lambda: cancelled.append(1) or len(cancelled) > 3
    )
    (documents / "ada.txt").write_text("Ada sold the red boat at the quay to Tom.")
    ingest_paths(changed, [documents / "ada.txt"])
    assert sizes(changed) == {64} and [s.document for s in search([changed], "Ada sold Tom", 1)] == [
        "ada.txt"
    ]
    with changed.workspaces.writing():
        remove_document(changed, changed.library.find("default", "boats.txt"))
    assert switch_to_next_embedder(changed) and sizes(changed) == {48}
    assert [source.document for source in search([changed], "Ada sold Tom", 1)] == ["ada.txt"]
    assert changed.index.node_ids() == set(changed.library.nodes("default"))


def test_changing_back_in_the_middle_costs_nothing(ingested, open_workspace, embedders):
    assert not switch_to_next_embedder(open_workspace(embedder="other"), is_cancelled=lambda: True)
    before, back = list(embedders[DEFAULT].embedded), open_workspace(embedder=DEFAULT)
    assert (
        switch_to_next_embedder(back)
        and back.embedder_name == DEFAULT
        and back.library.embedder("default").next is None
    )
    assert embedders[DEFAULT].embedded == before and back.library.rows("SELECT * FROM next_embeddings") == []


def test_empty_collection_has_the_chosen_one_at_once(open_workspace, embedders, documents):
    workspace = open_workspace(embedder="other")
    ingest(workspace, [documents])
    assert sizes(workspace) == {48} and DEFAULT not in embedders


def test_collections_with_different_embedders_are_asked_together(ingested, workspaces, tmp_path):
    workspaces.create("trains")
    (tmp_path / "train.txt").write_text("The green train to the quay belongs to Tom.")
    trains = workspaces.with_settings(workspaces.settings.changed({"embedder": "other"})).of("trains")
    ingest(trains, [tmp_path / "train.txt"])
    both = search([workspaces.first, workspaces.of("trains")], "boats train quay belongs", 2)
    assert {source.document for source in both} == {"boats.txt", "train.txt"}


def test_the_queue_names_an_embedder_that_cannot_be_loaded_and_goes_on(
    jobs, workspaces, documents, embedders
):
    def fail(texts):
        raise ModelNotFoundError("there is no such embedder")

    ingest(workspaces.first, [documents])
    workspaces.change(embedder="other")
    workspaces.embedder("other").on_embed = fail
    jobs.start()
    idle(jobs)
    assert "no such embedder" in jobs.overview().kv_message and found(workspaces.first) == ["boats.txt"]
