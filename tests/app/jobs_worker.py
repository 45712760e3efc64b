"""Works off a home's queue on the fakes and dies in the second document: argv is HOME POINT PATH. Not a test file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from app_fakes import FakeEmbedder, FakeEngine
from ingest_worker import die_at

from ragblend.app.jobs import JobQueue
from ragblend.app.workspace import Workspace, Workspaces

if __name__ == "__main__":
    import signal

    home, point, path = sys.argv[1:]
    Workspace.engine, Workspace.embedder = FakeEngine(home), FakeEmbedder()
    die_at(point, signal.SIGKILL)
    jobs = JobQueue(Workspaces.open(home, chunk_tokens=16))
    jobs.add([Path(path)], "default")
    jobs.start()
    jobs.wait_idle(60)
