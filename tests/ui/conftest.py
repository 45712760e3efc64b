"""Shared fixtures of the page's tests: a browser, pages that are checked when they close, a fake model."""

from pathlib import Path

import pytest
from browser import Server, Watched, find_chromium


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What drives a browser runs a second time where it failed, and is named in the summary: decision 38."""
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if "browser_path" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session")
def browser_path() -> str:
    return find_chromium()


@pytest.fixture(scope="module")
def play():
    pytest.importorskip("gradio", reason="the page needs the extra `ui`")
    playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
    with playwright.sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="module")
def chromium(play, browser_path):
    browser = play.chromium.launch(
        executable_path=browser_path, headless=True, args=["--no-sandbox", "--disable-gpu"]
    )
    yield browser
    browser.close()


@pytest.fixture
def open_page(chromium, request):
    """Opens the page in a browser of its own; afterwards nothing foreign was asked for and nothing failed.

    checked: false where the server ends under it.
    """
    opened = []

    def open_(on=None, width=1280, height=800, checked=True, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        watched = Watched(context, on or request.getfixturevalue("server"))
        opened.append(watched.leave if checked else context.close)
        return watched

    yield open_
    for close in opened:
        close()


@pytest.fixture
def fake_engine(tmp_path, monkeypatch):
    """What answers and encodes in a page that is built without a server (`serverless.built`), in all collections."""
    from app_fakes import FakeEmbedder, FakeEngine

    from ragblend.app.workspace import Workspace

    engine = FakeEngine(tmp_path / "home")
    monkeypatch.setattr(Workspace, "engine", engine)
    monkeypatch.setattr(Workspace, "embedder", FakeEmbedder())
    return engine


@pytest.fixture(scope="session")
def new_home(tmp_path_factory, tiny_folder):
    """new_home(settings): an empty home with the tiny model."""

    def make(settings: str = "") -> Path:
        home = tmp_path_factory.mktemp("page") / "home"
        home.mkdir(mode=0o700)
        (home / "settings.toml").write_text(f'model = "{tiny_folder}"\n{settings}')
        return home

    return make


@pytest.fixture
def start(tmp_path, tiny_folder):
    """Starts `ragblend ui` on a home of its own with the tiny model, as often as it is called; ends what still runs."""
    started = []

    def start_(*options: str, settings: str = "", **more) -> Server:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True, mode=0o700)
        if not (home / "settings.toml").exists():
            (home / "settings.toml").write_text(f'model = "{tiny_folder}"\n{settings}')
        started.append(Server(home, *options, **more))
        return started[-1]

    yield start_
    for server in started:
        server.end()
