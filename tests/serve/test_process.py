"""`ragblend serve` and `keys` as processes: the bundled model, third-party clients, signals, ports."""

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from servers import forked, running
from waiting import SOON_S, until

from ragblend.app.cli.main import main
from ragblend.app.serve.keys import Client, Keys
from ragblend.app.serve.listening import listening
from ragblend.kvstore.errors import SettingsError, UsageError

INGESTED_S = 5 * SOON_S  # a loaded machine embeds slowly
PASSAGE = (
    "The lighthouse of Dunlin was built in 1874 by the engineer Keziah Blount. She chose the rock because the ships "
    "of the herring fleet had been lost there in three winters, and because the quarry was near.\n\n"
    "Its lamp burned whale oil until 1902. After that the keeper, Tobit Crane, had an electric lamp put in, against "
    "the wish of the harbour master, who thought that no light without a flame would be seen in fog."
)


def test_a_program_that_uses_openais_api_from_start_to_end(with_smollm2, tmp_path) -> None:
    home = with_smollm2(tmp_path / "home")
    with running(home, "--device", "cpu") as (ready, process):
        base = ready["url"]
        with httpx.Client(base_url=base, timeout=5 * SOON_S) as client:
            [model, _] = [each["id"] for each in client.get("models").json()["data"]]

            def ask(question):
                messages = [{"role": "user", "content": f"{PASSAGE}\n\n{question}"}]
                asked = {"model": model, "messages": messages, "max_tokens": 24}
                answer = client.post("chat/completions", json=asked)
                assert answer.status_code == 200, answer.text
                return answer.json()

            questions = ("Who built the lighthouse?", "What did its lamp burn?", "Who was the keeper?")
            answers = [ask(question) for question in questions]
            assert "Blount" in answers[0]["choices"][0]["message"]["content"]
            # Met twice, the passages are known, and the third prompt has their KV; the first was not all the second is.
            assert answers[2]["kv"][0]["chunks"]
            assert answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0
    assert not list((home / "serve").glob("*"))


@pytest.mark.timeout(3 * INGESTED_S)
def test_a_kill_loses_nothing_that_was_acknowledged(home_of, tiny_folder) -> None:
    """Killed after an upload, during ingest, after an answer and after a deletion, and restarted each time."""
    home = home_of()

    @contextmanager
    def killed():
        """A client of the server, which is killed at the end."""
        words = ("serve", "--home", str(home), "--port", "0", "--json", "--model", str(tiny_folder))
        with (
            forked(*words, "--device", "cpu") as (ready, _),
            httpx.Client(base_url=ready["url"], timeout=5 * SOON_S) as client,
        ):
            yield client

    def upload(client, name, text):
        assert client.post("documents", files={"file": (name, text)}).status_code == 202

    def states(client, what):
        return {each["name"]: each["state"] for each in client.get(what).json()["data"]}

    def sources(client):
        told = {"question": "Who built the lighthouse of Dunlin?", "max_tokens": 4}
        return {each["document"] for each in client.post("rag/ask", json=told).json()["sources"]}

    with killed() as client:
        upload(client, "lighthouse.txt", PASSAGE)
    with killed() as client:
        until(lambda: states(client, "documents") == {"lighthouse.txt": "done"}, INGESTED_S)
        upload(client, "ferry.txt", "The ferry Marigold leaves the pier at seven.\n\n" * 3_000)
        until(lambda: states(client, "documents/jobs")["ferry.txt"] in ("parsing", "embedding"), INGESTED_S)
    with killed() as client:
        assert states(client, "documents/jobs")["ferry.txt"] != "done"
        both = {"lighthouse.txt": "done", "ferry.txt": "done"}
        until(lambda: states(client, "documents") == both, INGESTED_S)
        found = sources(client)
        assert "lighthouse.txt" in found
    with killed() as client:
        assert sources(client) == found
        [lighthouse] = [d for d in client.get("documents").json()["data"] if d["name"] == "lighthouse.txt"]
        assert client.delete(f"documents/{lighthouse['id']}").json()["deleted"]
    with killed() as client:
        assert states(client, "documents") == states(client, "documents/jobs") == {"ferry.txt": "done"}
        assert "lighthouse.txt" not in sources(client)


