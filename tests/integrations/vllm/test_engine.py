"""`Engine.open(backend="vllm")`, frameworks and app on a running server: answers are the built-in engine's."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_helpers import QUESTION, STORED, asked, counted, listening_on, passage

from ragblend.engine import config
from ragblend.engine.decoding import uncertainty
from ragblend.engine.decoding.grammar import Grammar, json_grammar
from ragblend.engine.engine import Engine, require_local_engine
from ragblend.engine.prompts.segments import Chunk
from ragblend.kvstore.errors import Cancelled, UnsupportedModelError, UsageError


@pytest.fixture
def engines(listening):
    """The engine whose model is in the server, and the built-in one on the same home."""
    where = {"model": str(listening.folder), "home": listening.home}
    theirs = Engine.open(**where, backend="vllm", url=listening.url)
    ours = Engine.open(**where, device="cpu", dtype="float32")
    yield theirs, ours
    theirs.finish_background()
    theirs.close()
    ours.close()


@pytest.mark.parametrize("how", [{}, {"method": "epic", "ratio": 0.3}, {"method": "full"}], ids=str)
def test_answers_and_reports_equal_the_built_in_engines(engines, how):
    theirs, ours = engines
    prompt = asked(theirs, [STORED[n] for n in (3, 0, 4, 1)], f"What of {how}?")
    pieces: list[str] = []
    result = theirs.generate(prompt, max_new_tokens=12, on_text=pieces.append, **how)
    expected = ours.generate(prompt, max_new_tokens=12, **how)
    assert result.token_ids == expected.token_ids and result.text == expected.text == "".join(pieces)
    mine, report = expected.report, result.report
    assert report.method == mine.method
    if how.get("method") == "full":
        return  # vLLM's cache has the first block of other prompts
    assert (report.tokens, report.hits, report.misses) == (mine.tokens, mine.hits, mine.misses)
    assert report.served == mine.served and report.ratio == pytest.approx(mine.ratio, abs=1e-3)
    assert report.recomputed_fraction == pytest.approx(mine.recomputed_fraction, abs=1e-3)
    assert report.timings.load_ms > 0 and report.timings.ttft_ms > 0 and report.warning is None


def test_uncertain_figures_are_read_again_where_the_built_in_engine_does(engines, monkeypatch):
    """Each prompt begins with another passage, as vLLM would reuse the exact blocks of what was read again.

    Of a model with random weights a passage alone seldom contradicts the others, so any other figure counts.
    """
    monkeypatch.setattr(uncertainty, "MIN_OTHER", 0.0)
    monkeypatch.setattr(uncertainty, "MAX_RULED_OUT", 1.0)
    theirs, ours = engines
    texts = [f"{passage(100 + n)} {n}{7 * n} of {13 * n}" for n in range(12)]
    ours.encode(texts)
    read_again = []
    for number in range(12):
        found = [*texts[number:], *texts[:number]][:6]
        prompt = asked(theirs, found, f"What of {number} harbour masters?")
        expected = ours.generate(prompt, max_new_tokens=24, logprobs=2)
        result = theirs.generate(prompt, max_new_tokens=24, logprobs=2)
        assert result.token_ids == expected.token_ids
        assert [each.token_id for each in result.logprobs] == [each.token_id for each in expected.logprobs]
        assert result.report.read_again_at == expected.report.read_again_at
        read_again.append(result.report.read_again_at)
    assert any(read_again)


def test_both_engines_share_the_store_of_encoded_passages(engines):
    theirs, ours = engines
    new = [passage(n) for n in (60, 61, 62)]
    assert theirs.encode(new[:1], ["n60"]).encoded == 1
    assert ours.encode(new[:1]).encoded == 0, "it is the same store"
    theirs.enter(new[1:2], ["n61"])
    assert theirs.missing(["n60", "n61"]).node_ids == ("n61",)
    assert list(theirs.encode_nodes(["n60", "n61"])) == [0, theirs.count_tokens(new[1])]

    first = theirs.generate(asked(theirs, [*new, STORED[0]]), max_new_tokens=2).report
    assert first.misses == 1 and theirs.finish_background(120)
    assert theirs.generate(asked(theirs, [STORED[0], *new]), max_new_tokens=2).report.misses == 0
    assert ours.generate(asked(ours, [new[2], STORED[1]]), max_new_tokens=2).report.misses == 0
    assert theirs.forget(["n60", "n61"]) > 0
    assert theirs.generate(asked(theirs, new[::-1]), max_new_tokens=2).report.misses == 2


def test_a_conversation_continues_in_vllms_cache(engines):
    theirs, _ = engines
    texts = STORED[:4]
    first = theirs.generate(asked(theirs, texts, "Who kept the ledgers?"), max_new_tokens=8)
    prompt = theirs.tokenize(first.prompt)
    again = theirs.generate(prompt, max_new_tokens=8)
    assert again.token_ids == first.token_ids and again.report.method == "probe-shift"
    assert again.report.tokens.reused == len(prompt.token_ids) - 1 and again.report.hits >= 3


def test_sampling_stop_texts_grammars_and_log_probabilities_work(engines):
    theirs, ours = engines
    prompt = asked(theirs, STORED[1:4])
    sampling = {"max_new_tokens": 8, "temperature": 1.5}
    seeded = [theirs.generate(prompt, seed=seed, **sampling).token_ids for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    whole = theirs.generate(prompt, max_new_tokens=16, logprobs=3)
    mine = ours.generate(prompt, max_new_tokens=16, logprobs=3)
    for one, other in zip(whole.logprobs, mine.logprobs, strict=True):
        assert one.token_id == other.token_id and one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [i for i, _ in one.most_likely] == [i for i, _ in other.most_likely]
    stop = whole.text[4:6]
    cut = theirs.generate(prompt, max_new_tokens=16, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    schema = {"type": "object", "properties": {"who": {"enum": ["Ems", "Elbe"]}}, "required": ["who"]}
    answer = theirs.generate(prompt, max_new_tokens=40, grammar=json_grammar(schema))
    assert json.loads(answer.text)["who"] in ("Ems", "Elbe") and answer.stopped


def test_closing_a_stream_stops_the_server(engines):
    theirs, _ = engines
    stream = theirs.stream(asked(theirs, STORED[:3]), max_new_tokens=1500)
    next(iter(stream))
    stream.close()
    with pytest.raises(Cancelled):
        _ = stream.result
    assert theirs.generate(asked(theirs, STORED[:3]), max_new_tokens=2).token_ids


def test_what_the_server_refuses_is_reported(engines):
    theirs, _ = engines
    prompt = theirs.chat_prompt(None, [Chunk(text, collection="theirs") for text in STORED[:3]], QUESTION)
    assert "without the collection 'theirs'" in theirs.generate(prompt, max_new_tokens=2).report.warning
    with pytest.raises(UsageError, match=r"refuses the request.*[Gg]rammar"):
        theirs.generate(prompt, grammar=Grammar("start: no_such_rule\n"))
    with pytest.raises(UnsupportedModelError):
        require_local_engine(theirs, "measuring the device")


# --- the frameworks


@pytest.mark.timeout(1200)
def test_the_examples_of_the_frameworks_page_run_on_vllm(has_vllm, tmp_path, with_smollm2, monkeypatch):
    """All of them, unchanged but for `backend="vllm"`, whose default url is that of `vllm serve`."""
    home = with_smollm2(tmp_path / "home")
    folder = Engine.open(home=home, device="cpu", dtype="bfloat16").runtime.folder
    page = (Path(__file__).parents[3] / "docs" / "frameworks.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    monkeypatch.setenv("RAGBLEND_HOME", str(home))
    namespace: dict[str, object] = {"__name__": "document"}
    with listening_on(folder, home, "bfloat16") as made:
        monkeypatch.setattr(config, "VLLM_URL", made.url)
        for example in examples:
            code, _ = re.subn(r"(max_(?:new_)?tokens=\d+)\)", r'\1, backend="vllm")', example)
            exec(compile(code, "frameworks.md", "exec"), namespace)
        assert counted(made.url)["requests"] > 5
    for name in ("llm", "ahead"):
        assert name in namespace
    llm: Any = namespace["llm"]
    assert llm.backend.engine.device == f"vLLM at {made.url}", "nothing of it was loaded here"


def test_openai_clients_reuse_passages_that_are_in_their_prompts(listening):
    """LangChain's and LlamaIndex's own clients of OpenAI's interface, which know nothing of RAGBlend."""
    from langchain_openai import ChatOpenAI
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    content = "Passages:\n\n" + "\n\n".join(STORED[n] for n in (4, 2, 0)) + "\n\nWho was it?"
    before = counted(listening.url)
    options = {"model": "tiny", "api_key": "none", "max_tokens": 4}
    client = ChatOpenAI(base_url=f"{listening.url}/v1", temperature=0, **options)
    assert client.invoke(content).content
    between = counted(listening.url)
    assert between["requests"] == before["requests"] + 1
    assert between["tokens_reused"] > before["tokens_reused"] + 100
    like = OpenAILike(api_base=f"{listening.url}/v1", is_chat_model=True, **options)
    assert str(like.chat([ChatMessage(content=content.replace("Who", "When"))]))
    assert counted(listening.url)["tokens_reused"] > between["tokens_reused"] + 100


