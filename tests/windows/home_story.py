"""The story of a home on any system: `python tests/windows/home_story.py FOLDER`. Not a test file.

Ingest, ask, serve, commands of a second process beside the server, delete; a random model answers.
"""

import _thread
import contextlib
import io
import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

from ragblend.app import samples
from ragblend.app.cli.main import main
from ragblend.app.remote import SOCKET_NAME, connect
from ragblend.kvstore import system

LIGHT = "The lighthouse of Skarholm was built in 1888 by Marta Lind. "
FERRY = "The ferry Marigold leaves the pier at seven and takes forty minutes. "
QUESTION = "Who built the lighthouse?"
LONG_S = 600
# What a second process does beside the server; it must not need a model of its own.
BESIDE = """
import sys
from ragblend.app.cli.main import main
home = ["--home", sys.argv[1], "--json"]
codes = [main(each + home) for each in (["ask", sys.argv[2]], ["docs", "rm", "ferry.txt"], ["serve", "--port", "0"])]
print(codes == [0, 0, 1], "torch" in sys.modules)
"""


def said(*words, code=0):
    """What a command prints with --json."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        found = main([*map(str, words), "--json"])
    assert found == code, (words, found, out.getvalue())
    return json.loads(out.getvalue().splitlines()[-1])


def sources(answer):
    return {each["document"] for each in answer["sources"]}


def story(folder: Path, model: Path) -> None:
    home, documents = folder / "a home", folder / "documents"
    documents.mkdir(parents=True)
    (documents / "lighthouse.md").write_text(LIGHT * 2, encoding="utf-8")
    (documents / "ferry.txt").write_text(FERRY * 2, encoding="utf-8")
    pages = samples.documents_folder() / "letters-of-tobit-crane.pdf"
    at = ("--home", home)
    home.mkdir(mode=0o700)
    settings = f'model = {json.dumps(str(model))}\ndevice = "cpu"\nmax_new_tokens = 4\n'
    (home / "settings.toml").write_text(settings, encoding="utf-8")

    assert len(said("ingest", documents, pages, *at)["added"]) == 3
    assert "lighthouse.md" in sources(said("ask", QUESTION, *at))
    again = said("ask", QUESTION, *at)
    assert again["tokens"]["reused"] > 0, again
    before = len(list((home / "kv").rglob("*.kv")))

    out, failed = io.StringIO(), list[BaseException]()

    def beside() -> None:
        try:
            while not out.getvalue().endswith("\n"):
                assert serving.is_alive()
                threading.Event().wait(0.05)
            url = json.loads(out.getvalue())["url"]
            with urllib.request.urlopen(f"{url}/models", timeout=LONG_S) as answer:
                assert json.loads(answer.read())["data"]
            channel = connect(home)
            assert channel is not None
            channel.close()
            command = [sys.executable, "-c", BESIDE, str(home), QUESTION]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
            assert done.stdout.splitlines()[-1:] == ["True False"], done
            assert "one process at a time" in done.stderr.replace("\n", " "), done.stderr
        except BaseException as error:
            failed.append(error)
        finally:
            _thread.interrupt_main()

    serving, client = threading.main_thread(), threading.Thread(target=beside)
    client.start()
    with contextlib.redirect_stdout(out):
        code = main(["serve", *map(str, at), "--port", "0", "--json"])
    client.join()
    if failed:
        raise failed[0]
    assert code == 0 and not (home / SOCKET_NAME).exists()

    listed = said("docs", "list", *at)["documents"]
    assert {Path(each["path"]).name for each in listed} == {"lighthouse.md", pages.name}
    assert 0 < len(list((home / "kv").rglob("*.kv"))) < before
    checks = {check["name"]: check for check in said("doctor", *at)["checks"]}
    assert not [check for check in checks.values() if check["status"] == "failed"], checks
    assert ("memory" in checks["parser"]["detail"]) == (system.fcntl is None)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
    import tiny_models

    place = Path(sys.argv[1])
    story(place, tiny_models.save_model("llama", place / "model", is_endless=True))
    print("byte locks" if system.fcntl is None else "flock")
