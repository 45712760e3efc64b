"""One home, opened: what its collections share, and what each has of its own, all made when first needed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ragblend.app.answering.chats import Chats
from ragblend.app.home import Home, make_private
from ragblend.app.library.documents import DocumentState
from ragblend.app.library.registry import Library
from ragblend.app.models import check_model
from ragblend.app.settings import Settings
from ragblend.engine.model.checkpoints import find_model
from ragblend.engine.scheduling.queue import DeviceQueue
from ragblend.integrations.chroma import VectorIndex
from ragblend.integrations.embeddings import MiniLMEmbedder
from ragblend.integrations.passages import PassageRegistry
from ragblend.kvstore.errors import SettingsError, UsageError
from ragblend.kvstore.files import Closing
from ragblend.kvstore.lock import writer_lock

if TYPE_CHECKING:
    from ragblend.app.answering.rerank import CrossEncoder
    from ragblend.engine.engine import Engine
    from ragblend.kvstore.store import KVStore

T = TypeVar("T")
ENGINE_SETTINGS = (
    "model", "device", "dtype", "collection", "store_budget_bytes", "memory_budget_bytes", "device_budget_bytes",
    "store_policy", "kv_codec", "remote",
)  # fmt: skip


class Workspaces(Closing):
    """The collections of one home, a `Workspace` each. Safe for threads.

    settings: as they are now; their collection is the one to begin with.
    """

    def __init__(self, home: Home, settings: Settings) -> None:
        self.home, self.settings = home, settings
        self._lock = threading.RLock()
        self._open: dict[str, Workspace] = {}
        self._files: dict[tuple[str, str], Any] = {}  # what is open, by what it is and whose
        self._writers, self._waiting, self._hurried = DeviceQueue(), 0, 0
        self.reranking = (
            DeviceQueue()
        )  # before all rerankers: commands may name another one than the settings
        self._mark: str | None = None

    @classmethod
    def open(cls, home: Path | str | None = None, **overrides: Any) -> "Workspaces":
        """Find the home, make it if need be, read its settings. Raises LibraryError, SettingsError."""
        found = Home.resolve(home).create()
        return cls(found, Settings.load(found.settings, overrides=overrides))

    @property
    def first(self) -> "Workspace":
        return self.of(self.settings.collection)

    @property
    def library(self) -> Library:
        """The registry, which all collections share."""
        return self.file("library", lambda: Library(self.home.library))

    @property
    def chats(self) -> Chats:
        """All conversations; what is in the registry no more is not kept with an answer."""
        return self.file("chats", lambda: Chats(self.home.chats, lambda nodes: self.library.known(nodes)))

    @cached_property
    def embedder(self) -> MiniLMEmbedder:
        return MiniLMEmbedder()

    def of(self, collection: str) -> "Workspace":
        """The workspace of that collection. Raises SettingsError for what cannot be a name."""
        settings = replace(self.settings, collection=collection)
        with self._lock:
            if collection not in self._open:
                self._open[collection] = Workspace(self, settings)
            return self._open[collection]

    def file(self, what: str, opened: Callable[[], T], collection: str = "") -> T:
        """What is opened once for a collection, or for all, and closed with the home."""
        with self._lock:
            if (what, collection) not in self._files:
                self._files[what, collection] = opened()
            found: T = self._files[what, collection]
            return found

    def names(self) -> list[str]:
        """All collections: the one to begin with, then the others by name. Looking at one does not make it."""
        first = self.settings.collection
        return [first, *sorted({*self.library.collections()} - {first})]

    def count_documents(self, *states: DocumentState) -> int:
        """Those of all collections, or those of these states."""
        counts = map(self.library.counts_by_state, self.names())
        return sum(sum(found[state] for state in states or DocumentState) for found in counts)

    def count_passages(self) -> int:
        return sum(map(self.library.count_passages, self.names()))

    def create(self, name: str) -> None:
        """Make an empty collection. Raises UsageError if it is there, SettingsError for what cannot be a name."""
        if name in self.names():
            raise UsageError(
                f"Making the collection {name!r}: there is one of that name. Choose another name."
            )
        with self.writing():  # what somebody left who asked while the last one of that name was removed
            self.of(name).engine.forget_all()
            PassageRegistry.drop(self.home.root, name)
        self.library.keep_collection(name)

    def forget(self, name: str) -> None:
        """An emptied collection is no more; the one to begin with stays."""
        with self._lock:
            self.library.forget_collection(name)
            PassageRegistry.drop(self.home.root, name)
            self._open.pop(name, None)
            self._close(lambda what, collection: collection == name)

    def change(self, **changes: Any) -> Settings:
        """Use other settings from now on, in this process. Raises SettingsError; the collection cannot be changed.

        Who holds a workspace goes on with the settings that it was made with.
        """
        with self._lock:
            self.settings = self.settings.changed({k: v for k, v in changes.items() if k != "collection"})
            self._open.clear()
            self._close(lambda what, _: what in ("store", "reranker"))  # one has a budget, one may be another
            return self.settings

    @property
    def is_wanted(self) -> bool:
        """Whether a thread waits to write behind the one that does: who writes long lets it pass."""
        return self._waiting > 0

    @property
    def is_hurried(self) -> bool:
        """Whether one of them is not patient: for it a file is left in the middle, where that loses little."""
        return self._hurried > 0

    @contextmanager
    def writing(self, patient: bool = False) -> Iterator[None]:
        """Be the one writer of this home, among threads and processes; what was deleted is erased at the end.

        patient: who let others pass. Not reentrant. Raises StoreLockedError, naming the process that has it, and
        LibraryError.
        """
        from ragblend.app.library.removal import erase_removed

        with ExitStack() as held:
            with self._waits(patient):
                held.enter_context(self._writers.turn())
            with writer_lock(self.home.lock) as hold:
                if hold.before != self._mark:  # another process wrote: what Chroma has in memory may be old
                    self.close_indexes()
                self._mark = hold.mark
                try:
                    yield
                finally:
                    try:
                        erase_removed(self)
                    finally:
                        if self.home.chroma.exists():
                            make_private(self.home.chroma)  # Chroma makes its files readable for all

    @contextmanager
    def _waits(self, patient: bool) -> Iterator[None]:
        with self._lock:
            self._waiting, self._hurried = self._waiting + 1, self._hurried + (not patient)
        try:
            yield
        finally:
            with self._lock:
                self._waiting, self._hurried = self._waiting - 1, self._hurried - (not patient)

    def close_indexes(self) -> None:
        """Have whoever searches one open it again from the files, which all share."""
        with self._lock:
            for index in (each for (what, _), each in self._files.items() if what == "index"):
                index.close()

    def under(self, settings: Settings) -> "Workspaces":
        """The same collections and files under other settings, for one command: closing that closes nothing."""
        return _SharedView(self, settings)

    def close(self) -> None:
        """Let go of the files. Engines stay: they are shared in a process."""
        self._close(lambda *_: True)

    def _close(self, wanted: Callable[[str, str], bool]) -> None:
        """Who needs one of them again opens it anew."""
        with self._lock:
            for key in [key for key in self._files if wanted(*key)]:
                self._files.pop(key).close()


class _SharedView(Workspaces):
    """What another one has open. Who writes, waits and forgets does it there."""

    def __init__(self, owner: Workspaces, settings: Settings) -> None:
        super().__init__(owner.home, settings)
        self._owner, self.reranking = owner, owner.reranking

    @property
    def embedder(self) -> MiniLMEmbedder:
        return self._owner.embedder

    def file(self, what: str, opened: Callable[[], T], collection: str = "") -> T:
        return self._owner.file(what, opened, collection)

    def forget(self, name: str) -> None:
        self._owner.forget(name)

    def close_indexes(self) -> None:
        self._owner.close_indexes()

    @property
    def is_wanted(self) -> bool:
        return self._owner.is_wanted

    @property
    def is_hurried(self) -> bool:
        return self._owner.is_hurried

    @contextmanager
    def writing(self, patient: bool = False) -> Iterator[None]:
        with self._owner.writing(patient):
            yield

    def close(self) -> None:
        pass


class Workspace(Closing):
    """One collection of a home: what ingest, questions and the command line work on. Closing it closes the home."""

    def __init__(self, workspaces: Workspaces, settings: Settings) -> None:
        self.workspaces, self.settings = workspaces, settings
        self.home = workspaces.home

    @classmethod
    def open(cls, home: Path | str | None = None, **overrides: Any) -> "Workspace":
        """The first collection of a home. Raises LibraryError, SettingsError."""
        return Workspaces.open(home, **overrides).first

    def check_engine(self) -> None:
        """Find what the engine would refuse before anything heavy is loaded; a hub's model is brought here.

        Raises SettingsError, UsageError, ModelError. The last checks import torch, which no other needs.
        """
        check_model(self.settings.model, self.home.models)
        find_model(self.settings.model)
        from ragblend.engine.model.device import pick_device
        from ragblend.engine.selection import CONTROLS, policy_named

        pick_device(self.settings.device)
        if policy_named(self.settings.method).name.partition(":")[0] in CONTROLS:
            raise SettingsError(
                f"The setting method: {self.settings.method!r} is there to compare others with, in `ragblend bench "
                "quality`; take another (docs/methods.md)."
            )
        if self.settings.reranker:
            from ragblend.app.answering.rerank import find_reranker

            find_reranker(self.settings.reranker)

    @property
    def library(self) -> Library:
        return self.workspaces.library

    @property
    def index(self) -> VectorIndex:
        name = self.settings.collection
        return self.workspaces.file("index", lambda: VectorIndex(self.home.chroma, name), name)

    @property
    def embedder(self) -> MiniLMEmbedder:
        return self.workspaces.embedder

    @property
    def reranker(self) -> "CrossEncoder | None":
        """The one that the settings name, on the engine's device; where vLLM has that, on the processor."""
        name, device = self.settings.reranker, "cpu" if self.settings.vllm else self.settings.device
        if not name:
            return None
        from ragblend.app.answering.rerank import CrossEncoder

        queue = self.workspaces.reranking
        return self.workspaces.file(
            "reranker", lambda: CrossEncoder(name, device, queue), f"{name} on {device}"
        )

    @property
    def queues(self) -> tuple[DeviceQueue, ...]:
        """Those before all models: the one that answers, the embedder, rerankers."""
        return self.engine.runtime.queue, self.embedder.queue, self.workspaces.reranking

    @cached_property
    def engine(self) -> "Engine":
        from ragblend.engine.engine import Engine

        chosen = {name: getattr(self.settings, name) for name in ENGINE_SETTINGS}
        return Engine.open(home=self.home.root, url=self.settings.vllm, **chosen)

    @property
    def store(self) -> "KVStore":
        """The KV store alone, for upkeep that needs no model."""
        from ragblend.kvstore.store import KVStore

        budget, policy, remote = (
            getattr(self.settings, name) for name in ("store_budget_bytes", "store_policy", "remote")
        )
        return self.workspaces.file(
            "store", lambda: KVStore.open(self.home.kv, budget, policy=policy, remote=remote)
        )

    @property
    def known_passages(self) -> PassageRegistry:
        """What is found again in prompts that a framework builds over this home."""
        name = self.settings.collection
        return self.workspaces.file("passages", lambda: PassageRegistry.open(self.home.root, name), name)

    def close(self) -> None:
        self.workspaces.close()
