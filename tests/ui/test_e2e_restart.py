"""A page that is open while the server is killed and started again on the same port."""

import pytest

ASKED = "What did the harbour master keep?"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def open_plainly(chromium):
    """A page without the watch that nothing fails: here the server goes away under it."""
    contexts = []

    def open_(server):
        contexts.append(chromium.new_context())
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)
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


def test_it_goes_on_with_its_conversation_and_what_was_typed_until_the_link_is_another(
    start, open_plainly
) -> None:
    running = start()
    page = open_plainly(running)
    page.fill("#rb-question textarea", ASKED)
    page.press("#rb-question textarea", "Control+Enter")
    page.wait_for_selector("#rb-transcript .rb-turn.answer")
    page.fill("#rb-question textarea", "Half a question")
    page.evaluate("window.isOld = true")
    second = again(start, running)
    assert second.url != running.url  # the link is another one, and this browser does not need it
    page.wait_for_function("!window.isOld")
    page.wait_for_function("document.querySelector('#rb-question textarea')?.value === 'Half a question'")
    page.wait_for_selector(f"#rb-transcript .rb-turn.user:has-text('{ASKED}')")
    page.press("#rb-question textarea", "Control+Enter")
    page.wait_for_function("document.querySelectorAll('#rb-transcript .rb-turn.answer').length === 2")
    assert page.locator(".rb-chat").count() == 1
    page.fill("#rb-question textarea", "Half of another")
    third = again(start, second, "--new-link")
    note = page.wait_for_selector("#rb-new-link[role=alert]")
    assert "Open the new link" in note.inner_text()
    assert page.input_value("#rb-question textarea") == "Half of another"
    page.goto(third.url)
    page.wait_for_selector("#rb-hello .rb-welcome")
    assert page.locator("#rb-new-link").count() == 0
