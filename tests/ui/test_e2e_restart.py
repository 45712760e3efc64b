"""An open page while its server is killed and restarted on the same port."""

import pytest
from browser import ANSWERS, expect

ASKED = "What did the harbour master keep?"
pytestmark = pytest.mark.timeout(600)


def again(start, running, *options):
    """The server killed, and another one in its place."""
    running.kill()
    return start("--port", running.address.rpartition(":")[2], *options)


def test_page_survives_a_restart_until_the_link_changes(start, open_page) -> None:
    running = start()
    mine = open_page(running, checked=False)
    page = mine.page
    mine.ask(ASKED)
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
