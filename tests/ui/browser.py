"""A real Chromium over the real command, and the checks that hold on every page that it opens."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import SOON_S

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing here is about speed: other work may have the machine.
WAIT_MS = int(os.environ.get("TEST_WAIT_MS", "120000"))
TRIES = 4
TRY_MS = WAIT_MS / TRIES
ASKS_MS = 4000  # so long a button waits for the click that confirms
UPLOADED = "/upload_progress?"  # Gradio asks how far a file is that is there already
ANSWERS = "#rb-transcript .rb-turn.answer"
NEWEST = f"([...document.querySelectorAll('{ANSWERS}')].at(-1)?.dataset.message ?? '')"
NEXT_IS_THERE = f"before => {NEWEST} && {NEWEST} !== before && !document.querySelector('#rb-live .rb-turns')"
QUEUE = "document.querySelector('#rb-queue .rb-queue')"
CHANGES = f"Number({QUEUE}?.dataset.changes ?? -1)"
STATES = (
    "Object.fromEntries([...document.querySelectorAll('.rb-documents tbody tr')].map(row => ["
    "row.querySelector('.name').textContent.split('.')[0], row.querySelector('.rb-state').textContent]).sort())"
)


def find_chromium():
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(
            "there is no Chromium here; install the system's (apt install chromium) to run the page's tests"
        )
    return found


def expect(page, selector: str):
    """What the page should have there: Playwright's assertions, which wait for it, and say what was there instead."""
    from playwright.sync_api import expect as awaited

    awaited.set_options(timeout=WAIT_MS)
    return awaited(page.locator(selector))


def retried(steps: Callable[[], None]) -> bool:
    """Whether the steps came to their end in one of some tries."""
    from playwright.sync_api import TimeoutError as NotShown

    for _ in range(TRIES):
        with contextlib.suppress(NotShown):
            steps()
            return True
    return False


def files_below(folder: Path) -> Iterator[Path]:
    """As far as they are there by then: what works in a home makes and removes files all the time."""
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names if not Path(root, name).is_socket())


