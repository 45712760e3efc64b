"""The Library tab in a real Chromium: the queue, watched folders, unreadable and missing files."""

import re
from pathlib import Path

import pytest
from browser import ANSWERS, files_below

# Half a minute of one core to embed: long enough to be paused, cancelled and killed in. With some more words it had so
# many passages that a third of each were embedded first.
LONG_WORDS = 23_000
pytestmark = pytest.mark.timeout(600)


def long_text(path: Path, words: int = LONG_WORDS) -> Path:
    path.write_text(" ".join(f"harbour{n % 97} ledger{n % 89} ship{n % 83}." for n in range(words // 3)))
    return path


def embedding(mine) -> None:
    mine.page.wait_for_selector("#rb-queue .current:has-text('embedding')")


def pause(mine) -> None:
    mine.press("#rb-queue [data-act=pause]", "#rb-queue strong:has-text('Paused')")


def press_slowly(mine, selector: str) -> None:
    """While the mouse's button is down another one is drawn in its place, and then further down."""
    mine.page.hover(selector)
    mine.page.mouse.down()
    mine.page.evaluate(
        "selector => { const button = document.querySelector(selector); button.replaceWith(button.cloneNode(true));"
        " document.querySelector('#rb-queue').style.paddingTop = '200px'; }",
        selector,
    )
    mine.page.mouse.up()


def test_a_long_file_is_paused_cancelled_killed_and_resumed(start, open_page, tmp_path) -> None:
    """Each leaves the file and loses nothing; what was paused stays so over a kill, and is read in the end."""
    (folder := tmp_path / "long").mkdir()
    long_text(folder / "long.txt")
    (folder / "short.txt").write_text("The harbour master kept two ledgers.")
    running = start()
    mine = open_page(running)
    page = mine.page
    mine.tab("Library")
    mine.add(folder)
    embedding(mine)
    press_slowly(mine, "#rb-queue [data-act=pause]")
    page.wait_for_selector("#rb-queue strong:has-text('Paused')")
    mine.await_states(long="queued")
    page.click("#rb-queue [data-act=resume]")
    embedding(mine)
    page.click("#rb-queue [data-act=cancel]")
    mine.expect("#rb-queue").to_contain_text("2 cancelled")
    mine.await_states(long="not finished")
    page.click("#rb-queue [data-act=retry-all]")
    embedding(mine)
    pause(mine)
    mine.leave()
    running.kill()
    mine = open_page(start())
    mine.tab("Library")
    mine.page.wait_for_selector("#rb-queue strong:has-text('Paused')")
    long_text(folder / "long.txt", 600)
    mine.page.click("#rb-queue [data-act=resume]")
    mine.await_states(long="ready", short="ready")
    mine.expect("#rb-queue").to_contain_text("2 done")


def test_summary_is_stopped_and_continued(start, open_page, tmp_path) -> None:
    (folder := tmp_path / "long").mkdir()
    long_text(folder / "long.txt", 300)
    mine = open_page(start(settings="chunk_tokens = 64\ntop_k = 2\n"))
    page = mine.page
    mine.tab("Library")
    mine.add(folder)
    mine.await_states(long="ready")
    with mine.answering():
        page.click("[data-act=digest]")
        # Any part but the first: a fast machine does several between two updates of the page.
        page.wait_for_selector("#rb-live .rb-status:text-matches('Summarising part ([2-9]|[1-9][0-9])')")
        page.click("#rb-stop")
    page.wait_for_selector(f"{ANSWERS} .rb-status:has-text('Stopped.')")
    with mine.answering():
        page.click("[data-act=regenerate]")
    mine.expect(ANSWERS).to_have_count(1)
    mine.expect(f"{ANSWERS} .rb-prose").not_to_be_empty()
    page.click(".rb-sources summary")
    page.click(".rb-source >> nth=0")
    mine.expect("#rb-source h3").to_have_text("long.txt")
    mine.expect(".rb-turn.user .rb-text").to_have_text("Summarise long.txt.")


def test_one_bad_file_among_many_is_named_and_stops_nothing(start, open_page, tmp_path) -> None:
    (folder := tmp_path / "many").mkdir()
    for number in range(60):
        (folder / f"file{number:02}.txt").write_text(f"Ship number {number} came at noon with rope and tar.")
    (folder / "empty.txt").touch()
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 and then nothing that a reader knows")
    mine = open_page(start())
    page = mine.page
    mine.tab("Library")
    mine.all_read(mine.add(folder))
    mine.expect("#rb-queue").to_contain_text("60 done")
    mine.expect("#rb-queue").to_contain_text("2 failed")
    page.click("#rb-document-state input")
    page.click("[role=option]:has-text('Failed')")
    mine.await_states(broken="failed", empty="failed")
    mine.expect(".rb-documents .reason").to_have_text(
        [re.compile("Reading .*broken"), re.compile("Reading .*empty")]
    )
    before = mine.changes()
    page.click(".rb-documents tr:has-text('broken') [data-act=retry-document]")
    page.wait_for_selector("#rb-library-message:has-text('1 file queued')")
    mine.all_read(before)


def test_a_deletion_is_undone_or_completed_when_the_page_ends(start, open_page, tmp_path) -> None:
    """Of an upload: the home has a copy of the file, too."""
    (letter := tmp_path / "letter.txt").write_text("The zanzibarcanary sits in the lamp room of the harbour.")
    running = start()
    mine = open_page(running)
    page = mine.page
    mine.tab("Library")
    page.set_input_files("#rb-upload input[type=file]", [str(letter)])
    mine.await_states(letter="ready")
    mine.tab("Chat")
    mine.ask("Where does the zanzibarcanary sit?")
    mine.tab("Library")
    deleted, button = "#rb-deleted:has-text('letter.txt was deleted.')", "[data-act=delete-document]"
    mine.confirm(button, deleted)
    mine.expect(".rb-documents tbody tr").to_have_count(0)
    mine.tab("Chat")
    page.click(".rb-chat-open")
    page.click(".rb-sources summary")
    page.click(".rb-source")
    mine.expect("#rb-source").to_contain_text("The document was deleted from the library.")
    again = open_page(running)  # as after a reload
    again.tab("Library")
    again.page.wait_for_selector(deleted)
    again.press("#rb-deleted [data-act=undo-delete]", ".rb-documents tr:has-text('letter.txt')")
    again.expect("#rb-deleted .rb-note").to_have_count(0)
    again.tab("Chat")
    again.ask("Where does the zanzibarcanary sit?")
    again.page.click(".rb-sources summary")
    again.page.click(".rb-source")
    again.page.wait_for_selector("#rb-source .rb-mark")
    mine.tab("Library")
    mine.expect("#rb-deleted .rb-note").to_have_count(0)
    mine.confirm(button, deleted)
    assert holding(running.home, "in the lamp room")
    for each in (mine, again):
        each.leave()
    assert running.stop() == 0
    assert holding(running.home, "in the lamp room") == []


def holding(home: Path, word: str) -> list[str]:
    """Files of the home, the models aside (a link), in which that word stands."""
    return [str(path) for path in files_below(home) if word.encode() in content(path)]


def content(path: Path) -> bytes:
    """Nothing, where it has gone meanwhile."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_a_watched_folder_is_followed_also_over_a_restart(start, open_page, tmp_path) -> None:
    """New and deleted files, while it runs and while it does not."""
    (folder := tmp_path / "watched").mkdir()
    (folder / "one.txt").write_text("One ship lies at the quay.")
    running = start()
    mine = open_page(running)
    mine.tab("Library")
    mine.add(folder, watch=True)
    mine.page.wait_for_selector(f"#rb-watched .name:has-text('{folder.name}')")
    mine.await_states(one="ready")
    (folder / "two.txt").write_text("Two ships lie at the quay.")
    mine.await_states(one="ready", two="ready")
    (folder / "one.txt").unlink()
    mine.await_states(two="ready")
    mine.leave()
    assert running.stop() == 0
    (folder / "two.txt").unlink()
    (folder / "later.txt").write_text("A file that came while nobody looked.")
    mine = open_page(start())
    mine.tab("Library")
    mine.await_states(later="ready")
    page = mine.page
    page.fill("#rb-new-collection input, #rb-new-collection textarea", "letters")
    mine.press("#rb-create-collection", "#rb-collection-tools:has-text('letters')")
    mine.tab("Chat")
    page.click("#rb-collections input")
    page.wait_for_selector("#rb-collections [role=option]:has-text('letters')")
    page.keyboard.press("Escape")
    mine.tab("Library")
    (other := tmp_path / "other").mkdir()
    (other / "letter.txt").write_text("Dear harbour master, the ledgers are in the lamp room.")
    mine.add(other, watch=True)
    mine.await_states(letter="ready")
    deleted = "#rb-library-message:has-text('Deleted 1 document: 1 passage')"
    mine.confirm("[data-act=delete-collection]", deleted, "Delete 1 document for good?")
    mine.await_states(later="ready")
    mine.expect("#rb-watched .name").to_have_count(1)
    mine.expect("#rb-collection input").to_have_value("default")
    page.wait_for_selector("#rb-collections", state="detached")
    page.click("#rb-watched [data-act=unwatch]")
    page.wait_for_selector("#rb-watched .name", state="detached")
