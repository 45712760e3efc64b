"""The page as users have it: the real command, the bundled model, a real Chromium."""

import json
import re
import shutil
from pathlib import Path

import pytest
from browser import ANSWERS, Server, Servers, expect
from document_files import write_epub
from hostile import HUNDRED

from ragblend.app import samples

QUESTION = "When did the Thornsay Causeway Tramway open?"
# With a null a file is taken for a binary one, and refused.
PRINTABLE = [text for text in HUNDRED if "\0" not in text]
SETTINGS = "max_new_tokens = 24\ntop_k = 3\n"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def servers(tmp_path_factory, with_smollm2):
    def begin() -> Server:
        home = with_smollm2(tmp_path_factory.mktemp("page") / "home")
        (home / "settings.toml").write_text(SETTINGS)
        return Server(home)

    several = Servers(begin)
    yield several
    several.end()


@pytest.fixture
def server(servers):
    """One home for the whole story: the first test fills it."""
    return servers.running()


def screenshots() -> Path:
    """Kept as artefacts: under `build`, which is never committed."""
    folder = Path(__file__).parents[2] / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_first_run_to_the_highlighted_passage(open_page, servers) -> None:
    """Nothing is there; the samples, by keyboard; a question, a streamed answer, a source, its passage marked."""
    mine = open_page(servers.new())
    page = mine.page
    reach(page, "[data-act=samples]", backwards=True)
    page.keyboard.press("Enter")
    mine.tab("Library")
    mine.all_read()
    mine.expect(".rb-documents .rb-state.s-done").to_have_count(8)
    mine.tab("Chat")
    page.wait_for_selector(".suggestion")
    page.evaluate(
        "() => { window.seen = new Set(); new MutationObserver(() => { const text = "
        "document.querySelector('#rb-live .rb-prose');"
        " if (text) window.seen.add(text.textContent); }).observe(document.body, {subtree: true, "
        "childList: true, characterData: true}); }"
    )
    mine.ask(QUESTION)
    assert page.evaluate("window.seen.size") > 1  # it came in pieces
    mine.expect(f"{ANSWERS} .rb-prose").to_contain_text("6 May 1909")
    mine.open_source("visitor-guide.html")
    said = "The tramway opened on 6 May 1909 to bring salt from the pans on the island."
    mine.expect("#rb-source .rb-mark").to_have_text(said)
    page.screenshot(path=screenshots() / "chat.png")


def test_a_document_is_read_page_by_page_from_its_source_and_from_the_library(open_page, server) -> None:
    mine = open_page()
    page = mine.page
    mine.ask("What are Dunlin's axleboxes packed with?")
    mine.open_source("dunlin")
    page.wait_for_selector("#rb-source .rb-box")
    page.wait_for_function("document.querySelector('#rb-source .rb-page img')?.naturalWidth > 300")
    page.screenshot(path=screenshots() / "pdf.png")
    page.click("#rb-source [data-act=view]")
    expect(page, ".rb-viewer[open] .rb-box >> nth=0").to_be_in_viewport()
    marked = page.inner_text(".rb-viewer nav span")
    page.keyboard.press("ArrowRight")
    expect(page, ".rb-viewer[open] nav span").not_to_have_text(marked)
    page.keyboard.press("ArrowLeft")
    expect(page, ".rb-viewer[open] nav span").to_have_text(marked)
    expect(page, ".rb-viewer[open] .rb-box >> nth=0").to_be_in_viewport()  # the mark is still there
    page.keyboard.press("Escape")
    expect(page, ".rb-viewer").to_have_count(0)
    assert page.evaluate("document.activeElement.dataset.act") == "view", "the focus goes back"
    mine.tab("Library")
    for _ in range(2):  # a closed one can be opened again
        page.click(".rb-documents tr:has-text('dunlin') [data-act=view]")
        expect(page, ".rb-viewer[open] nav span").to_have_text("1 of 4")
        before = page.locator(".rb-viewer img").bounding_box()["width"]
        page.keyboard.press("+")
        assert page.locator(".rb-viewer img").bounding_box()["width"] > 1.2 * before
        page.keyboard.press("-")
        saved = page.request.get(server.address + page.get_attribute(".rb-viewer a", "href"))
        assert saved.body() == (samples.documents_folder() / "dunlin-maintenance-manual.pdf").read_bytes()
        assert "attachment" in saved.headers["content-disposition"]
        page.click(".rb-viewer [data-act=view-close]")
        expect(page, ".rb-viewer").to_have_count(0)


