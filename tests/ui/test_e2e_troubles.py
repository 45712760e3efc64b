"""Failures around the page in a real Chromium: it reports them, keeps data, and stays usable."""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
import vllm_fake
from browser import ANSWERS, WAIT_MS, Server, Watched, files_below
from hub_server import serve_hub
from waiting import SOON_S

from ragblend.engine.engine import Engine
from ragblend.kvstore.lock import writer_lock
from ragblend.ui.password import save_password

TUNED = "a3:kernel=3"  # a method with parameters, which is none of those that the page offers
LONG = "max_new_tokens = 1400\nchunk_tokens = 128\ntop_k = 2\n"
HARBOUR = "The harbour master of Lantern Quay kept two ledgers of ships. "
ASKED = "What did the harbour master of Lantern Quay keep?"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def harbour(tmp_path) -> Path:
    (folder := tmp_path / "harbour").mkdir()
    (folder / "harbour.txt").write_text(HARBOUR)
    return folder


@pytest.fixture(scope="module")
def quiet(new_home):
    """One page for the troubles that leave it as it was but for its documents; it has none at first."""
    running = Server(new_home())
    yield running
    running.end()


def read(mine, folder: Path) -> None:
    """Have that folder, or file, read and encoded."""
    mine.tab("Library")
    before = mine.add(folder)
    mine.expect(f".rb-documents tr:has(.where:has-text('{folder}')) .rb-state").to_have_text("ready")
    mine.all_encoded(before)
    mine.tab("Chat")


def test_another_writer_has_the_home(quiet, open_page, harbour) -> None:
    """The page says who writes, answers meanwhile, and goes on when that one ends."""
    mine = open_page(quiet)
    page = mine.page
    with writer_lock(quiet.home / "writer.lock", "ragblend ingest elsewhere"):
        mine.tab("Library")
        mine.add(harbour)
        page.wait_for_selector("#rb-banner .rb-note:has-text('ragblend ingest elsewhere')")
        page.wait_for_selector("#rb-queue .rb-note:has-text('only one process may write')")
        mine.tab("Chat")
        page.fill("#rb-question textarea", ASKED)
        page.press("#rb-question textarea", "Control+Enter")
        page.wait_for_selector("#rb-transcript .rb-turn.answer:has-text('Nothing has been ingested')")
        mine.tab("Library")
    mine.await_states(harbour="ready")
    page.wait_for_selector("#rb-banner .rb-note", state="detached")


def test_a_file_that_is_too_large(quiet, open_page, tmp_path) -> None:
    """2 GB: refused before any of it is sent, with the limit; the next file goes in."""
    mine = open_page(quiet)
    page = mine.page
    mine.tab("Library")
    with (tmp_path / "large.txt").open("wb") as large:
        large.truncate(2 * 1024**3)
    (tmp_path / "small.txt").write_text(HARBOUR)
    page.set_input_files("#rb-upload input[type=file]", str(tmp_path / "large.txt"))
    page.wait_for_selector("text=exceed the maximum allowed size of 512")
    page.set_input_files("#rb-upload input[type=file]", str(tmp_path / "small.txt"))
    page.wait_for_selector(".rb-documents tr:has-text('small.txt') .rb-state:has-text('ready')")
    assert sum(map(size, files_below(quiet.home))) < 100 * 1024**2