class Server:
    """`ragblend ui` on one home, as a user starts it."""

    def __init__(self, home: Path, *options: str, prefix: Sequence[str] = ()) -> None:
        """prefix: a command that becomes this one, as `prlimit` does."""
        self.home = home
        words = ["ui", "--no-browser", "--port", "0", "--json", "--home", home]
        command = [sys.executable, "-m", "ragblend.app.cli.main", *words]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAGBLEND_")}
        self.process = subprocess.Popen(
            [*prefix, *map(str, command), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.noise: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        assert line, "the page did not start: " + "".join(self.noise)
        self.url = json.loads(line)["url"]

    def _read(self) -> None:
        for line in self.process.stderr:
            self.noise.append(line)

    @property
    def address(self) -> str:
        return self.url.partition("/?")[0]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ctrl-C, or another signal; the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(SOON_S)
        self._close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SOON_S)
        self._close()

    def _close(self) -> None:
        self._reader.join(SOON_S)
        self.process.stdout.close()
        self.process.stderr.close()

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
                return
            self.kill()
        self._close()


class Servers:
    """One page after the other, each on a home of its own; tests share the one that runs."""

    def __init__(self, begin: Callable[[], Server]) -> None:
        self._begin, self._now = begin, None

    def running(self) -> Server:
        """The one that was begun last; another one if it has ended."""
        if self._now is None or self._now.process.poll() is not None:
            self.end()
            self._now = self._begin()
        return self._now

    def new(self) -> Server:
        self.end()
        return self.running()

    def end(self) -> None:
        if self._now is not None:
            self._now.end()
            self._now = None


class Watched:
    """A browser's page, with everything noted that must not happen on any."""

    def __init__(self, context, server: Server) -> None:
        self.context, self.page = context, context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.foreign: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self._note(request.url, server.address))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss())
        )
        self.page.on("console", self._note_console)
        self.page.on("response", self._note_refusal)
        self.page.goto(server.url)
        self.page.on("load", lambda _: self.errors.append("the page was loaded again"))
        self.page.wait_for_selector("#rb-question textarea")
        self.page.wait_for_selector("#rb-hello .rb-welcome")

    def _note(self, url: str, address: str) -> None:
        if not url.startswith((f"{address}/", "data:", "blob:")):
            self.foreign.append(url)

    def _note_console(self, message) -> None:
        if message.type != "error" or UPLOADED in message.location.get("url", ""):
            return
        if message.text != "Response":  # an object that Gradio prints; what it was is noted below
            self.errors.append(f"{message.text} {message.location.get('url', '')}")

    def _note_refusal(self, response) -> None:
        """What a request was answered with that failed: the console says no more than that it did."""
        if response.status >= 400 and UPLOADED not in response.url:
            with contextlib.suppress(Exception):  # the page may be gone by then
                self.errors.append(f"{response.status} {response.url}: {response.text()[:300]}")

    def leave(self) -> None:
        """Close the browser's window, and look that all was well until then."""
        self.context.close()
        self.check()

    def check(self) -> None:
        """Nothing was asked of another host, nothing failed."""
        assert not self.foreign, self.foreign
        assert not self.errors, self.errors

    # --- what a user does

    def press(self, selector: str, shows: str) -> None:
        """Click until that is shown: a busy page may send what was typed in a field after the first click."""

        def steps() -> None:
            self.page.click(selector, timeout=TRY_MS)
            self.page.wait_for_selector(shows, timeout=TRY_MS)

        assert retried(steps), f"{shows} was not shown for {selector}, but {self.said()}"

    def said(self) -> list[str]:
        """All notes that the page has now."""
        return self.page.locator(".rb-note").all_inner_texts()

    def tab(self, name: str) -> None:
        """A narrow page has some in a menu, into which they go when the tabs are laid out."""
        tabs = "#rb-tabs > .tab-wrapper"
        tab = f"{tabs} button[role=tab]:has-text('{name}')"

        def steps() -> None:
            if self.page.locator(tab).is_visible():
                self.page.click(tab, timeout=TRY_MS)
            else:
                self.page.click(f"{tabs} .overflow-menu > button", timeout=TRY_MS)
                self.page.click(f"{tabs} .overflow-dropdown button:has-text('{name}')", timeout=TRY_MS)
            self.page.wait_for_selector(f"{tab}[aria-selected=true]", timeout=TRY_MS)

        assert retried(steps), f"the tab {name} did not open"
        if name == "Settings":
            # Its fields are filled when it opens: what one types before that is overwritten.
            self.page.wait_for_selector("#rb-ratio-meaning p")

    def uncover(self) -> None:
        """Close what covers a narrow page, if anything does."""
        for close in self.page.locator("[data-act=cover-close]").all():
            if close.is_visible():
                close.click()
                close.wait_for(state="hidden")

    def confirm(self, selector: str, shows: str, asked: str = "") -> None:
        """Click a button that asks whether one means it, and then again, until that is shown."""

        def steps() -> None:
            self.page.click(selector, timeout=TRY_MS)
            self.page.click(f"{selector}.asking:has-text('{asked}')", timeout=ASKS_MS)
            self.page.wait_for_selector(shows, timeout=TRY_MS)

        assert retried(steps), f"{shows} was not shown for {selector}, but {self.said()}"

    def ask(self, question: str) -> None:
        """Type and send with Ctrl-Enter; returns when the answer has ended."""
        with self.answering():
            self.begin(question)

    def begin(self, question: str) -> None:
        self.page.fill("#rb-question textarea", question)
        self.page.press("#rb-question textarea", "Control+Enter")
        self.page.wait_for_function("document.querySelector('#rb-question textarea').value === ''")

    def open_source(self, document: str) -> None:
        """Show the first source of the only answer whose document's name has that."""
        self.page.click(".rb-sources summary")
        self.page.click(f".rb-source:has-text('{document}') >> nth=0")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """What begins an answer is done in it; it is left when that answer has ended, and is drawn."""
        before = self.page.evaluate(NEWEST)
        yield
        self.page.wait_for_function(NEXT_IS_THERE, arg=before)
        self.page.wait_for_selector("#rb-send")

    def expect(self, selector: str):
        return expect(self.page, selector)

    def changes(self) -> int:
        """A number that grows with the queue: what is drawn may be older than what was just put into it."""
        return self.page.evaluate(CHANGES)

    def all_read(self, since: int = -1) -> None:
        """Wait until all files are read; since: the queue's `changes` before they were put into it."""
        self._await(
            f"since => {QUEUE}?.textContent.includes('Finished') && {CHANGES} > since", since, "#rb-queue"
        )

    def all_encoded(self, since: int = -1) -> None:
        """Wait until all files are read and all KV is there, so that nothing works behind the page any more."""
        self._await(f"since => {QUEUE}?.ariaBusy === 'false' && {CHANGES} > since", since, "#rb-queue")

    def _await(self, holds: str, value: Any, shown: str) -> None:
        """Wait until a function of JavaScript holds of the value; else say what is shown there."""
        from playwright.sync_api import TimeoutError as NotYet

        try:
            self.page.wait_for_function(holds, arg=value)
        except NotYet:
            there = self.page.locator(shown).all_inner_texts()
            raise AssertionError(f"waited for {value} in vain; {shown} has {there}") from None

    def add(self, path: Path, watch: bool = False) -> int:
        """Name a folder or a file in the Library tab, which must be open; gives the queue's `changes` before it."""
        before = self.changes()
        self.page.fill("#rb-folder input, #rb-folder textarea", str(path))
        self.page.set_checked("#rb-watch input", watch)
        self.page.click("#rb-add-folder")
        self.page.wait_for_selector("#rb-library-message .rb-note")
        return before

    def await_states(self, **expected: str) -> None:
        """Wait until the list of documents is that: the name's stem and its state."""
        wanted = dict(sorted(expected.items()))
        self._await(f"wanted => JSON.stringify({STATES}) === JSON.stringify(wanted)", wanted, ".rb-documents")
