"""Helpers: real servers in a thread or a process, and HTTP clients for them. Not a test file."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
from doubles import raising
from forked import start
from waiting import SOON_S

from ragblend.app.cli.main import main
from ragblend.app.serve.application import build
from ragblend.app.serve.keys import Authenticator, Client, Keys
from ragblend.app.serve.library import UPLOAD_PATH
from ragblend.app.serve.listening import UvicornServer, listening
from ragblend.app.serve.request_checks import Rules
from ragblend.app.services import AppServices
from ragblend.integrations.tools import AnswerFormat

LEDGER = (
    "The harbour master kept two ledgers in the tower. The first one named every ship that came in by night. "
    "The second one, which nobody was shown, named the ships that never left the harbour again."
)
LIGHT = (
    "The lamp of the lighthouse was lit by hand until the year of the great storm. A clockwork turned it after "
    "that, and the keeper wound the clockwork every four hours, whatever the weather was."
)
FAIL = raising(RuntimeError("gone"))
# A tool in OpenAI's form, and the schema of an answer.
HOIST = {
    "type": "function",
    "function": {
        "name": "hoist",
        "description": "A flag.",
        "parameters": {"type": "object", "properties": {"up": {"type": "boolean"}}, "required": ["up"]},
    },
}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}


class Served:
    """A running server. keys: by name; ada and bob have collections of their own."""

    def __init__(self, front, port, known):
        self.service, self.port, self.known, self.keys = front.service, port, known, {}
        self.url = f"http://127.0.0.1:{port}"

    def client(self, name="ada"):
        headers = {"authorization": f"Bearer {self.keys[name]}"} if name else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=SOON_S)

    @property
    def openai(self):
        """The arguments of OpenAI's client."""
        return {"base_url": f"{self.url}/v1", "api_key": self.keys["ada"]}

    @property
    def ollama_headers(self):
        """Nobody closes the frameworks' clients of Ollama's, so connections are not kept."""
        return {"authorization": f"Bearer {self.keys['ada']}", "connection": "close"}

    @contextmanager
    def failing(self, fail=FAIL):
        """The device fails at the next token; fail: called before each, and raises where it is to fail."""
        hook = self.engine.runtime.loaded.model.lm_head.register_forward_pre_hook(fail)
        try:
            yield
        finally:
            hook.remove()

    def add_key(self, name):
        """A key with a collection of its own."""
        self.service.app.workspaces.create(name)
        self.keys[name] = self.known.add(Client(name, (name,)))

    @property
    def engine(self):
        return self.service.app.workspaces.of("ada").engine

    def chat(self, text="Who built the lighthouse?", name="ada", **options):
        body = {"model": self.service.model, "messages": [{"role": "user", "content": text}], "max_tokens": 6}
        with self.client(name) as client:
            return client.post("/v1/chat/completions", json=body | options)

    def choice(self, *given, **options):
        """The only choice of a chat's answer."""
        [choice] = self.chat(*given, **options).json()["choices"]
        return choice

    def raw(self, method, path, body, *more):
        """A request's bytes, with further header lines."""
        sent = json.dumps(body).encode()
        lines = (
            f"{method} {path} HTTP/1.1",
            f"host: 127.0.0.1:{self.port}",
            "content-type: application/json",
            f"authorization: Bearer {self.keys['ada']}",
            f"content-length: {len(sent)}",
            *more,
        )
        return "\r\n".join([*lines, "", ""]).encode() + sent

    def is_free(self):
        """Nothing is under way any more: the device was given back."""
        with self.engine.runtime.queue.turn():
            return self.service.admission.inside == 0


@contextmanager
def serving(home, model, limits=None, origins=(), connections=None, **settings):
    services = AppServices.open(
        home, model=str(model), device="cpu", dtype="float32", chunk_tokens=64, **settings
    )
    known = Keys(services.workspaces.home.root)
    with services, listening("127.0.0.1", 0) as (address, at):
        port = address.port
        rules = Rules(address, UPLOAD_PATH, origins=origins)
        front = build(services, Authenticator(rules, known, needs_key=False), limits)
        ready = threading.Event()
        server = UvicornServer(front, ready.set, grace_s=5, limits=connections)
        thread = threading.Thread(target=server.run, args=([at],))
        thread.start()
        try:
            assert ready.wait(SOON_S)
            served = Served(front, port, known)
            served.keys["owner-key"] = known.add(Client("chief"))
            for name in ("ada", "bob"):
                served.add_key(name)
            services.start()
            yield served
        finally:
            server.should_exit = True
            thread.join(SOON_S)
            services.workspaces.of("ada").engine.close()
    assert not thread.is_alive()


@contextmanager
def eager_to_call():
    """The model calls a tool wherever it may, which a random one seldom does by itself."""
    plain = AnswerFormat.grammar

    def forced(answer_format, engine):
        is_forced = bool(answer_format.tools)
        return plain(replace(answer_format, is_forced=is_forced, is_parallel=not is_forced), engine)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AnswerFormat, "grammar", forced)
        yield


def _printing(output, words):
    os.dup2(output.fileno(), 1)
    sys.exit(main(words))


@contextmanager
def forked(*words):
    """A command in a forked process, seconds faster than a new one; gives the first JSON that it prints."""
    here, there = socket.socketpair()
    process = start(_printing, there, words)
    there.close()
    try:
        with here, here.makefile() as output:
            yield json.loads(output.readline()), process
    finally:
        process.kill()
        process.join()


@contextmanager
def running(home, *options):
    """The server in a new process, as users start it; gives what it printed when it was ready."""
    words = ["serve", "--home", str(home), "--port", "0", "--json"]
    command = [sys.executable, "-m", "ragblend.app.cli.main", *words]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline()), process
    finally:
        process.kill()
        process.communicate()


def post_raw(client, path, content):
    """Post bytes as they are, as JSON."""
    return client.post(path, content=content, headers={"content-type": "application/json"})


def events(response):
    """The values of a stream, which must have ended as streams end."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
