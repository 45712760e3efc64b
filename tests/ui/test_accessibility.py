"""Accessibility of every view, light and dark, wide and narrow: it fits, and axe finds nothing serious."""

import pytest
from browser import Server

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")

HARBOUR = "The harbour master of Lantern Quay kept two ledgers of ships. "
QUIET = "*, *::before, *::after { animation: none !important; transition: none !important; }"
pytestmark = pytest.mark.timeout(900)


class Judge:
    """Collects what axe finds serious in one view after the other."""

    def __init__(self, page) -> None:
        self._page, self.found = page, set()

    def look(self, view: str) -> None:
        self._fits(view)
        self._page.add_style_tag(content=QUIET)  # a colour on its way to another one is neither
        for each in axe.Axe().run(self._page).response["violations"]:
            if each["impact"] in ("serious", "critical"):
                nodes = [node["html"][:160] for node in each["nodes"][:3]]
                self.found.add((view, each["id"], each["help"], *nodes))

    def _fits(self, view: str) -> None:
        """A moment may pass until what was drawn has been laid out."""
        from playwright.sync_api import TimeoutError as TooWide

        root = "document.documentElement"
        try:
            self._page.wait_for_function(f"{root}.scrollWidth <= {root}.clientWidth")
        except TooWide:
            widths = self._page.evaluate(f"[{root}.scrollWidth, {root}.clientWidth]")
            raise AssertionError(f"{view} is wider than its window: {widths}") from None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harbour")
    (folder / "harbour.txt").write_text(HARBOUR * 100)  # more than its frame shows
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 and then nothing that a reader knows")
    return folder


@pytest.fixture(scope="module")
def server(new_home):
    """Empty for the first look; for the second it has what the first one put there."""
    running = Server(new_home("max_new_tokens = 24\n"))
    yield running
    running.end()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_no_view_has_a_serious_finding(open_page, folder, scheme, width) -> None:
    mine = open_page(width=width, height=844, color_scheme=scheme)
    page, judge = mine.page, Judge(mine.page)
    judge.look("welcome")
    shown = [page.locator(part).is_visible() for part in ("#rb-middle", "#rb-side", "#rb-more")]
    assert shown == [True, width > 390, width > 390], "a telephone shows the conversation alone"
    page.keyboard.press("Escape")  # leaves the field
    page.locator("body").press("?")
    judge.look("keys")
    page.keyboard.press("Escape")
    mine.tab("Library")
    mine.all_encoded(mine.add(folder, watch=True))  # what is drawn anew closes what is opened here
    page.click(".rb-jobs summary")
    page.click("#rb-document-state input")
    page.wait_for_selector("[role=option]:has-text('Failed')")
    judge.look("library, a list open")
    page.keyboard.press("Escape")
    page.click("[data-act=delete-document] >> nth=0")
    judge.look("library, asked whether to delete")
    page.wait_for_selector("[data-act=delete-document].asking", state="detached")
    mine.confirm(".rb-documents tr:has-text('broken') [data-act=delete-document]", "#rb-deleted .rb-note")
    judge.look("library, deleted")
    mine.press("#rb-deleted [data-act=undo-delete]", ".rb-documents tr:has-text('broken')")
    mine.tab("Chat")
    mine.ask("What did the harbour master of Lantern Quay keep?")
    page.click(".rb-sources summary")
    page.click(".rb-source")
    page.wait_for_selector("#rb-source .rb-mark")
    judge.look("answer and source")
    page.click("#rb-source [data-act=view]")
    page.wait_for_selector(".rb-viewer .rb-mark")
    judge.look("viewer")
    page.keyboard.press("Escape")
    mine.uncover()
    page.click(".rb-button.chip")
    page.wait_for_selector("#rb-hood .rb-bar")
    page.click(".rb-table summary")
    judge.look("under the hood")
    mine.uncover()
    page.hover(".rb-turn.user")
    page.click("[data-act=edit-open]")
    if width == 390:
        page.click("[data-act=cover-side]")
    page.hover(".rb-chat")
    page.click("[data-act=rename-open]")
    judge.look("editing, renaming")
    mine.uncover()
    mine.tab("Compare")
    page.fill("#rb-compare-question textarea", "What did the harbour master keep?")
    page.click("#rb-compare-go")
    page.wait_for_function("document.querySelectorAll('.rb-sides section').length === 2")
    page.wait_for_selector("#rb-compare-stop", state="hidden")
    judge.look("compare")
    mine.tab("Store")
    page.wait_for_selector(".rb-tier")
    page.click("#rb-check")
    page.wait_for_selector("#rb-store-message:has-text('No problems found')")
    judge.look("store")
    mine.tab("Settings")
    page.fill("#rb-model input, #rb-model textarea", "/no/such/model")
    mine.press("#rb-save", "#rb-saved .rb-note.error")
    page.fill("#rb-top-k input[type=number]", "")
    page.wait_for_selector("#rb-trouble .rb-note:has-text('Passages per question')")
    judge.look("settings with errors")
    page.click("#rb-trouble button")
    page.wait_for_selector("#rb-trouble .rb-note", state="detached")
    assert judge.found == set()