def test_why_a_server_cannot_listen(tmp_path, capsys) -> None:
    home = ["--home", str(tmp_path / "home")]
    with forked("serve", "--home", str(tmp_path / "other"), "--port", "0", "--json") as (ready, _):
        assert main(["serve", *home, "--port", str(ready["port"])]) == 2
        assert "in use" in capsys.readouterr().err
        assert main(["serve", "--home", str(tmp_path / "other"), "--port", "0"]) == 1
        assert "one process at a time can: end that one" in capsys.readouterr().err
    assert main(["serve", *home, "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "needs a key" in capsys.readouterr().err


def test_connections_have_no_delay() -> None:
    """With Nagle's algorithm each answer and token waited 40 ms for an acknowledgement."""
    with (
        listening("127.0.0.1", 0) as (address, at),
        socket.create_connection(("127.0.0.1", address.port)),
        at.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_keys_are_made_listed_and_removed(tmp_path, capsys) -> None:
    home = ["--home", str(tmp_path / "home"), "--json"]

    def run(*arguments):
        code = main(["keys", *arguments, *home])
        return code, json.loads(capsys.readouterr().out)

    _, made = run("add", "ada")
    _, shared = run("add", "bob", "--collection", "ada")
    _, chief = run("add", "chief", "--owner")
    keys = Keys(tmp_path / "home")
    assert keys.client(made["key"]) == Client("ada", ("ada",))
    assert keys.client(shared["key"]) == Client("bob", ("ada",))
    assert keys.client(chief["key"]).is_owner and keys.client(made["key"] + "x") is None
    assert run("add", "ada")[0] == run("add", "bob")[0] == run("add", "owner")[0] == 2
    assert run("add", "eve", "--owner", "--collection", "ada")[0] == 2
    refused = run("add", "default")
    assert refused[0] == 2 and "share it with --collection default" in refused[1]["error"]["message"]
    assert [each["name"] for each in run()[1]["keys"]] == ["ada", "bob", "chief"]
    text = keys.path.read_text()
    assert not any(each["key"] in text for each in (made, shared, chief))
    assert keys.path.stat().st_mode & 0o077 == 0
    assert run("rm", "ada")[0] == 0 and run("rm", "ada")[0] == 2
    assert keys.client(made["key"]) is None and keys.client(chief["key"]) is not None


def test_concurrent_changes_of_keys_are_not_lost(tmp_path) -> None:
    """Each read, changed and wrote without a lock: new keys were lost, and revoked ones came back."""
    old, new = ([f"{kind}{number}" for number in range(20)] for kind in ("old", "new"))
    for name in old:
        Keys(tmp_path).add(Client(name, (name,)))
    adding, removing = Keys(tmp_path), Keys(tmp_path)  # as two processes have them
    with ThreadPoolExecutor(2) as pool:
        added = pool.submit(lambda: [adding.add(Client(name, (name,))) for name in new])
        removed = pool.submit(lambda: [removing.remove(name) for name in old])
        keys, _ = added.result(), removed.result()
    assert sorted(Keys(tmp_path).names()) == sorted(new)
    assert [Keys(tmp_path).client(key).name for key in keys] == new


def test_a_damaged_key_file_is_an_error(tmp_path) -> None:
    keys = Keys(tmp_path)
    keys.add(Client("ada", ("ada",)))
    keys.path.write_text('{"keys": [{}]}')
    with pytest.raises(SettingsError):
        keys.clients()
    with pytest.raises(UsageError):
        Keys(tmp_path / "none").remove("ada")
