"""Everything that the page stands on, opened once in a process.   <- START HERE for the app behind the page"""

from pathlib import Path
from typing import Any

from ragblend.app.chats import Chats
from ragblend.app.conversation import Conversations
from ragblend.app.documents import Document
from ragblend.app.jobs import JobQueue
from ragblend.app.settings import Settings
from ragblend.app.watching import Watcher
from ragblend.app.workspaces import Workspaces
from ragblend.kvstore.closing import Closing


class Desk(Closing):
    """The services over one home. `start` begins the work in the background; `close` ends all of it."""

    def __init__(self, workspaces: Workspaces) -> None:
        self.workspaces = workspaces
        self.chats = Chats.open(workspaces.home.chats)
        self.jobs = JobQueue.open(workspaces, self._forget)
        self.watching = Watcher(self.jobs)
        self.conversations = Conversations(workspaces, self.chats)

    @classmethod
    def open(cls, home: Path | str | None = None, **overrides: Any) -> "Desk":
        """Find the home, make it if need be, read its settings. Raises LibraryError, SettingsError."""
        return cls(Workspaces.open(home, **overrides))

    @property
    def settings(self) -> Settings:
        return self.workspaces.settings

    def start(self) -> None:
        """Go on with the ingest queue and look after watched folders."""
        self.jobs.start()
        self.watching.start()

    def close(self) -> None:
        """End answers and threads, close the files. The engine stays: it is shared in a process."""
        self.conversations.stop_all()
        self.watching.close()
        self.jobs.close()
        self.chats.close()
        self.workspaces.close()

    def _forget(self, document: Document) -> None:
        """A document went: its text goes out of the conversations that were given it."""
        self.chats.forget_document(document.id)
