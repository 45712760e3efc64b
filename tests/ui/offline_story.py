"""The whole flow where there is no network; prints what left and what was answered. Run by test_offline.py.

argv is HOME FOLDER NOTES. It runs in a network namespace that has nothing but loopback. The kernel counts there every
packet and every connection that finds no route, whichever process and library made it.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from browser import Server, Watched, find_chromium

QUESTION = "What did the harbour master of Lantern Quay keep?"
# Chromium asks its maker for updates and the like, which is none of the page's doing and cannot all be switched off. So
# while it runs, what counts is what the page's own process asks Python's sockets for.
QUIET = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
HOOK = """
import sys
def note(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        with open({log!r}, "a") as file:
            print(event, arguments[0] if event.endswith("addrinfo") else arguments[1], file=file)
sys.addaudithook(note)
"""


def attempts() -> int:
    """How often something was sent, or was to be connected, to where no route leads, in IPv4 and IPv6."""
    names, values = [
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Ip:")
    ]
    six = dict(line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())
    return int(dict(zip(names, values, strict=True))["OutNoRoutes"]) + int(six["Ip6OutNoRoutes"])


def command(*words: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "ragblend.app.cli.main", *words, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


def watch_sockets(folder: Path) -> Path:
    """Have every Python that is started from now on write down whom it asks for; returns the file of that."""
    log = folder / "asked.txt"
    (folder / "sitecustomize.py").write_text(HOOK.format(log=str(log)))
    os.environ["PYTHONPATH"] = str(folder)
    subprocess.run([sys.executable, "-c", "import socket; socket.getaddrinfo('localhost', 1)"], check=True)
    return log


def through_the_page(server: Server, folder: Path) -> str:
    from playwright.sync_api import sync_playwright

    try:
        with sync_playwright() as play:
            arguments = ["--no-sandbox", "--disable-gpu", QUIET]
            browser = play.chromium.launch(executable_path=find_chromium(), headless=True, args=arguments)
            mine = Watched(browser.new_context(), server)
            mine.tab("Library")
            (folder / "second.txt").write_text(
                "The second ledger of Lantern Quay named what the ships had carried."
            )
            mine.all_encoded(mine.add(folder))
            mine.tab("Chat")
            mine.ask(QUESTION)
            answer = mine.page.inner_text("#rb-transcript .rb-turn.answer .rb-sources summary")
            mine.leave()
            browser.close()
            return answer
    finally:
        server.end()


def story(home: Path, folder: Path, notes: Path) -> dict[str, object]:
    log = watch_sockets(notes)
    command("ingest", str(folder), "--home", str(home))
    answer = json.loads(command("ask", QUESTION, "--home", str(home)))
    server = Server(home)
    left = attempts()
    with contextlib.suppress(OSError):
        socket.create_connection(("192.0.2.1", 80), 1)  # the count must count
    counted = attempts() - left
    said = through_the_page(server, folder)
    asked = sorted(set(log.read_text().splitlines()))
    return {
        "page": said,
        "sources": len(answer["sources"]),
        "attempts": left,
        "counted": counted,
        "asked": asked,
    }


if __name__ == "__main__":
    print(json.dumps(story(*map(Path, sys.argv[1:]))))
