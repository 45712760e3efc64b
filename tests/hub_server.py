"""A hub on this machine: the few answers of huggingface.co that bringing a model here needs, over real HTTP."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "1" * 40


@contextmanager
def serve_hub(name, folder, hold_after=None):
    """Serve the folder as the model `name`; gives the server, with `url`, `asked` (paths) and `go_on`.

    hold_after: bytes of the largest file after which it waits until `go_on` is set.
    """
    files = {path.name: path for path in folder.iterdir() if path.is_file()}
    largest = max(files, key=lambda file: files[file].stat().st_size)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            server.asked.append(self.path)
            if self.path.startswith(f"/api/models/{name}/tree/"):
                rows = [
                    {"type": "file", "path": file, "oid": "2" * 40, "size": path.stat().st_size}
                    for file, path in files.items()
                ]
                self._answer_json(rows)
            elif self.path.startswith(f"/api/models/{name}"):
                siblings = [{"rfilename": file} for file in files]
                self._answer_json({"id": name, "sha": COMMIT, "siblings": siblings})
            else:
                self._answer_file(body=True)

        def do_HEAD(self):
            self._answer_file(body=False)

        def log_message(self, *_):
            pass

        def _answer_json(self, value):
            raw = json.dumps(value).encode()
            self._head(200, len(raw), {"Content-Type": "application/json"})
            self.wfile.write(raw)

        def _answer_file(self, body):
            found = re.fullmatch(rf"/{name}/resolve/[^/]+/(.+)", self.path)
            if not found or found[1] not in files:
                self._head(404, 0, {"X-Error-Code": "RepoNotFound"})
                return
            raw = files[found[1]].read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start = int(asked[1]) if asked else 0
            rest = {
                "ETag": f'"{hashlib.sha1(raw).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            if asked:
                rest["Content-Range"] = f"bytes {start}-{len(raw) - 1}/{len(raw)}"
            self._head(206 if asked else 200, len(raw) - start, rest)
            if not body:
                return
            if found[1] == largest and hold_after is not None and start < hold_after:
                self.wfile.write(raw[start:hold_after])
                self.wfile.flush()
                server.go_on.wait(120)
                start = hold_after
            with suppress(ConnectionError):  # who stopped it has hung up
                self.wfile.write(raw[start:])

        def _head(self, status, length, headers):
            self.send_response(status)
            for key, value in {**headers, "Content-Length": length}.items():
                self.send_header(key, str(value))
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.asked, server.go_on = [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
