"""The services over one home, opened once in a process: what the page and the server use."""

import logging
import threading
from pathlib import Path
from typing import Any

from ragblend.app.answering.chats import Chats
from ragblend.app.answering.conversation import Conversations
from ragblend.app.library.deletions import UndoableDeletions
from ragblend.app.library.jobs import JobQueue
from ragblend.app.library.removal import RemovedDocument
from ragblend.app.library.watching import Watcher
from ragblend.app.settings import Settings
from ragblend.app.workspace import Workspaces
from ragblend.kvstore.errors import RagBlendError
from ragblend.kvstore.files import Closing

log = logging.getLogger(__name__)


class AppServices(Closing):
    """Ingest queue, deletions, folder watcher and conversations of one home. `start` begins background work, `close`
    ends it.
    """

    def __init__(self, workspaces: Workspaces) -> None:
        self.workspaces = workspaces
        self.jobs = JobQueue(workspaces)
        self.deletions = UndoableDeletions(self.jobs)
        self.watching = Watcher(self.jobs)
        self.conversations = Conversations(workspaces)

    @classmethod
    def open(cls, home: Path | str | None = None, **overrides: Any) -> "AppServices":
        """Find or create the home and read its settings. Raises LibraryError, SettingsError."""
        return cls(Workspaces.open(home, **overrides))

    @property
    def settings(self) -> Settings:
        return self.workspaces.settings

    @property
    def chats(self) -> Chats:
        return self.workspaces.chats

    def start(self) -> None:
        """Start the ingest queue and the watcher, and mark answers that a killed process left unfinished."""
        self.chats.mark_interrupted()
        self.deletions.start()
        self.jobs.start()
        self.watching.start()

    def remove_collection(self, name: str) -> tuple[list[RemovedDocument], int]:
        """Stop watching the collection's folders, which would be ingested again, then remove it as
        `JobQueue.remove_collection` does.
        """
        for folder in self.watching.folders():
            if folder.collection == name:
                self.watching.remove(folder.id)
        return self.jobs.remove_collection(name)

    def close(self) -> None:
        """Stop answers and threads, complete deletions and close the files. The engine stays open: it is shared in a
        process.
        """
        self.conversations.stop_all()
        self.watching.close()
        self.deletions.close()
        self.jobs.end()
        self.workspaces.close()


class ModelStartup:
    """Loads the model and the embedder in the background. problem: what to tell the user; "" if there is none."""

    def __init__(self) -> None:
        self.problem = ""
        self.is_loading = False

    def begin(self, services: AppServices) -> threading.Thread:
        """Start loading, so that the first question is not delayed and a missing model is reported before it."""
        self.is_loading = True
        thread = threading.Thread(target=self._load, args=(services,), name="ragblend-startup", daemon=True)
        thread.start()
        return thread

    def _load(self, services: AppServices) -> None:
        try:
            engine = services.workspaces.first.engine
            engine.count_tokens("one word")  # fails if there is no such model
            services.conversations.warm_up()
            engine.prefetch(())  # an empty prefetch loads the model
            self.problem = ""
        except RagBlendError as error:
            self.problem = (
                f"{error} Until then no question can be answered; the library and the settings work."
            )
        except Exception as error:
            log.exception("loading the model failed")
            self.problem = (
                f"Loading the model failed unexpectedly ({type(error).__name__}: {error}). Choose another model in "
                "the settings, or restart RAGBlend; its terminal shows the details."
            )
        finally:
            self.is_loading = False
