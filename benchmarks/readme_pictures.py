"""Takes the README's two pictures: the output of `ragblend demo`, and the page with one cited answer.

    python -m benchmarks.readme_pictures             # into docs/pictures/: demo.svg and page.png

Both are real: the command runs as a process, the page in the system's Chromium. Without --home the home is a new one;
with a home whose model is already converted it is faster.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.common import DOCS, AnyHome, run, run_server

PICTURES = DOCS / "pictures"
COLUMNS = 100
QUESTION = "When did the Thornsay Causeway Tramway open?"
WARM_UP = "What is the cat in the engine shed called?"  # the first answer also loads the model
SOURCE = "visitor-guide.html"
RAGBLEND = Path(sys.executable).parent / "ragblend"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 240_000


def demo_picture(home: Path) -> None:
    """`make demo`, up to the list of sources."""
    command: list[str | Path] = [RAGBLEND, "demo", "--home", home]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"COLUMNS": str(COLUMNS)}
    )
    shown = done.stdout.strip().partition("\nNext:")[0]
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text("$ make demo", style="bold green"), end="\n\n")
    for line in shown.splitlines():
        is_bold = line.startswith(("Full prefill", "Fused", "The fused one", "Question"))
        console.print(Text(line, style="bold" if is_bold else ""), soft_wrap=False)
    # rich links a font from another host, which our pages must not load.
    drawn = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="ragblend demo"), flags=re.DOTALL)
    (PICTURES / "demo.svg").write_text(drawn.replace("Fira Code, monospace", "monospace"), encoding="utf-8")


def page_picture(home: Path) -> None:
    """Take the page with the samples, one answer with its citation, and the cited source."""
    from playwright.sync_api import sync_playwright

    browser = next(path for name in BROWSERS if (path := shutil.which(name)))
    with run_server("ui", "--no-browser", "--home", home) as (_, ready), sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = window.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(WAIT_MS)
        page.goto(ready["url"])
        page.wait_for_selector(".rb-welcome")
        _ask(page, WARM_UP)
        page.click("#rb-new")
        page.wait_for_selector(".rb-welcome")
        _ask(page, QUESTION)
        page.click(".rb-sources summary")
        page.click(f".rb-source:has-text('{SOURCE}')")
        page.wait_for_selector("#rb-source .rb-mark")
        page.screenshot(path=PICTURES / "page.png")
        window.close()


def _ask(page: Any, question: str) -> None:
    page.fill("#rb-question textarea", question)
    page.press("#rb-question textarea", "Control+Enter")
    page.wait_for_selector("#rb-stop")
    page.wait_for_selector("#rb-send")
    page.wait_for_selector("#rb-live .rb-turns", state="detached")


def main(home: AnyHome = None) -> None:
    """Take both pictures, with a new home if none is given."""
    with tempfile.TemporaryDirectory() as folder:
        demo_picture(home or Path(folder))
        page_picture(home or Path(folder))


if __name__ == "__main__":
    run(main, __doc__)
