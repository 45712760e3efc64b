"""The request filter: functions called with values that name files read nothing outside, and nothing breaks."""

import asyncio
import os
import threading

import httpx
import pytest
from waiting import SOON_S

pytest.importorskip("gradio", reason="the page needs the extra `ui`")

import gradio as gr
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from ragblend.app.serve.listening import UvicornServer, listening
from ragblend.app.serve.request_checks import Rules
from ragblend.app.services import AppServices
from ragblend.ui.login import PageLogin
from ragblend.ui.page_context import PageContext
from ragblend.ui.request_filter import RequestFilter
from ragblend.ui.serving import build_app, gradio_environment

CANARY = "canary-4711-of-another-folder"
SESSION = "abc123xyz"
META = {"_type": "gradio.FileData"}
CALLS = ("/gradio_api/queue/join", "/gradio_api/run/predict")
pytestmark = pytest.mark.timeout(300)


class Page:
    """The real page on a real port, and what lies around it."""

    def __init__(self, home, folder, app, port, login, outside):
        self.home, self.folder, self.app, self.port, self.outside = home, folder, app, port, outside
        cookies = {login.cookie_name: login.new_cookie()}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", cookies=cookies, timeout=SOON_S)
        self.other = {"cookie": f"{login.cookie_name}={login.new_cookie()}"}
        self.functions = app._app._page.fns

    def number(self, name):
        return next(number for number, each in self.functions.items() if each.name == name)

    def call(self, number, data, event=None, path=None, **more):
        """The answer's status and text; a queued function's events too."""
        body = {"data": data, "event_data": event, "fn_index": number, "session_hash": SESSION, **more}
        path = path or CALLS[0 if self.functions[number].queue else 1]
        answer = self.http.post(path, json=body)
        text = answer.text
        if answer.status_code == 200 and "event_id" in text:
            text += self.http.get("/gradio_api/queue/data", params={"session_hash": SESSION}).text
        return answer.status_code, text

    def upload(self, name, content, **more):
        answer = self.http.post("/gradio_api/upload", files={"files": (name, content)}, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()[0]

    def kept(self):
        """Every file below the folder that Gradio serves from."""
        return {path for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "canary.txt").write_text(CANARY)
    home = tmp_path_factory.mktemp("gate") / "home"
    with (
        AppServices.open(home) as services,
        gradio_environment(home) as folder,
        listening("127.0.0.1", 0) as (address, at),
    ):
        port = address.port
        login = PageLogin(port, secret=b"s" * 32)
        built = {}

        def serve():
            async def go():
                built["app"] = build_app(
                    PageContext(services), Rules(address, max_upload_bytes=100_000), login
                )
                built["server"] = UvicornServer(built["app"], ready.set, grace_s=1)
                await built["server"].serve([at])

            asyncio.run(go())

        ready = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        assert ready.wait(SOON_S)
        running = Page(home, folder, built["app"], port, login, outside)
        yield running
        running.http.close()
        built["server"].should_exit = True
        thread.join(SOON_S)


def forms(page):
    """Twenty ways to name what is no business of the visitor's. Who opens the pipe never comes back."""
    canary, linked, pipe = str(page.outside / "canary.txt"), page.folder / "linked.txt", page.outside / "pipe"
    linked.symlink_to(canary)
    os.mkfifo(pipe)
    file = {"path": canary, "meta": META}
    foreign = page.upload("foreign.txt", b"of somebody else", headers=page.other)
    steps = f"{page.folder}/../../../../../../../../../..{canary}"
    return {
        "file": file,
        "file in a list": [file],
        "file in a dict in a list": [{"value": [{"deeper": file}]}],
        "file with a url": {**file, "url": f"/gradio_api/file={canary}", "orig_name": "a.txt"},
        "url alone": {"url": f"file://{canary}", "meta": META},
        "address for a path": {"path": f"http://127.0.0.1:{page.port}/gradio_api/app_id", "meta": META},
        "file scheme for a path": {"path": f"file://{canary}", "meta": META},
        "library": {"path": str(page.home / "library.sqlite"), "meta": META},
        "relative path": {"path": os.path.relpath(canary), "meta": META},
        "steps upwards": {"path": steps, "meta": META},
        "link": {"path": str(linked), "meta": META},
        "stream": {**file, "is_stream": True},
        "pipe": {"path": str(pipe), "meta": META},
        "device": {"path": "/dev/null", "meta": META},
        "folder": {"path": str(page.outside), "meta": META},
        "no meta": {"path": canary},
        "meta that is a text": {"path": canary, "meta": "gradio.FileData"},
        "another type": {"path": canary, "meta": {"_type": "gradio.fileData"}},
        "picture of svg": {"path": "/x.svg", "meta": META, "mime_type": "image/svg+xml"},
        "of another visitor": {"path": foreign, "meta": META},
        "with a component's update": {"__type__": "update", "value": file},
    }


def plain(component):
    """A value that the page itself might send."""
    match component:
        case gr.Checkbox():
            return False
        case gr.Slider():
            return component.minimum
        case gr.Dropdown(multiselect=True):
            return []
        case gr.File() | gr.State() | gr.Dropdown() | gr.Radio():
            return None
        case _:
            return ""


def callable_functions(page):
    return [number for number, function in page.functions.items() if function.fn is not None]


def test_no_function_reads_a_file_that_was_not_uploaded(page) -> None:
    tried = forms(page)
    assert len(tried) >= 20
    before = page.kept()
    wrong = []
    for number in callable_functions(page):
        values = [plain(each) for each in page.functions[number].inputs]
        for turn, (name, form) in enumerate(tried.items()):
            # Each of its inputs in turn, and what the event carries.
            place = (turn + number) % (len(values) + 1)
            data = [form if n == place else value for n, value in enumerate(values)]
            status, text = page.call(number, data, form if place == len(values) else None)
            if status != 422 or CANARY in text or "SQLite format" in text:
                wrong.append((number, name, place, status, text[:100]))
    assert not page.kept() - before
    assert not wrong, (len(wrong), wrong[:20])


def test_gradio_checks_too_which_files_a_call_names(page) -> None:
    """Also without the filter: unless a mounted page counts as launched, Gradio copies any file that a call names."""
    path = str(page.outside / "canary.txt")
    number = page.number("create")
    body = {"data": [{"path": path, "meta": META}], "fn_index": number, "session_hash": SESSION}

    async def ask():
        transport = httpx.ASGITransport(app=page.app._app.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.post(CALLS[1], json=body)

    before = page.kept()
    assert asyncio.run(ask()).status_code == 500
    assert page.kept() == before


def test_uploaded_file_is_accepted(page) -> None:
    number = page.number("upload")
    path = page.upload("mine.txt", b"Seven grey seals lie on the sand.")
    file = {"path": path, "url": f"http://x/gradio_api/file={path}", "orig_name": "mine.txt", "meta": META}
    status, text = page.call(number, [[file], "default", "", "", None])
    assert status == 200, text
    assert not os.path.exists(path)  # the library has it
    assert page.call(number, [[file], "default", "", "", None])[0] == 422


BAD_BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "half a character": b'{"data": ["\xff"]}',
    "half a surrogate": b'{"data": ["\\ud800"]}',
    "no number": b'{"data": [NaN], "fn_index": 1, "session_hash": "abc"}',
    "endless number": b'{"data": [], "fn_index": 1e999, "session_hash": "abc"}',
    "huge number": b'{"data": [], "fn_index": 1' + b"0" * 5000 + b"}",
    "deep lists": b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"data": [' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"]}",
    "a list": b"[]",
    "a text": b'"data"',
    "a long text": b'{"data": ["' + b"a" * 1_000_000 + b'"], "fn_index": 1, "session_hash": "abc"}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_invalid_call_is_refused_in_one_line(page, name, capfd, caplog) -> None:
    for path in CALLS:
        answer = page.http.post(path, content=BAD_BODIES[name], headers={"content-type": "application/json"})
        assert answer.status_code == 422, path
        assert len(answer.content) < 300
    assert len(caplog.records) == 2
    assert all(len(record.getMessage()) < 200 for record in caplog.records)
    assert "Traceback" not in capfd.readouterr().err


def test_wrong_numbers_names_and_lengths_are_refused(page) -> None:
    function, queued, slider = (page.number(name) for name in ("create", "send", "set_budget"))
    good = {"data": ["x"], "fn_index": function, "session_hash": SESSION}
    wrong = [
        *({"fn_index": value} for value in (-1, 10**6, 10**30, "1", 1.0, True, None, [1], {})),
        *({"session_hash": value} for value in (None, "", 5, "../x", "a" * 100, "A", ["a"], "a\n")),
        *({"data": value} for value in (None, [], ["x", "y"], {}, "x", 1, [5], [True], [["x"]], [{}])),
        *({"trigger_id": value} for value in ("1", 1.5, True, [1])),
        *({"event_data": value} for value in ("x", [1], {"a": {"b": 1}}, {"a": [1]}, {"a": "x" * 200_000})),
        *({"fn_index": slider, "data": [value]} for value in ("5", True, [5], {}, "NaN")),
        {"fn_index": queued, "data": ["", None, [], "documents"]},  # through the other way in
    ]
    for change in wrong:
        answer = page.http.post(CALLS[1], json=good | change)
        assert answer.status_code == 422, change
    doubled = f'{{"data": ["x"], "data": [{{"path": "/x"}}], "fn_index": {function}, "session_hash": "abc"}}'
    endless = f'{{"data": [1e999], "fn_index": {slider}, "session_hash": "abc"}}'
    for body in (doubled, endless):
        assert page.http.post(CALLS[1], content=body).status_code == 422


NOT_NEEDED = [
    "file=/x", "file/x", "proxy=http://127.0.0.1:22/", "stream/abc/1/1/playlist.m3u8", "api/create",
    "call/create", "call/v2/create", "run/create", "component_server", "cancel", "reset", "info",
    "queue/status", "custom_component/a/b/c/d", "dev/reload", "vibe-edit", "vibe-code", "process_recording",
    "runs", "heartbeat/..", "heartbeat/A", "startup-events", "token", "user", "login_check", "upload",
    "queue/join",
]  # fmt: skip


def test_routes_that_the_page_does_not_need_are_closed(page) -> None:
    """Gradio has more than fifty routes; the page asks at a dozen."""
    for path in NOT_NEEDED:
        posts = path not in ("upload", "queue/join")
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", *(["POST"] if posts else [])):
            assert page.http.request(method, f"/gradio_api/{path}").status_code == 404, (method, path)
    for other in ("/config", "/monitoring", "/login_check", "/svelte/x", "/gradio_api", "/manifest.json"):
        assert page.http.get(other).status_code == 404


FORM, FIELD = "multipart/form-data", 'Content-Disposition: form-data; name="files"'


def part(header, rest="x\r\n--a--\r\n"):
    return f"--a\r\n{header}\r\n\r\n{rest}".encode(), f"{FORM}; boundary=a"


BAD_UPLOADS = {
    "no form": (b"x", "text/plain"),
    "no boundary": (b"x", FORM),
    "another boundary": (b"--a\r\n\r\n--a--", f"{FORM}; boundary=b"),
    "a text for a file": part(FIELD),
    "cut off": part(f'{FIELD}; filename="x"', "half"),
    "a name with steps": part(f'{FIELD}; filename=".."'),
    "no disposition": part("X: y"),
}


@pytest.mark.parametrize("name", BAD_UPLOADS)
def test_a_bad_upload_is_the_senders_fault_and_no_traceback(page, name, capfd) -> None:
    content, kind = BAD_UPLOADS[name]
    answer = page.http.post("/gradio_api/upload", content=content, headers={"content-type": kind})
    assert 400 <= answer.status_code < 500 or answer.json() == [], answer.text
    assert "Traceback" not in capfd.readouterr().err


def test_an_upload_that_is_answered_in_plain_text_is_no_error_of_ours() -> None:
    """The answer was sent, and then it was refused as no JSON."""
    refusing = RequestFilter(PlainTextResponse("Too much.", 413), None)
    client = TestClient(refusing)
    assert client.post("/gradio_api/upload").text == "Too much."


def test_stream_of_a_closed_page_ends(page, capfd) -> None:
    answer = page.http.get("/gradio_api/queue/data", params={"session_hash": "nobody"})
    assert "session_not_found" in answer.text
    assert "Traceback" not in capfd.readouterr().err
