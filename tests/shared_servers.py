"""Real servers for the tests of the shared store, each a process of its own, and a proxy that spoils what passes."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

KINDS = ("redis", "s3", "file")
BEGINNING_S = 60.0  # that a server may take on a busy machine


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        return int(found.getsockname()[1])


def _ended(server: subprocess.Popen) -> None:
    server.kill()
    server.wait()


def _await_port(port: int, server: subprocess.Popen) -> None:
    give_up = time.monotonic() + BEGINNING_S
    while True:
        with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), 1.0)):
            return
        assert server.poll() is None, f"the server ended with {server.returncode}"
        assert time.monotonic() < give_up, "the server did not begin"
        time.sleep(0.02)


class Redis:
    """Debian's redis-server on a port of its own, with nothing on the disk. Skips where there is none."""

    def __init__(self, *arguments: str, port: int | None = None) -> None:
        command = shutil.which("redis-server") or shutil.which("valkey-server")
        if command is None:
            pytest.skip("no redis-server: apt-get install redis-server")
        self.port, self._arguments, self._command = port or free_port(), arguments, command
        self.begin()

    def begin(self) -> None:
        line = [
            self._command,
            "--port",
            str(self.port),
            "--save",
            "",
            "--appendonly",
            "no",
            "--bind",
            "127.0.0.1",
        ]
        self._process = subprocess.Popen([*line, *self._arguments], stdout=subprocess.DEVNULL)
        _await_port(self.port, self._process)

    def end(self) -> None:
        _ended(self._process)

    def url(self, port: int | None = None) -> str:
        return f"redis://127.0.0.1:{port or self.port}/0"

    def client(self, **more):
        import redis

        return redis.Redis(port=self.port, **more)


class Names:
    """What lies in a shared store under its names, seen and changed past RAGBlend."""

    def names(self) -> list[str]:
        raise NotImplementedError

    def get(self, name: str) -> bytes:
        raise NotImplementedError

    def set(self, name: str, content: bytes) -> None:
        raise NotImplementedError


class RedisNames(Names):
    def __init__(self, redis: Redis, **more) -> None:
        self._client = redis.client(**more)

    def names(self):
        return sorted(key.decode() for key in self._client.keys("*"))

    def get(self, name):
        return self._client.get(name)

    def set(self, name, content):
        self._client.set(name, content)


class Files(Names):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self):
        found = (path for path in self._folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self._folder)) for path in found)

    def get(self, name):
        return (self._folder / name).read_bytes()

    def set(self, name, content):
        (self._folder / name).write_bytes(content)

    def age(self, name: str, seconds: float) -> None:
        """As if it had been written so long ago."""
        then = time.time() - seconds
        os.utime(self._folder / name, (then, then))


class Bucket(Names):
    def __init__(self, endpoint: str, name: str) -> None:
        import boto3

        self._client, self._name = boto3.client("s3", endpoint_url=endpoint), name
        self._client.create_bucket(Bucket=name)

    def names(self):
        return sorted(
            each["Key"] for each in self._client.list_objects_v2(Bucket=self._name).get("Contents", ())
        )

    def get(self, name):
        return self._client.get_object(Bucket=self._name, Key=name)["Body"].read()

    def set(self, name, content):
        self._client.put_object(Bucket=self._name, Key=name, Body=content)


class Shared:
    """One shared store of a kind: its URL, its names, and the port of its server."""

    def __init__(self, kind: str, url: str, names: Names, port: int | None) -> None:
        self.kind, self.url, self.names, self.port = kind, url, names, port


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """moto's server, a process of its own."""
    pytest.importorskip("moto", reason="moto[s3] is not installed")
    pytest.importorskip("flask_cors", reason="flask-cors is not installed")
    port = free_port()
    line = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "import sys; from moto.server import main; main(sys.argv[1:])",
    ]
    with Path(os.devnull).open("w") as nowhere:
        server = subprocess.Popen([*line, "-p", str(port)], stdout=nowhere, stderr=nowhere)
    try:
        _await_port(port, server)
        yield port
    finally:
        _ended(server)


@pytest.fixture
def redis_server():
    """redis_server(*arguments): a new one, ended with the test."""
    begun: list[Redis] = []

    def begin(*arguments: str) -> Redis:
        begun.append(Redis(*arguments))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


@pytest.fixture
def shared_of(request, tmp_path, monkeypatch):
    """shared_of(kind): an empty shared store of that kind."""

    def make(kind: str) -> Shared:
        if kind == "redis":
            redis = request.getfixturevalue("redis_server")()
            return Shared(kind, redis.url(), RedisNames(redis), redis.port)
        if kind == "file":
            folder = tmp_path / "share"
            folder.mkdir()
            return Shared(kind, f"file://{folder}", Files(folder), None)
        port = request.getfixturevalue("s3_port")
        endpoint, bucket = f"http://127.0.0.1:{port}", f"bucket-{os.urandom(6).hex()}"
        for name, text in {
            "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "a-secret-of-aws", "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, text)
        return Shared(kind, f"s3://{bucket}/some/prefix", Bucket(endpoint, bucket), port)

    return make


class Proxy:
    """Passes bytes on to a port of this machine; from the server's side so many, no more, or slowly.

    passed: bytes that went to the client. most: after which nothing comes any more; bytes_per_s: of all connections
    together; cuts: whether connections end behind `most`; connections: how many were made.
    """

    def __init__(
        self,
        port: int,
        most: int | None = None,
        bytes_per_s: float | None = None,
        cuts: bool = False,
    ) -> None:
        self._cuts, self._target, self.most, self.bytes_per_s = cuts, port, most, bytes_per_s
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port, self.passed, self.connections = self._listening.getsockname()[1], 0, 0
        self._is_cut = False
        self._lock, self._open, self._ended = threading.Lock(), list[socket.socket](), threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                if self._is_cut:
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self.connections += 1
            self._open += [client, server]
            for way in ((client, server, False), (server, client, True)):
                self._threads.append(threading.Thread(target=self._pass, args=way))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if is_answer and not self._allow(len(data)):
                    if not self._cuts:
                        self._ended.wait()
                    break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _allow(self, nbytes: int) -> bool:
        with self._lock:
            if self.bytes_per_s is not None:
                self._ended.wait(nbytes / self.bytes_per_s)
            if self.most is not None and self.passed + nbytes > self.most:
                return False
            self.passed += nbytes
            return True

    def cut(self) -> None:
        """Break all connections, and each new one until `mend`."""
        self._is_cut = True
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut = False

    def end(self) -> None:
        self._ended.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for each in (self._listening, *self._open):
            each.close()


@contextmanager
def proxy_to(port: int, **more) -> Iterator[Proxy]:
    proxy = Proxy(port, **more)
    try:
        yield proxy
    finally:
        proxy.end()
