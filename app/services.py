"""Everything that the page stands on, opened once in a process.   <- START HERE for the app behind the page"""

from pathlib import Path
from typing import Any

from ragblend.app.answering.chats import Chats
from ragblend.app.answering.conversation import Conversations
from ragblend.app.library.jobs import JobQueue
from ragblend.app.library.removal import RemovedDocument
from ragblend.app.library.watching import Watcher
from ragblend.app.settings import Settings
from ragblend.app.workspace import Workspaces
from ragblend.kvstore.files import Closing


class AppServices(Closing):
    """The services over one home. `start` begins the work in the background; `close` ends all of it."""

    def __init__(self, workspaces: Workspaces) -> None:
        self.workspaces = workspaces
        self.jobs = JobQueue(workspaces)
        self.watching = Watcher(self.jobs)
        self.conversations = Conversations(workspaces)

    @classmethod
    def open(cls, home: Path | str | None = None, **overrides: Any) -> "AppServices":
        """Find the home, make it if need be, read its settings. Raises LibraryError, SettingsError."""
        return cls(Workspaces.open(home, **overrides))

    @property
    def settings(self) -> Settings:
        return self.workspaces.settings

    @property
    def chats(self) -> Chats:
        return self.workspaces.chats

    def start(self) -> None:
        """Go on with the ingest queue, look after watched folders, mark answers that a kill cut off."""
        self.chats.end_unfinished()
        self.jobs.start()
        self.watching.start()

    def remove_collection(self, name: str) -> tuple[list[RemovedDocument], int]:
        """As `JobQueue.remove_collection`; its watched folders go first, which would bring the documents back."""
        for folder in self.watching.folders():
            if folder.collection == name:
                self.watching.remove(folder.id)
        return self.jobs.remove_collection(name)

    def close(self) -> None:
        """End answers and threads, close the files. The engine stays: it is shared in a process."""
        self.conversations.stop_all()
        self.watching.close()
        self.jobs.close()
        self.workspaces.close()
