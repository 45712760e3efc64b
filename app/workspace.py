"""An open home (`Workspaces`) and its collections (`Workspace`): files, models, settings, opened when needed."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ragblend.app.answering.chats import Chats
from ragblend.app.home import Home, make_private
from ragblend.app.library.documents import DocumentState
from ragblend.app.library.job_store import JobStore
from ragblend.app.library.registry import Library
from ragblend.app.models import check_model
from ragblend.app.settings import PROCESS_SETTINGS, Settings
from ragblend.engine.model.checkpoints import find_model
from ragblend.engine.scheduling.queue import DeviceQueue
from ragblend.integrations.chroma import VectorIndex
from ragblend.integrations.embeddings import DEFAULT, Embedder, find_embedder
from ragblend.integrations.passages import PassageRegistry
from ragblend.kvstore.errors import SettingsError, UsageError
from ragblend.kvstore.files import Closing
from ragblend.kvstore.lock import writer_lock
from ragblend.kvstore.nodes import NodeIndex

if TYPE_CHECKING:
    from ragblend.app.answering.rerank import CrossEncoder
    from ragblend.engine.interface import EngineInterface
    from ragblend.kvstore.store import KVStore

T = TypeVar("T")
log = logging.getLogger("ragblend")


class _SharedState:
    """The state that all views of a home share (`Workspaces.with_settings`).

    files: open ones, by kind and collection; waiting: of each thread that waits to write, whether it is patient;
    lock_mark: the mark that this process left last in the writer lock; reranking: one queue for all rerankers, because
    a command may name another reranker than the settings do.
    """

    def __init__(self) -> None:
        self.lock, self.files = threading.RLock(), dict[tuple[str, str], Any]()
        self.waiting = list[bool]()
        self.lock_mark: str | None = None
        self.embedders, self.reranking = dict[tuple[str, str | None], Embedder](), DeviceQueue()
        self._next_writer, self._writer = threading.Lock(), threading.Lock()

    @contextmanager
    def write_turn(self, patient: bool) -> Iterator[None]:
        """Let one thread write. Two locks, so that a writer that yields cannot overtake the thread that waits."""
        self.waiting.append(patient)
        try:
            with self._next_writer:
                self._writer.acquire()
        finally:
            self.waiting.remove(patient)
        try:
            yield
        finally:
            self._writer.release()


class Workspaces(Closing):
    """The collections of one home, a `Workspace` each. Safe for threads.

    settings: the current ones; the collection that they name is the default one.
    """

    def __init__(self, home: Home, settings: Settings, owner: "Workspaces | None" = None) -> None:
        self.home, self.settings = home, settings
        self._is_owner = owner is None
        self._shared: _SharedState = owner._shared if owner else _SharedState()
        self._lock, self._files = self._shared.lock, self._shared.files
        self._open: dict[str, Workspace] = {}
        self.reranking = self._shared.reranking

    @classmethod
    def open(cls, home: Path | str | None = None, **overrides: Any) -> "Workspaces":
        """Find or create the home and read its settings. Raises LibraryError, SettingsError."""
        found = Home.resolve(home).create()
        return cls(found, Settings.read(found.settings, overrides=overrides))

    @property
    def first(self) -> "Workspace":
        return self.of(self.settings.collection)

    @property
    def library(self) -> Library:
        """The registry of documents of all collections."""
        return self.open_once("library", lambda: Library(self.home.library))

    @property
    def jobs(self) -> JobStore:
        """The stored ingest queue. This creates its file: where that is unwanted, check first that it exists."""
        return self.open_once("jobs", lambda: JobStore(self.home.jobs))

    @property
    def chats(self) -> Chats:
        """All conversations; passages that were deleted meanwhile are not stored with an answer, or not shown."""
        return self.open_once(
            "chats",
            lambda: Chats(
                self.home.chats, lambda nodes: self.library.known(nodes), self.library.hidden_nodes
            ),
        )

    def embedder(self, model: str) -> Embedder:
        """The embedder of that name (as in the settings) on the current device, one object for all collections."""
        # The bundled one ignores the device.
        device = None if model == DEFAULT else self.settings.local_device
        with self._lock:
            return self._shared.embedders.setdefault((model, device), Embedder(model, device))

    @property
    def embedders(self) -> list[Embedder]:
        """The embedders that were used, of all collections."""
        return list(self._shared.embedders.values())

    def of(self, collection: str) -> "Workspace":
        """The workspace of that collection. Raises SettingsError for an invalid name."""
        settings = replace(self.settings, collection=collection)
        with self._lock:
            if collection not in self._open:
                self._open[collection] = Workspace(self, settings)
            return self._open[collection]

    def open_once(self, kind: str, open_: Callable[[], T], collection: str = "") -> T:
        """An object that is opened once for a collection ("": for all of them), and closed with the home."""
        with self._lock:
            if (kind, collection) not in self._files:
                self._files[kind, collection] = open_()
            found: T = self._files[kind, collection]
            return found

    def names(self) -> list[str]:
        """All collections: the default one, then the others by name. Opening a workspace does not create one."""
        first = self.settings.collection
        return [first, *sorted({*self.library.collections()} - {first})]

    def count_documents(self, *states: DocumentState) -> int:
        """Documents in all collections; of these states, or of any."""
        counts = map(self.library.counts_by_state, self.names())
        return sum(sum(found[state] for state in states or DocumentState) for found in counts)

    def count_passages(self) -> int:
        return sum(map(self.library.count_passages, self.names()))

    def create(self, name: str) -> None:
        """Create an empty collection. Raises UsageError if it exists, SettingsError for an invalid name."""
        if name in self.names():
            raise UsageError(f"Creating the collection {name!r}: it exists already. Choose another name.")
        # Questions may have stored KV while an earlier collection of that name was removed.
        with self.writing():
            self.of(name).engine.forget_all()
            PassageRegistry.drop(self.home.root, name)
        self.library.add_collection(name)

    def forget(self, name: str) -> None:
        """Remove an emptied collection; the default one is kept in `names`."""
        with self._lock:
            self.library.forget_collection(name)
            PassageRegistry.drop(self.home.root, name)
            self._open.pop(name, None)
            self._close(lambda _, collection: collection == name)

    def change(self, **changes: Any) -> Settings:
        """Change settings in this process. Raises SettingsError; the collection cannot be changed.

        A `Workspace` that is in use keeps the settings that it was created with.
        """
        with self._lock:
            self.settings = self.settings.changed({k: v for k, v in changes.items() if k != "collection"})
            self._open.clear()
            self._close(lambda kind, _: kind in ("store", "reranker"))  # both depend on settings
            for model, device in [*self._shared.embedders]:
                if device not in (None, self.settings.local_device):
                    del self._shared.embedders[model, device]
            return self.settings

    @property
    def has_waiting_writer(self) -> bool:
        """Whether a thread waits to write: a long writer yields to it between two files."""
        return bool(self._shared.waiting)

    @property
    def has_urgent_writer(self) -> bool:
        """Whether one of the waiting writers is not patient: the ingest queue interrupts its current file for it."""
        return False in self._shared.waiting

    @contextmanager
    def writing(self, patient: bool = False) -> Iterator[None]:
        """Hold the writer lock of this home, among threads and processes; deleted text is erased at the end.

        patient: the caller is a long writer that yielded, so no file is interrupted for it. Not reentrant. Raises
        StoreLockedError, which names the process that holds the lock, and LibraryError.
        """
        shared = self._shared
        with shared.write_turn(patient), writer_lock(self.home.lock) as hold:
            if hold.before != shared.lock_mark:  # another process wrote: Chroma's memory may be outdated
                self.close_indexes()
            shared.lock_mark = hold.mark
            try:
                yield
            finally:
                try:
                    self.erase_removed()
                finally:
                    if self.home.chroma.exists():
                        make_private(self.home.chroma)  # Chroma's new files are readable by all users

    def erase_removed(self) -> None:
        """Erase deleted text from the files that still hold it. The caller holds the writer lock.

        Conversations keep the location, document name and number of each erased passage, and the answers, which are the
        user's.
        """
        if not (unerased := self.library.unerased()):
            return
        with NodeIndex.open(self.home.nodes) as nodes:
            erased = nodes.erase()
        if self.home.chats.exists():
            erased = self.chats.erase_deleted_texts(self.library.known) and erased
        erased = self.library.erase() and erased
        for collection in unerased:
            known = self.library.embedder(collection)
            for embedder in filter(None, (known.name, known.next) if known else (DEFAULT,)):
                with closing(VectorIndex(self.home.chroma, collection, embedder)) as index:
                    index.erase()
            if erased:
                self.library.mark_erased(collection)
        if not erased:
            log.warning(
                "deleted text stays in files of %s until other processes close them and the disk has room",
                self.home.root,
            )

    def close_indexes(self) -> None:
        """Close all vector indexes; the next search opens them again from the files."""
        with self._lock:
            for index in (each for (kind, _), each in self._files.items() if kind.startswith("index")):
                index.close()

    def with_settings(self, settings: Settings) -> "Workspaces":
        """The same collections and open files under other settings, for one command. Closing it closes nothing."""
        return Workspaces(self.home, settings, self)

    def close(self) -> None:
        """Close all files. Engines stay open: they are shared in a process."""
        if self._is_owner:
            self._close(lambda *_: True)

    def _close(self, wanted: Callable[[str, str], bool]) -> None:
        """Close some files, by kind and collection; they are opened again when needed."""
        with self._lock:
            for key in [key for key in self._files if wanted(*key)]:
                self._files.pop(key).close()


class Workspace(Closing):
    """One collection of a home, used by ingest, questions and the command line. Closing it closes the home."""

    def __init__(self, workspaces: Workspaces, settings: Settings) -> None:
        self.workspaces, self.settings = workspaces, settings
        self.home = workspaces.home

    @classmethod
    def open(cls, home: Path | str | None = None, **overrides: Any) -> "Workspace":
        """The default collection of a home. Raises LibraryError, SettingsError."""
        return Workspaces.open(home, **overrides).first

    def check_engine(self) -> None:
        """Check model, device, method and reranker before anything heavy is loaded; a hub's model is downloaded.

        Raises SettingsError, UsageError, ModelError. The cheap checks come first: the last ones import torch.
        """
        check_model(self.settings.model, self.home.models)
        find_model(self.settings.model)
        from ragblend.engine.model.device import pick_device
        from ragblend.engine.selection import CONTROLS, policy_named

        pick_device(self.settings.device)
        if policy_named(self.settings.method).name.partition(":")[0] in CONTROLS:
            raise SettingsError(
                f"The setting method: {self.settings.method!r} is a control for `ragblend bench quality` only. Choose "
                "another one (docs/methods.md)."
            )
        if self.settings.embedder:
            find_embedder(self.settings.embedder)
        if self.settings.reranker:
            from ragblend.app.answering.rerank import find_reranker

            find_reranker(self.settings.reranker)

    @property
    def library(self) -> Library:
        return self.workspaces.library

    @property
    def embedder_name(self) -> str:
        """The embedder of the collection's vectors, as in the settings."""
        known = self.library.embedder(self.settings.collection)
        return known.name if known else self.settings.embedder or DEFAULT

    @property
    def embedder(self) -> Embedder:
        return self.workspaces.embedder(self.embedder_name)

    @property
    def index(self) -> VectorIndex:
        """The vectors by `embedder`."""
        return self.index_by(self.embedder_name)

    @property
    def indexes(self) -> list[VectorIndex]:
        """`index`, and that of the next embedder if there is one: what is deleted is deleted from both."""
        known = self.library.embedder(self.settings.collection)
        return [self.index, *([self.index_by(known.next)] if known and known.next else [])]

    def index_by(self, embedder: str) -> VectorIndex:
        name = self.settings.collection
        return self.workspaces.open_once(
            f"index by {embedder}", lambda: VectorIndex(self.home.chroma, name, embedder), name
        )

    @property
    def reranker(self) -> "CrossEncoder | None":
        """The reranker of the settings, or None."""
        name, device = self.settings.reranker, self.settings.local_device
        if not name:
            return None
        from ragblend.app.answering.rerank import CrossEncoder

        queue = self.workspaces.reranking
        return self.workspaces.open_once(
            "reranker", lambda: CrossEncoder(name, device, queue), f"{name} on {device}"
        )

    @property
    def queues(self) -> tuple[DeviceQueue, ...]:
        """The queues of all models: the one that answers, embedders, rerankers. Reads no file and takes no lock."""
        embedders = self.workspaces.embedders
        return *self.engine.queues, *(each.queue for each in embedders), self.workspaces.reranking

    @cached_property
    def engine(self) -> "EngineInterface":
        from ragblend.engine.engine import Engine

        chosen = {name: getattr(self.settings, name) for name in (*PROCESS_SETTINGS, "collection")}
        return Engine.open(home=self.home.root, url=self.settings.vllm, **chosen)

    @property
    def store(self) -> "KVStore":
        """The KV store alone, for maintenance that needs no model."""
        from ragblend.kvstore.store import KVStore

        settings = self.settings
        return self.workspaces.open_once(
            "store",
            lambda: KVStore.open(
                self.home.kv,
                settings.store_budget_bytes,
                policy=settings.store_policy,
                remote=settings.remote,
            ),
        )

    @property
    def known_passages(self) -> PassageRegistry:
        """The passages that are recognised in prompts which a framework builds over this home."""
        name = self.settings.collection
        return self.workspaces.open_once("passages", lambda: PassageRegistry.open(self.home.root, name), name)

    def close(self) -> None:
        self.workspaces.close()
