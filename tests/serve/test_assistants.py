"""`ragblend mcp` as assistants start it: the real command with the official client, over a home with documents."""

import asyncio
import json
import os
import signal
import sys
from contextlib import contextmanager

import httpx
import pytest
from servers import forked
from waiting import SOON_S

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
from mcp import Client, StdioServerParameters

from ragblend.app.cli.main import main
from ragblend.app.serve import keys as server_keys
from ragblend.app.serve.commands import CommandListener
from ragblend.app.services import AppServices

LIGHT = "The lighthouse of Skarholm was built in 1888 by Marta Lind. "
FERRY = "The ferry Marigold leaves the pier at seven and takes forty minutes. "
MCP = ("-m", "ragblend.app.cli.main", "mcp")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("RAGBLEND_")}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def home(home_of, tiny_folder, tmp_path_factory):
    home, folder = home_of(), tmp_path_factory.mktemp("documents")
    (folder / "lighthouse.md").write_text(LIGHT * 2)
    (folder / "ferry.txt").write_text(FERRY * 700)
    assert main(["ingest", str(folder), "--home", str(home), "--model", str(tiny_folder)]) == 0
    (home / "settings.toml").write_text(f'model = "{tiny_folder}"\nmax_new_tokens = 4\n')
    return home


@contextmanager
def listening(home):
    """The command with --http; gives its URL."""
    with forked("mcp", "--http", "--port", "0", "--json", "--home", str(home)) as (ready, process):
        yield ready["url"]
        os.kill(process.pid, signal.SIGINT)
        process.join(SOON_S)
        assert process.exitcode == 0


async def asked(at, calls):
    async with Client(at) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        return tools, [await client.call_tool(name, arguments) for name, arguments in calls]


def told(home, *calls):
    """What each call (tool, arguments) gave, and the tools that there are: one process, one conversation."""
    command = StdioServerParameters(command=sys.executable, args=[*MCP, "--home", str(home)], env=ENVIRONMENT)
    return asyncio.run(asked(command, calls))


def value(result):
    assert not result.is_error, result
    return json.loads(result.content[0].text)


STORY = (
    ("search", {"question": "Who built the lighthouse?", "limit": 1}),
    ("ask", {"question": "Who built the lighthouse?"}),
    ("list_documents", {}),
    ("list_documents", {"words": "light", "limit": 1}),
    ("read_document", {"document": "ferry.txt"}),
    ("read_document", {"document": "ferry.txt", "offset": 40_000}),
)


@pytest.fixture(scope="module")
def over_stdio(home):
    """The tools, what CALLS gave, and what STORY gave, of a process that alone has the home open."""
    tools, results = told(home, *CALLS, *STORY)
    return tools, results[: len(CALLS)], results[len(CALLS) :]


@pytest.mark.parametrize("beside", [None, "a server"])
def test_an_assistant_finds_asks_lists_and_reads(home, over_stdio, beside) -> None:
    tools, _, results = over_stdio
    if beside:
        with AppServices.open(home) as services, CommandListener(services):
            tools, results = told(home, *STORY)
            services.workspaces.first.engine.close()
    assert set(tools) == {"search", "ask", "list_documents", "read_document"}
    assert all(tool.annotations.read_only_hint for tool in tools.values())
    found, answer, everything, lights, begin, end = map(value, results)
    [passage] = found["passages"]
    assert passage["document"] == "lighthouse.md" and passage["text"].startswith(LIGHT.strip())
    assert answer["answer"] and answer["sources"][0]["document_id"] == passage["document_id"]
    assert {each["name"] for each in everything["documents"]} == {"lighthouse.md", "ferry.txt"}
    assert (everything["total"], everything["collections"]) == (2, ["default"])
    assert [each["name"] for each in lights["documents"]] == ["lighthouse.md"]
    assert begin["next_offset"] == len(begin["text"]) == 20_000 and begin["text"].startswith(
        "The ferry Marigold"
    )
    assert "next_offset" not in end and len(end["text"]) == end["characters"] - 40_000 > 0


# What is refused, and a word of the reason; then what is answered.
REFUSED = [
    (("search", {"question": " "}), "empty"),
    (("search", {"question": "Who?", "collection": "nobodys"}), "nobodys"),
    (("list_documents", {"collection": "../x"}), "../x"),
    (("ask", {"question": ""}), "empty"),
    (("ask", {"question": "x" * 10_001}), "10000"),
    (("read_document", {"document": "none.txt"}), "none.txt"),
    (("read_document", {"document": "ferry.txt", "offset": -1}), "greater"),
    (("search", {"question": "Who?", "limit": 0}), "greater"),
]
CALLS = [
    *(call for call, _ in REFUSED),
    ("search", {"question": "Who built the lighthouse?", "limit": 2}),
    ("list_documents", {}),
    ("read_document", {"document": "ferry.txt", "offset": 20_000}),
]


@pytest.fixture(scope="module")
def url(home):
    with listening(home) as found:
        yield found


def test_http_and_stdio_give_the_same_answers(over_stdio, url) -> None:
    tools, results, _ = over_stdio
    over_http, same = asyncio.run(asked(url, CALLS))
    [answer] = asyncio.run(asked(url, [("ask", {"question": "Who built the lighthouse?"})]))[1]
    assert {name: tool.model_dump() for name, tool in over_http.items()} == {
        name: tool.model_dump() for name, tool in tools.items()
    }
    assert [each.model_dump() for each in same] == [each.model_dump() for each in results]
    assert value(answer)["answer"] and value(answer)["sources"]


def test_tool_errors_are_reported_and_the_server_continues(over_stdio) -> None:
    _, results, _ = over_stdio
    for (call, word), result in zip(REFUSED, results, strict=False):
        assert result.is_error and word in result.content[0].text, call
    assert all(map(value, results[len(REFUSED) :]))


def test_excess_requests_are_refused_with_advice_to_retry(url) -> None:
    """Each request got a thread, without a limit."""

    async def all_at_once(url):
        async with Client(url) as client:
            calls = [client.call_tool("search", {"question": f"What is at pier {n}?"}) for n in range(60)]
            return await asyncio.gather(*calls), await client.call_tool("search", {"question": "And now?"})

    found, last = asyncio.run(all_at_once(url))
    refused = [each for each in found if each.is_error]
    assert 0 < len(refused) < 60 - 16 + 1 and not last.is_error
    assert all(
        "Too many requests of this key are waiting. Try again in" in str(each.content) for each in refused
    )


def test_http_access_needs_the_owners_key(home, capfd) -> None:
    keys = server_keys.Keys(home)
    chief, ada = keys.add(server_keys.Client("chief")), keys.add(server_keys.Client("ada", ("ada",)))
    hello = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    try:
        with listening(home) as url, httpx.Client(timeout=SOON_S) as client:

            def status(key=None, **headers):
                given = {"authorization": f"Bearer {key}"} if key else {}
                accepted = {"accept": "application/json, text/event-stream"}
                return client.post(url, json=hello, headers=accepted | given | headers).status_code

            assert (status(), status("rb-wrong"), status(ada)) == (401, 401, 403)
            assert status(chief, host="evil.example:80") == 421
            assert status(chief, origin="http://evil.example") == 403
            assert status(chief) not in (401, 403, 421)
        assert main(["mcp", "--http", "--host", "0.0.0.0", "--home", str(home / "other")]) == 2
        assert "needs a key" in capfd.readouterr().err
    finally:
        for name in keys.names():
            keys.remove(name)
