"""What all tests share."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragblend.engine.scheduling import background

background.EXIT_S = 60.0  # on a busy machine what a test asked for is not stored in five seconds

# Before torch is imported anywhere: with spinning OpenMP threads two busy processes on two cores slow each other down
# by a factor of ten and more; waiting threads that sleep cost next to nothing.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before Triton is imported anywhere: without a card its kernels run in its interpreter, where a test asks for them.
if not Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell starts background jobs with SIGINT ignored, and their children inherit that: tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Each of several test processes computes on its share of the cores.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))


# A folder that keeps the converted SmolLM2 between sessions. Taken out of the environment, where the app's settings
# would find an unknown variable, and kept under another name for the other test processes.
KEPT_MODELS = os.environ.pop("RAGBLEND_TEST_MODELS", None) or os.environ.get("TEST_MODELS")
if KEPT_MODELS:
    os.environ["TEST_MODELS"] = KEPT_MODELS


def pytest_configure(config: pytest.Config) -> None:
    """What passed only when it ran again is named in the summary with what had failed."""
    if config.pluginmanager.hasplugin("rerunfailures"):
        config.option.rerun_show_tracebacks = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The browser's files first: they take longest, and what begins last should not keep one process busy alone."""
    items.sort(key=lambda item: not item.path.name.startswith(("test_e2e", "test_accessibility")))


@pytest.fixture(autouse=True)
def never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is measured in the background: tiny ones would from then on be computed, which is faster than loading.

    Tests of the loading controller give it a profile.
    """
    from ragblend.engine.controller import MeasuredSpeeds

    monkeypatch.setattr(MeasuredSpeeds, "cannot_measure", True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def root(home: Path) -> Path:
    """The store's folder in it."""
    return home / "kv"


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fsync, where ten thousand of them would only tell how fast the disk is."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="session")
def smollm2_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one `models` folder of this run: who needs the bundled model first converts it (20 s a dtype), for all.

    RAGBLEND_TEST_MODELS names a folder whose converted models are used, and kept for the next session. The gate's
    verdicts are not: a model judged by last week's code says nothing about today's.
    """
    base = tmp_path_factory.getbasetemp()
    of_this_run = (base.parent if WORKERS > 1 else base) / "smollm2" / "models"
    folder = Path(KEPT_MODELS).resolve() if KEPT_MODELS else of_this_run
    folder.mkdir(parents=True, exist_ok=True)
    for verdict in (*folder.glob("gate-*.json"), *folder.glob("steps-*.json")):
        verdict.unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="session")
def with_smollm2(smollm2_models: Path) -> Callable[[Path], Path]:
    """Lends the session's models to a new home, and gives that home back: works for subprocesses as well."""

    def lend(home: Path) -> Path:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        (home / "models").symlink_to(smollm2_models, target_is_directory=True)
        return home

    return lend


@pytest.fixture(scope="session")
def smollm2_home(tmp_path_factory: pytest.TempPathFactory, with_smollm2: Callable[[Path], Path]) -> Path:
    """A home of the engine's tests on the bundled model, in which it is converted, or will be on first use."""
    return with_smollm2(tmp_path_factory.mktemp("smollm2-home"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of four layers, which never ends an answer by itself."""
    import tiny_models  # torch is not imported before the variables above are set, and not where nobody asks

    return tiny_models.save_model("llama", tmp_path_factory.mktemp("models") / "llama", is_endless=True)


@pytest.fixture(scope="session")
def caller_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template has tools."""
    import tiny_models

    folder = tmp_path_factory.mktemp("models") / "caller"
    return tiny_models.save_model("llama", folder, is_endless=True, template=tiny_models.TOOLS_TEMPLATE)


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Makes a home in which the tiny models are judged already, and gives it back.

    The self-test's verdicts and the choice of decode implementation are in one folder for the session: 0.6 s a home.
    """
    models = tmp_path_factory.mktemp("judged")

    def lend(home: Path) -> Path:
        home.mkdir(parents=True, mode=0o700)
        (home / "models").symlink_to(models, target_is_directory=True)
        return home

    return lend


@pytest.fixture(autouse=True)
def one_event_loop() -> Iterator[None]:
    """LlamaIndex's `asyncio_run` takes the thread's event loop, makes one where there is none, and never closes it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)
