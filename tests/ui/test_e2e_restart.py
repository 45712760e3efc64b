"""An open page while its server is killed and restarted on the same port."""

import pytest
from browser import ANSWERS, WAIT_MS, expect

ASKED = "What did the harbour master keep?"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def open_plainly(chromium):
    """A page without the watch that nothing fails: here the server goes away under it."""
    contexts = []

    def open_(server):
        contexts.append(chromium.new_context())
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(server.url)
        page.wait_for_selector("#rb-hello .rb-welcome")
        return page

    yield open_
    for context in contexts:
        context.close()


def again(start, running, *options):
    """The server killed, and another one in its place."""
    running.kill()
    return start("--port", running.address.rpartition(":")[2], *options)


def test_page_survives_a_restart_until_the_link_changes(start, open_plainly) -> None:
    running = start()
    page = open_plainly(running)
    page.fill("#rb-question textarea", ASKED)
    page.press("#rb-question textarea", "Control+Enter")
    page.wait_for_selector(ANSWERS)
    page.wait_for_selector("#rb-live .rb-turns", state="detached")
    page.fill("#rb-question textarea", "Half a question")
    page.evaluate("window.isOld = true")
    second = again(start, running)
    assert second.url != running.url  # the link is another one, and this browser does not need it
    page.wait_for_function("!window.isOld")
    expect(page, "#rb-question textarea").to_have_value("Half a question")
    page.wait_for_selector(f"#rb-transcript .rb-turn.user:has-text('{ASKED}')")
    page.press("#rb-question textarea", "Control+Enter")
    expect(page, ANSWERS).to_have_count(2)
    expect(page, ".rb-chat").to_have_count(1)
    page.fill("#rb-question textarea", "Half of another")
    third = again(start, second, "--new-link")
    expect(page, "#rb-new-link[role=alert]").to_contain_text("open the new link")
    expect(page, "#rb-question textarea").to_have_value("Half of another")
    page.goto(third.url)
    page.wait_for_selector("#rb-hello .rb-welcome")
    expect(page, "#rb-new-link").to_have_count(0)
