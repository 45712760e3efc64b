"""The collections of one home, each opened once and shared by all threads of a program."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragblend.app.home import Home
from ragblend.app.library import Library
from ragblend.app.settings import Settings
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.integrations.embeddings import Embedder

Embeddings = NDArray[np.float32]
TEXTS_A_TURN = (
    8  # about half a second of MiniLM on two cores: what a question waits for while documents come in
)


class SharedEmbedder:
    """One embedder for all collections and threads; a question passes between two batches of an ingest.

    Its tokenizer must not be used by two threads at once.
    """

    def __init__(self, embedder: "Embedder") -> None:
        from ragblend.engine.scheduler import DeviceQueue

        self._embedder, self._queue = embedder, DeviceQueue()
        self.name = embedder.name

    def load(self) -> None:
        with self._queue.turn():
            self._embedder.load()

    def embed_passages(
        self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None
    ) -> list[Embeddings]:
        """For each text (W, E); progress(done, total) after each batch."""
        done: list[Embeddings] = []
        for start in range(0, len(texts), TEXTS_A_TURN):
            with self._queue.turn():
                done += self._embedder.embed_passages(list(texts[start : start + TEXTS_A_TURN]))
            if progress is not None:
                progress(len(done), len(texts))
        return done

    def embed_question(self, text: str) -> Embeddings:
        """(E,)."""
        with self._queue.turn():
            return self._embedder.embed_question(text)


class Workspaces:
    """A `Workspace` for each collection; they share the library's connection and the embedder."""

    def __init__(self, first: Workspace, open_workspace: Callable[..., Workspace] = Workspace) -> None:
        self.home: Home = first.home
        self._open_workspace = open_workspace
        self._lock = threading.RLock()
        self._settings = first.settings
        self._open = {first.settings.collection: first}
        self._embedder: SharedEmbedder | None = None
        first.__dict__["embedder"] = self._shared(first)

    @classmethod
    def open(cls, home: Path | str | None = None, **overrides: Any) -> "Workspaces":
        """Find the home, make it if need be, read its settings. Raises LibraryError, SettingsError."""
        return cls(Workspace.open(home, **overrides))

    @property
    def settings(self) -> Settings:
        """As they are now; `collection` is the one to begin with."""
        return self._settings

    @property
    def library(self) -> Library:
        """The registry, which all collections share."""
        return self.of(self._settings.collection).library

    def of(self, collection: str) -> Workspace:
        """The workspace of that collection. Raises SettingsError for what cannot be a name."""
        with self._lock:
            if collection not in self._open:
                settings = self._settings.changed({"collection": collection})
                workspace = self._open_workspace(self.home, settings)
                first = self._open[self._settings.collection]
                workspace.__dict__.update(library=first.library, embedder=self._shared(first))
                self._open[collection] = workspace
            return self._open[collection]

    def names(self) -> list[str]:
        """All collections: the one to begin with, then the others by name."""
        first = self._settings.collection
        with self._lock:
            known = {*self.library.collections(), *self._open}
        return [first, *sorted(known - {first})]

    def create(self, name: str) -> None:
        """Make an empty collection. Raises UsageError if it is there, SettingsError for what cannot be a name."""
        if name in self.names():
            raise UsageError(
                f"Making the collection {name!r}: there is one of that name. Choose another name."
            )
        self.of(name)
        self.library.keep_collection(name)

    def forget(self, name: str) -> None:
        """An emptied collection is no more; the one to begin with stays."""
        with self._lock:
            self.library.forget_collection(name)
            if name != self._settings.collection and name in self._open:
                workspace = self._open.pop(name)
                workspace.__dict__.pop("library", None)  # shared: it stays open
                workspace.close()

    def change(self, **changes: Any) -> Settings:
        """Use other settings from now on, in this process. Raises SettingsError; the collection cannot be changed."""
        with self._lock:
            settings = self._settings.changed({k: v for k, v in changes.items() if k != "collection"})
            for name, workspace in list(self._open.items()):
                kept = {key: workspace.__dict__[key] for key in KEPT if key in workspace.__dict__}
                changed = self._open_workspace(self.home, replace(settings, collection=name))
                changed.__dict__.update(kept)
                self._open[name] = changed
            self._settings = settings
            return settings

    def refresh_indexes(self) -> None:
        """Have the vector indexes opened anew: another process may have written to their files."""
        with self._lock:
            for workspace in self._open.values():
                if "index" in workspace.__dict__:
                    workspace.index.close()

    def close(self) -> None:
        """Let go of the files. Engines stay: they are shared in a process."""
        with self._lock:
            first = self._open[self._settings.collection]
            for name, workspace in self._open.items():
                if name != self._settings.collection:
                    workspace.__dict__.pop("library", None)
                    workspace.close()
            first.close()

    def _shared(self, first: Workspace) -> SharedEmbedder:
        if self._embedder is None:
            self._embedder = SharedEmbedder(first.embedder)
        return self._embedder


KEPT = ("library", "index", "embedder", "known_passages")  # open files that settings do not change