def size(path: Path) -> int:
    """0 where it has gone meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_click_counts_while_the_one_before_it_is_not_answered(quiet, open_page, tmp_path) -> None:
    """The second of two documents that were deleted one right after the other used to stay, without a word."""
    (folder := tmp_path / "two").mkdir()
    for name in ("first", "second"):
        (folder / f"{name}.txt").write_text(f"{HARBOUR} This is the {name}.")
    mine = open_page(quiet)
    page, held = mine.page, []
    mine.tab("Library")
    mine.all_encoded(mine.add(folder))
    page.wait_for_selector(".rb-documents tr:has-text('second.txt')")

    def hold(route) -> None:
        if "delete-document" in (route.request.post_data or ""):
            held.append(route)
        else:
            route.continue_()

    page.route("**/gradio_api/run/**", hold)
    for name in ("first", "second"):
        button = f".rb-documents tr:has-text('{name}.txt') [data-act=delete-document]"
        page.click(button)
        page.click(f"{button}.asking")
    until(lambda: (page.wait_for_timeout(50), held[1]))
    page.unroute("**/gradio_api/run/**")
    mine.expect(f".rb-documents tr:has(.where:has-text('{folder}'))").to_have_count(0)


def test_message_of_a_click_survives_opening_the_tab(quiet, open_page, harbour) -> None:
    """The tab's own figures come late, as where the model is being read for them: after the click's answer."""
    mine = open_page(quiet)
    read(mine, harbour)
    page, held = mine.page, []
    page.route("**/gradio_api/run/**", lambda route: held.append(route))
    mine.tab("Store")
    page.click("#rb-check")
    page.wait_for_selector("#rb-store-message:has-text('No problems found.')")
    assert not page.locator("#rb-store-overview .rb-cards").count(), "the figures were not held back"
    page.unroute("**/gradio_api/run/**")  # lets those go that were held
    page.wait_for_selector("#rb-store-overview .rb-cards")
    assert page.inner_text("#rb-store-message") == "No problems found."
    mine.tab("Chat")
    mine.tab("Store")
    page.wait_for_function("!document.querySelector('#rb-store-message').innerText.trim()")


def test_click_acts_on_the_pressed_button(quiet, open_page) -> None:
    """A list that is drawn anew under the pointer has other rows in the same buttons, or lies further down."""
    mine = open_page(quiet)
    page = mine.page
    page.wait_for_selector("#rb-hello .rb-welcome")
    page.evaluate(
        """() => {
          window.sent = [];
          const list = document.createElement("div");
          list.style.cssText = "position: fixed; top: 0; left: 0; z-index: 999";
          const row = (id) => `<button data-act="cancel-job" data-id="${id}">row</button>`;
          list.innerHTML = ["1", "2", "3"].map(row).join("");
          document.body.append(list);
          window.ragblend.bind(list, (kind, data) => window.sent.push(data.id));
          window.rows = (ids, top) => {
            list.style.top = top;
            [...list.children].forEach((each, place) => { each.dataset.id = ids[place] || ""; });
          };
        }"""
    )
    for rows, top, pressed, expected in (
        (["2", "3"], "0", 1, ["2"]),
        (["1", "3"], "0", 1, []),
        (["1", "2", "3"], "0", 2, ["3"]),
        (["1", "2", "3"], "90px", 2, ["3"]),
    ):
        page.evaluate("() => { window.sent = []; window.rows(['1', '2', '3'], '0'); }")
        page.locator("body > div > [data-act=cancel-job]").nth(pressed).hover()
        page.mouse.down()
        page.evaluate("([ids, top]) => window.rows(ids, top)", [rows, top])
        page.mouse.up()
        page.wait_for_timeout(50)
        assert page.evaluate("() => window.sent") == expected, rows


def test_a_model_is_picked_from_what_is_here(quiet, open_page, tmp_path, tiny_folder):
    """Chosen from the list, saved, and the one before it named as the way back; a gone one keeps the old one."""
    running = quiet
    other = running.home / "models" / "other-0123-float32"
    shutil.copytree(tiny_folder, other)
    mine = open_page(running)
    page = mine.page
    mine.tab("Settings")
    page.click("#rb-model-choice input")
    page.click(f"[role=option]:has-text('{other.name}')")
    page.wait_for_function(
        f"document.querySelector('#rb-model input, #rb-model textarea').value === '{other}'"
    )
    mine.press("#rb-save", "#rb-saved:has-text('choose it again to go back')")
    assert str(other) in (running.home / "settings.toml").read_text()
    page.fill("#rb-model input, #rb-model textarea", "/no/such/model")
    mine.press("#rb-save", "#rb-saved .rb-note.error:has-text('/no/such/model')")
    assert str(other) in (running.home / "settings.toml").read_text()


def test_hub_model_is_downloaded(start, open_page, harbour, tiny_folder, tmp_path, monkeypatch):
    """With its bytes shown, stopped at once, then whole; and only then is it saved, and answers."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with serve_hub("anna/tiny", tiny_folder, hold_after=100) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        running = start()
        mine = open_page(running)
        page = mine.page
        read(mine, harbour)
        mine.tab("Settings")
        page.fill("#rb-model input, #rb-model textarea", "anna/tiny")
        mine.press("#rb-save", "#rb-saved:has-text('Downloading anna/tiny')")
        page.click("#rb-stop-download")
        mine.expect("#rb-saved").to_contain_text("was stopped; what has arrived is kept")
        page.wait_for_selector("#rb-stop-download", state="hidden")
        assert "anna/tiny" not in (running.home / "settings.toml").read_text()
        hub.go_on.set()
        before = mine.changes()
        mine.press("#rb-save", "#rb-saved:has-text('Saved. 1 document queued.')")
        assert "anna/tiny" in (running.home / "settings.toml").read_text()
        asked = len(hub.asked)
        mine.tab("Library")
        mine.all_encoded(before)
        mine.tab("Chat")
        mine.ask(ASKED)
        assert len(hub.asked) == asked, "the hub is asked once, not at every start"