def test_a_dropped_file_is_read_and_can_be_asked_alone(open_page) -> None:
    mine = open_page()
    page = mine.page
    mine.tab("Library")
    since = mine.changes()
    mine.tab("Chat")
    page.evaluate(
        "() => { const files = new DataTransfer();"
        " files.items.add(new File(['The lamp of Gannet Rock is painted green.'], 'gannet.txt'));"
        " for (const type of ['dragover', 'drop']) document.querySelector('#rb-question').dispatchEvent("
        "new DragEvent(type, {bubbles: true, cancelable: true, dataTransfer: files})); }"
    )
    mine.all_read(since)
    page.click(".rb-documents tr:has-text('gannet') [data-act=ask-document]")
    expect(page, "#rb-asked-document").to_have_text("Only gannet.txt")
    mine.ask("What is said about the causeway?")
    assert page.locator(".rb-source .name").all_text_contents() == ["gannet.txt"]
    page.click("#rb-asked-document [data-act=ask-all]")
    expect(page, "#rb-asked-document .asked").to_have_count(0)
    mine.ask(QUESTION)
    expect(page, f"{ANSWERS} >> nth=-1").to_contain_text("6 May 1909")
    with page.expect_file_chooser():
        page.click("[data-act=attach]")
    mine.tab("Library")
    deleted = "#rb-deleted:has-text('gannet.txt was deleted.')"
    mine.confirm(".rb-documents tr:has-text('gannet') [data-act=delete-document]", deleted)


def test_details_of_an_answer(open_page) -> None:
    mine = open_page(color_scheme="dark")
    page = mine.page
    mine.tab("Library")
    mine.all_encoded()
    mine.tab("Chat")
    mine.ask(QUESTION)
    page.click(".rb-button.chip")
    page.wait_for_selector("#rb-hood .rb-bar")
    shown = page.inner_text("#rb-hood")
    counts = {
        kind: int(re.search(rf"{kind} ([\d,]+)", shown)[1].replace(",", "")) for kind in ("reused", "fresh")
    }
    assert counts["reused"] > counts["fresh"] > 0
    assert page.locator("#rb-hood .k-reused").count() > 1
    assert page.locator("#rb-hood .rb-timeline .p-compute").count() > 10
    page.click("[data-act=measure]")
    page.wait_for_selector("text=full prefill, measured")
    page.screenshot(path=screenshots() / "hood-dark.png")