# --- the app


def test_vllm_check_says_whether_prompts_are_fused(listening, tmp_path, capsys):
    """By a running server, and by the gate in a vLLM of its own."""
    from ragblend.app.cli.main import main

    options = [
        "--home",
        str(tmp_path / "home"),
        "--model",
        str(listening.folder),
        "--dtype",
        "float32",
        "--json",
    ]
    assert main(["vllm", "check", *options, "--vllm", listening.url]) == 0
    assert json.loads(capsys.readouterr().out)["fuses"]
    command = [sys.executable, "-m", "ragblend.app.cli.main", "vllm", "check", *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) | {"where": "vLLM here", "fuses": True} == json.loads(ended.stdout)


def test_the_command_line_and_a_conversation_reuse_passages(listening, tmp_path, capsys):
    """On another home than the server's, which finds the passages' KV by their token ids."""
    from ragblend.app.answering.conversation import AskOptions, Conversations
    from ragblend.app.cli.main import main
    from ragblend.app.workspace import Workspaces

    document = tmp_path / "ledgers.txt"
    document.write_text("\n\n".join(passage(n, 120) for n in (90, 91)))
    home, settings = tmp_path / "home", {"model": str(listening.folder), "vllm": listening.url}
    common = ["--home", str(home), "--model", settings["model"], "--vllm", listening.url, "--json"]
    assert main(["ingest", str(document), *common]) == 0
    capsys.readouterr()
    assert main(["ask", "Who kept the ledgers?", "--top-k", "2", "--max-new-tokens", "8", *common]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["answer"] and answer["device"] == f"vLLM at {listening.url}"
    assert answer["store"]["hits"] >= 1 and answer["tokens"]["reused"] > 100
    with Workspaces.open(home, **settings, top_k=2, max_new_tokens=8) as workspaces:
        talks, chats = Conversations(workspaces), workspaces.chats
        chat = chats.create("ledgers")
        turn = talks.ask(chat.id, "Where were both ledgers?", AskOptions())
        with turn:
            assert "".join(turn)
        assert turn.message.report["hits"] >= 1 and turn.message.report["tokens"]["reused"] > 100
        assert talks.measure_full(turn.message.id)["full_prefill_ms"] > 0