def test_settings_and_the_store_over_a_restart(start, open_page, harbour, tiny_folder) -> None:
    """Settings and what was said are kept and shown again; a damaged KV file is found, and made again."""
    running = start(settings=f'method = "{TUNED}"\n')
    mine = open_page(running)
    page = mine.page
    read(mine, harbour)
    mine.tab("Settings")
    page.fill("#rb-top-k input[type=number]", "9")
    page.press("#rb-top-k input[type=number]", "Tab")
    page.wait_for_selector(
        "#rb-cost:has-text('Changes passages per question. No document needs to be processed again.')"
    )
    page.fill("#rb-chunk input[type=number]", "256")
    page.press("#rb-chunk input[type=number]", "Tab")
    page.wait_for_selector("#rb-cost:has-text('1 document (1 passage) must be cut and embedded again')")
    before = mine.changes()
    mine.press("#rb-save", "#rb-saved:has-text('Saved. 1 document queued.')")
    mine.tab("Library")
    mine.all_encoded(before)  # nothing may read the document again between the damage and its repair
    mine.tab("Chat")
    mine.ask(ASKED)
    mine.leave()
    assert running.stop() == 0
    assert not (running.home / "ui").exists()
    value = next((running.home / "kv" / "values").rglob("*.kv"))
    content = bytearray(value.read_bytes())
    content[-20] ^= 255
    value.write_bytes(content)
    mine = open_page(start())
    page = mine.page
    page.click(".rb-chat-open")
    page.wait_for_selector(f".rb-turn.user:has-text('{ASKED}')")
    mine.tab("Settings")
    mine.expect("#rb-top-k input[type=number]").to_have_value("9")
    mine.expect("#rb-chunk input[type=number]").to_have_value("256")
    mine.expect("#rb-method input").to_have_value(TUNED)
    assert f'method = "{TUNED}"' in (running.home / "settings.toml").read_text()
    mine.expect("#rb-model input, #rb-model textarea").to_have_value(str(tiny_folder))
    mine.tab("Store")
    for button, said in (
        ("#rb-check", "1 problem found"),
        ("#rb-repair", "1 damaged KV value removed; "),
        ("#rb-check", "No problems found."),
    ):
        page.click(button)
        mine.expect("#rb-store-message").to_contain_text(said)
    values = value.parents[1]  # it is encoded again, by the repair or behind it
    until(lambda: next(path for path in values.rglob("*.kv") if path.read_bytes() != content))


def test_beyond_loopback_it_wants_a_password(start, chromium, tmp_path) -> None:
    (home := tmp_path / "home").mkdir(mode=0o700)
    save_password(home, "seven grey seals")
    running = start("--host", "0.0.0.0")
    with closing(chromium.new_page()) as page:
        page.set_default_timeout(WAIT_MS)
        assert page.goto(running.address).status == 401
        for password in ("seven grey geese", "seven grey seals"):
            page.fill("input[type=password]", password)
            page.click("button")
            page.wait_for_selector("[role=alert]:has-text('Wrong password.'), #rb-question textarea")
        page.wait_for_selector("#rb-question textarea")
        assert "token" not in page.url