def test_history_can_be_edited_renamed_searched_exported_and_deleted(open_page, server) -> None:
    mine = open_page()
    page = mine.page
    mine.ask("When did the tramway open?")
    mine.expect(ANSWERS).to_have_count(1)
    with mine.answering():
        page.click("[data-act=regenerate]")
    mine.expect(ANSWERS).to_have_count(1)
    page.hover(".rb-turn.user")
    page.click("[data-act=edit-open]")
    page.fill(".rb-turn.user textarea", "Who designed the causeway?")
    page.evaluate("document.querySelector('.rb-turn.user form').remove()")  # as an answer's end draws it anew
    mine.expect(".rb-turn.user textarea").to_have_value("Who designed the causeway?")
    with mine.answering():
        page.click(".rb-turn.user form button[type=submit]")
    mine.expect(".rb-turn.user").to_have_text("Who designed the causeway?")
    mine.expect("#rb-transcript").not_to_contain_text("When did the tramway open?")
    page.hover(".rb-chat.current")
    page.click(".rb-chat.current [data-act=rename-open]")
    page.fill(".rb-chat input", "Masons <b>and</b> sea")
    page.press(".rb-chat input", "Enter")
    page.wait_for_selector(".rb-chat .title:has-text('Masons <b>and</b> sea')")
    page.keyboard.press("Escape")
    page.click(".rb-turn.answer")
    page.keyboard.press("/")
    page.keyboard.type("masons")
    page.wait_for_function("document.querySelectorAll('.rb-chat').length === 1")
    exported = page.request.get(server.address + page.get_attribute("#rb-export a >> nth=1", "href"))
    assert "Who designed the causeway?" in json.dumps(exported.json())
    page.hover(".rb-chat")
    page.click(".rb-chat [data-act=delete-chat]")  # and not confirmed
    page.wait_for_selector(".rb-chat [data-act=delete-chat].asking")
    page.wait_for_selector(".rb-chat [data-act=delete-chat].asking", state="detached")
    mine.confirm(".rb-chat [data-act=delete-chat]", ".rb-welcome")
    page.fill("#rb-chat-search input, #rb-chat-search textarea", "")
    page.wait_for_function("!document.querySelector('#rb-chats').textContent.includes('Masons')")


def test_stop_ends_the_search_or_the_answer_and_the_next_question_works(open_page, server) -> None:
    mine = open_page()
    page = mine.page
    mine.begin("Tell me everything about the tramway, its keepers and its bell.")
    page.wait_for_selector("#rb-stop")
    page.keyboard.press("Escape")
    page.wait_for_selector("#rb-transcript .rb-status:text-matches('Stopped|not answered')")
    page.wait_for_selector("#rb-send")
    mine.ask(QUESTION)
    mine.expect(f"{ANSWERS} >> nth=-1").to_contain_text("sources")
    mine.expect(".rb-turn.user").to_have_count(2)


def test_two_tabs_at_once_get_each_their_own_answer(open_page) -> None:
    first, second = open_page(), open_page()
    with first.answering(), second.answering():
        first.begin("What does the locomotive Dunlin burn?")
        second.begin("Who found the clapper of the bell?")
    for mine, asked in ((first, "Dunlin"), (second, "clapper")):
        mine.expect(".rb-turn.user").to_contain_text(asked)
        mine.expect(ANSWERS).to_have_count(1)


def test_two_methods_are_compared(open_page) -> None:
    mine = open_page()
    page = mine.page
    mine.tab("Compare")
    page.fill("#rb-compare-question textarea", QUESTION)
    page.click("#rb-compare-go")
    page.wait_for_function("document.querySelectorAll('.rb-sides section').length === 2")
    page.wait_for_selector("#rb-compare-stop", state="hidden")
    for said in ("Re-read what the question needs, adjust the rest (recommended), 25%", "6 May 1909"):
        mine.expect(".rb-sides").to_contain_text(said)
    page.screenshot(path=screenshots() / "compare.png")


@pytest.fixture(scope="module")
def uploads(tmp_path_factory):
    """One small file of each format; three of them hostile, one of them with a word that is nowhere else."""
    folder = tmp_path_factory.mktemp("uploads")
    (folder / "hostile.md").write_text("# Notes\n\n" + "\n\n".join(PRINTABLE))
    (folder / "hostile.html").write_text(
        f"<html><body>{' '.join(f'<p>{text}</p>' for text in PRINTABLE)}</body></html>"
    )
    (folder / "<img src=x onerror=alert(1)>.txt").write_text(
        "A file with a name. Hostile names hold hostile words."
    )
    (folder / "table.csv").write_text("engine,fuel\nDunlin,sawdust\nWhimbrel,battery\n")
    write_epub(
        folder / "kites.epub", [("a.xhtml", "Kites", "<p>Kites are flown from the mole on Sundays.</p>")]
    )
    for suffix in (".pdf", ".docx"):
        shutil.copy(
            next(path for path in samples.documents_folder().iterdir() if path.suffix == suffix),
            folder / f"copy{suffix}",
        )
    return sorted(folder.iterdir())


