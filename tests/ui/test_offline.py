"""The page works without a network, and contacts no address but loopback."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LOOPBACK = re.compile(r" localhost$| 127\.0\.0\.1$|\('127\.0\.0\.1', |\('::1', | /|\(0, \d+\)$")
STORY = Path(__file__).parent / "offline_story.py"
ALONE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "alone"]


@pytest.mark.timeout(600)
def test_ingest_ask_and_page_without_a_network(tmp_path, tiny_folder, browser_path) -> None:
    """With nothing but loopback, by the kernel's own count and by what Python's sockets were asked."""
    pytest.importorskip("gradio", reason="the page needs the extra `ui`")
    pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("a network namespace needs unshare(1), ip(8) and the right to make one")
    (home := tmp_path / "home").mkdir(mode=0o700)
    (home / "settings.toml").write_text(f'model = "{tiny_folder}"\nmax_new_tokens = 16\n')
    (folder := tmp_path / "harbour").mkdir()
    (notes := tmp_path / "notes").mkdir()
    (folder / "harbour.txt").write_text("The harbour master of Lantern Quay kept two ledgers of ships.")
    ran = subprocess.run(
        [*ALONE, sys.executable, str(STORY), str(home), str(folder), str(notes)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(STORY.parents[1])},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout)
    assert told["counted"] == 1
    assert told["attempts"] == 0
    assert told["sources"] == 1
    assert told["page"].startswith("2 ")
    assert "socket.getaddrinfo localhost" in told["asked"]  # the notes were taken
    assert [line for line in told["asked"] if not LOOPBACK.search(line)] == []