def test_a_browser_that_is_killed_in_mid_answer_stops_the_device(
    start, play, open_page, harbour, tmp_path, browser_path
) -> None:
    """No goodbye is sent: the connection breaks, and what had come is kept as stopped."""
    talkative = start(settings=LONG)
    mine = open_page(talkative)
    read(mine, harbour)
    mine.leave()
    victim = subprocess.Popen(
        [
            browser_path,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            f"--user-data-dir={tmp_path / 'profile'}",
            "about:blank",
        ],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = until(lambda: (tmp_path / "profile" / "DevToolsActivePort").read_text().split()[0])
        browser = play.chromium.connect_over_cdp(f"http://127.0.0.1:{port}")
        killed = Watched(browser.contexts[0], talkative)
        killed.begin(ASKED)
        killed.page.wait_for_selector("#rb-live .rb-prose")
    finally:
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait(SOON_S)
    page = open_page(talkative).page
    page.click(".rb-chat-open")
    page.wait_for_selector(".rb-turn.user")
    limit = time.monotonic() + WAIT_MS / 1000
    while "Stopped." not in page.inner_text("#rb-transcript"):
        # What has come so far is there before the server knows that nobody listens.
        assert time.monotonic() < limit, "the answer was not stopped"
        page.click("#rb-new")
        page.wait_for_selector("#rb-hello .rb-welcome")
        page.click(".rb-chat-open")
        page.wait_for_selector(".rb-turn.user")


def test_a_server_that_is_killed_in_mid_answer_leaves_what_was_shown(start, open_page, harbour) -> None:
    """Marked as cut off, with a way to ask again; it used to leave the question without a word."""
    talkative = start(settings=LONG)
    mine = open_page(talkative, checked=False)
    read(mine, harbour)
    mine.begin(ASKED)
    prose = "document.querySelector('#rb-live .rb-prose')?.textContent ?? ''"
    seen = mine.page.wait_for_function(f"() => {{ const text = {prose}; return text.length > 40 && text; }}")
    shown = letters(seen.json_value())
    until(lambda: letters(kept(talkative.home)).index(shown))  # half a second later at most
    talkative.kill()
    mine = open_page(start())
    page = mine.page
    page.click(".rb-chat-open")
    page.wait_for_selector("#rb-transcript .rb-note:has-text('ended while this answer was being written')")
    assert shown in letters(page.inner_text(f"{ANSWERS} .rb-prose"))
    with mine.answering():
        page.click("button:has-text('Ask again')")
        page.wait_for_selector("#rb-live .rb-prose")
        page.keyboard.press("Escape")
    mine.expect(ANSWERS).to_have_count(1)
    mine.expect(ANSWERS).to_contain_text("Stopped.")
    mine.expect("#rb-transcript").not_to_contain_text("ended while")


def letters(text: str) -> str:
    """What is drawn lacks the marks of Markdown that the model may have written, in the middle of words too."""
    return re.sub("[^A-Za-z]", "", text)


def kept(home: Path) -> str:
    """The text of the last answer in the file."""
    with closing(sqlite3.connect(home / "chats.sqlite")) as file:
        return file.execute("SELECT text FROM messages WHERE role = 'assistant' ORDER BY id").fetchall()[-1][
            0
        ]


def until(found, seconds: float = SOON_S):
    """The first thing that is found without an error."""
    end = time.monotonic() + seconds
    while True:
        try:
            return found()
        except (OSError, IndexError, StopIteration, ValueError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


@pytest.fixture
def small_disk(tmp_path):
    """A command that puts a home on a disk of 48 MiB and becomes another one. Skipped where nobody may mount."""
    script = 'mount -t tmpfs -o size=48m,mode=700 none "$0" && exec "$@"'
    (home := tmp_path / "home").mkdir(mode=0o700)
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(home)]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("a disk of its own needs unshare(1) and the right to mount")
    return prefix


def test_the_disk_fills_up_under_a_conversation(start, open_page, harbour, small_disk, tiny_folder) -> None:
    """The question is not lost in silence: the page names the full disk, and works again when there is room."""
    running = start("--model", str(tiny_folder), prefix=small_disk)
    mine = open_page(running)
    page = mine.page
    read(mine, harbour)
    mine.ask(ASKED)
    inside = Path(f"/proc/{running.process.pid}/root{running.home}")
    filler = inside / "filler"
    fill(filler)
    page.fill("#rb-question textarea", f"{ASKED} {'And why? ' * 2000}"[:19_000])
    page.press("#rb-question textarea", "Control+Enter")
    page.wait_for_selector("#rb-scroll .rb-note:has-text('the disk is full')")
    page.wait_for_selector("#rb-send")
    mine.tab("Library")
    (harbour / "second.txt").write_text(HARBOUR * 200)
    mine.add(harbour)
    page.wait_for_selector("#rb-library :is(#rb-queue, #rb-library-message) .rb-note:has-text('full')")
    filler.unlink()
    mine.add(harbour)
    mine.await_states(harbour="ready", second="ready")
    mine.tab("Chat")
    mine.ask(ASKED)
    page.wait_for_selector(ANSWERS)


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def test_model_of_a_vllm_server(start, open_page, harbour, tiny_folder, tmp_path) -> None:
    """Questions go there and answers stream back; once it is gone the page says so, and goes on with the next."""
    engine = Engine.open(str(tiny_folder), tmp_path / "engine")
    literal_ids = engine.runtime.tokenizing.literal_ids
    with vllm_fake.serve(tiny_folder, literal_ids) as vllm:
        vllm.answer = [*literal_ids("two ledgers of ships"), 2]
        mine = open_page(start(settings=f'vllm = "{vllm.url}"\n'))
        mine.tab("Library")
        mine.all_read(mine.add(harbour))
        mine.tab("Chat")
        mine.ask(ASKED)
        mine.expect(f"{ANSWERS} .rb-prose").to_contain_text("two ledgers of ships")
        [asked] = [body for body in vllm.asked if body.get("stream")]
        assert asked["kv_transfer_params"]["spans"], "its passages are named"
        vllm.status = 500, "out of memory"
        mine.begin(ASKED)
        mine.page.wait_for_selector(f"{ANSWERS}:last-child:has-text('out of memory')")
        vllm.status = None
        mine.ask(ASKED)
    engine.close()