def test_uploads_are_inert(open_page, uploads) -> None:
    mine = open_page()
    page = mine.page
    mine.tab("Library")
    before = mine.changes()
    page.set_input_files("#rb-upload input[type=file]", [str(path) for path in uploads])
    page.wait_for_selector(f"#rb-library-message:has-text('{len(uploads)} files queued')")
    mine.all_read(before)
    copies = ".rb-documents tr:has(.where:text-is('a copy in the library')) .rb-state"
    mine.expect(copies).to_have_text(["ready"] * len(uploads))
    mine.tab("Chat")
    mine.ask("What do the hostile notes say about scripts, images and instructions?")
    page.click(".rb-sources summary")
    for number in range(page.locator(".rb-source").count()):
        page.click(f".rb-source >> nth={number}")
        page.wait_for_selector(f"#rb-source section[aria-label='Source {number + 1}']")
    assert mine.foreign == []


def test_without_a_model_the_page_says_so_and_stays_usable(start, open_page, tmp_path) -> None:
    (tmp_path / "none.gguf").write_bytes(b"GGUF")
    mine = open_page(start("--model", str(tmp_path / "none.gguf")))
    mine.page.wait_for_selector("#rb-banner .rb-note:has-text('none.gguf')")
    for name in ("Library", "Store", "Settings", "Compare", "Chat"):
        mine.tab(name)
    mine.page.click("#rb-mode label:has-text('Chat')")
    mine.begin("Anything?")
    mine.page.wait_for_selector("#rb-scroll .rb-note:has-text('none.gguf')")
    mine.page.wait_for_selector("#rb-send")


def reach(page, selector: str, backwards: bool = False) -> None:
    """Press Tab until the focus is on such an element, and see that one can see where it is."""
    for _ in range(80):
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            break
    else:
        raise AssertionError(f"80 steps of the Tab key never came to {selector}")
    outline = page.evaluate(
        "() => { const style = getComputedStyle(document.activeElement);"
        " return [style.outlineStyle, style.boxShadow, style.borderColor].join(' '); }"
    )
    assert not outline.startswith("none none"), f"{selector} does not show that it has the focus: {outline}"


def test_a_cited_answer_by_keyboard_alone(open_page) -> None:
    """Without a mouse, as the samples above: a suggested question, the answer, its citation, the marked sentence."""
    page = open_page().page
    page.wait_for_selector(".rb-welcome:has-text(' documents are ready.') .suggestion >> nth=2")
    reach(page, ".suggestion")
    asked = page.evaluate("document.activeElement.dataset.text")
    page.keyboard.press("Enter")
    page.wait_for_selector("#rb-transcript .rb-turn.answer .rb-cite")
    expect(page, ".rb-turn.user").to_contain_text(asked)
    page.focus("#rb-question textarea")
    reach(page, ".rb-cite", backwards=True)
    page.keyboard.press("Enter")
    page.wait_for_selector("#rb-source .rb-mark")


def test_on_a_telephone_source_and_conversations_cover_the_answer_until_they_are_closed(open_page) -> None:
    mine = open_page(width=390, height=844)
    page = mine.page
    mine.ask(QUESTION)
    page.click(".rb-text .rb-cite")
    expect(page, "#rb-source .rb-mark").to_be_in_viewport()
    page.keyboard.press("Escape")
    page.wait_for_selector("#rb-more", state="hidden")
    assert page.evaluate("document.activeElement.className").startswith("rb-cite"), "the focus goes back"
    page.click("[data-act=cover-side]")
    page.wait_for_selector("#rb-side .rb-chat")
    page.mouse.click(380, 400)  # beside them
    page.wait_for_selector("#rb-side", state="hidden")
    page.click("[data-act=cover-side]")
    page.click(".rb-chat-open >> nth=0")
    page.wait_for_selector("#rb-side", state="hidden")
