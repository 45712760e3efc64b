"""What LangChain's and LlamaIndex's models have in common: every kind of model, in each way to call it."""

import asyncio
import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="the langchain extra is not installed")

from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError, ModelInvalidRequestError, ModelTimeoutError
from langchain_core.retrievers import BaseRetriever
from llama_helpers import STORIES, HashEmbedding
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import TextNode
from waiting import SOON_S

from benchmarks.reused_tokens import record_answers, results_of
from ragblend import Chunk, Literal, Prompt
from ragblend.engine.engine import Engine
from ragblend.engine.prompts.segments import Message
from ragblend.integrations import langchain, llama_index
from ragblend.integrations.backend import kv_statistics
from ragblend.integrations.calls import AnswerTimeout
from ragblend.integrations.langchain.listener import LIVE_MODELS as LANGCHAINS
from ragblend.integrations.llama_index.listener import LIVE_MODELS as LLAMA_INDEXES
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import ModelNotFoundError, PromptTooLongError

QUESTION = "Who kept two ledgers?"
NAMES = ["a", "b", "c"]
PASSAGES = [Passage(text, name) for text, name in zip(STORIES, NAMES, strict=True)]
ASKED = "\n\n".join([*STORIES, QUESTION])
WAYS = ["whole", "stream", "awaited", "astream"]


class Shelf(BaseRetriever):
    """Finds every story."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(each.text, id=each.node_id) for each in PASSAGES]


def nodes() -> list[TextNode]:
    return [TextNode(text=each.text, id_=each.node_id) for each in PASSAGES]


@dataclass(frozen=True)
class Kind:
    """A kind of model. methods: by way; encode, retrieve: the framework's, of the stories; errors: its own classes."""

    model: Any
    methods: Sequence[str]
    encode: Callable[..., int]
    retrieve: Callable[[], Sequence[Any]]
    errors: tuple[type[Exception], type[Exception], type[Exception]]
    asks: Callable[[str], Any] = str
    is_chat: bool = True

    def start(self, model: Any, way: str, text: str, **options: Any) -> Any:
        """What that method returns."""
        return getattr(model, self.methods[WAYS.index(way)])(self.asks(text), **options)

    def ask(self, model: Any, way: str, text: str = QUESTION, **options: Any) -> list[Any]:
        """All items of a stream, or the one answer."""
        if way in ("whole", "stream"):
            answer = self.start(model, way, text, **options)
            return list(answer) if way == "stream" else [answer]
        return asyncio.run(self.aask(model, way, text, **options))

    async def aask(self, model: Any, way: str, text: str = QUESTION, **options: Any) -> list[Any]:
        answer = self.start(model, way, text, **options)
        if inspect.isawaitable(answer):
            answer = await answer
        return [item async for item in answer] if hasattr(answer, "__aiter__") else [answer]

    def prompt(self, engine: Engine, *segments: Any) -> Prompt:
        """The engine's own prompt of these segments."""
        if self.is_chat:
            return engine.tokenize(engine.chat([Message("user", segments)]))
        return engine.tokenize(Prompt(segments))

    def text(self, words: str) -> Literal:
        return Literal(words, verbatim=self.is_chat)


LANGCHAIN: dict[str, Any] = {
    "methods": ("invoke", "stream", "ainvoke", "astream"),
    "encode": lambda model, **options: langchain.encode_documents(Shelf().invoke(""), model, **options),
    "retrieve": lambda: Shelf().invoke(QUESTION),
    "errors": (ModelInvalidRequestError, ContextOverflowError, ModelTimeoutError),
}
LLAMA_INDEX: dict[str, Any] = {
    "model": llama_index.RAGBlendLLM,
    "encode": lambda model, **options: llama_index.encode_nodes(nodes(), model, **options),
    "retrieve": lambda: (
        VectorStoreIndex(nodes(), embed_model=HashEmbedding())
        .as_retriever(similarity_top_k=3)
        .retrieve(QUESTION)
    ),
    "errors": (ValueError, llama_index.ContextWindowError, AnswerTimeout),
}
KINDS = {
    "LangChain, chat": Kind(langchain.ChatRAGBlend, **LANGCHAIN),
    "LangChain, text": Kind(langchain.RAGBlendLLM, **LANGCHAIN, is_chat=False),
    "LlamaIndex, chat": Kind(
        methods=("chat", "stream_chat", "achat", "astream_chat"),
        asks=lambda text: [ChatMessage(text)],
        **LLAMA_INDEX,
    ),
    "LlamaIndex, completion": Kind(
        methods=("complete", "stream_complete", "acomplete", "astream_complete"), **LLAMA_INDEX
    ),
}


# Each kind in one or two of the ways, so that each framework is in all of them: a pair costs seconds.
PAIRS = [(name, WAYS[(at + more) % 4]) for at, name in enumerate(KINDS) for more in (0, 2)]


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(params=["LangChain, chat", "LlamaIndex, chat"])
def framework(request):
    """One kind of each framework, for what does not depend on the kind."""
    return KINDS[request.param]


@pytest.fixture
def make(place):
    """Makes models of a kind on one empty home."""
    options = place | {"max_tokens": 8, "learn_from_prompts": False}
    yield lambda kind, **changes: kind.model(**options | changes)
    for living in (LANGCHAINS, LLAMA_INDEXES):
        living.models.clear()  # a living model would register the next test's retrievals


def piece(item: Any) -> str:
    """The text of an item: of a response its new part, if it is one of several."""
    if isinstance(item, str):
        return item
    if (delta := getattr(item, "delta", None)) is not None:
        return delta
    return item.message.content if hasattr(item, "message") else str(item.text)


def told(item: Any) -> tuple[Any, Any] | None:
    """The statistics and the counts (prompt, answer) in an item, if it has them."""
    if raw := getattr(item, "raw", None):
        return raw["kv"], (raw["usage"]["prompt_tokens"], raw["usage"]["completion_tokens"])
    if found := getattr(item, "usage_metadata", None):
        return item.response_metadata["kv"], (found["input_tokens"], found["output_tokens"])
    return None


def result_of(kind: Kind, model: Any, text: str = QUESTION, way: str = "whole", **options: Any) -> Any:
    """The engine's result of a call."""
    with record_answers() as answers:
        kind.ask(model, way, text, **options)
    [result] = results_of(answers)
    return result


def chunks_of(result: Any) -> list[str | None]:
    return [chunk.node_id for chunk in result.prompt.chunks]


# --- answers


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_engines_own_answer_and_tells_of_it_once(kind, make, way):
    model = make(kind)
    engine = model.backend.engine
    prompt = kind.prompt(engine, kind.text(QUESTION))
    expected = engine.generate(prompt, max_new_tokens=8)
    with record_answers() as answers:
        items = kind.ask(model, way)
    [result] = results_of(answers)
    pieces = [piece(item) for item in items]
    assert "".join(pieces) == expected.text and result.prompt.token_ids == prompt.token_ids
    assert (len([each for each in pieces if each]) > 2) == ("stream" in way)
    if not isinstance(items[-1], str):
        counts = len(prompt.token_ids), 8
        assert [told(item) for item in items] == [None] * (len(items) - 1) + [(kv_statistics(result), counts)]


def test_passages_named_in_a_call_become_chunks_of_the_prompt(kind, make):
    model = make(kind)
    result = result_of(kind, model, f"Read this: {STORIES[0]} {QUESTION}", passages=STORIES[0])
    segments = kind.text("Read this: "), Chunk(STORIES[0]), kind.text(f" {QUESTION}")
    assert result.prompt.token_ids == kind.prompt(model.backend.engine, *segments).token_ids
    assert [chunk.text for chunk in result.prompt.chunks] == [STORIES[0]]


def test_options_of_a_call_reach_the_engine(kind, make):
    model = make(kind)
    for name in ("max_tokens", "max_new_tokens"):
        assert result_of(kind, model, **{name: 3}).report.tokens.generated == 3
    assert result_of(kind, model, method="full").report.method == "full"
    whole = result_of(kind, model)
    cut = result_of(kind, model, stop=[whole.text[3]])
    assert not whole.stopped and cut.stopped and cut.text == whole.text[: whole.text.index(whole.text[3])]
    seeded = [result_of(kind, model, temperature=2.0, seed=seed).text for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_several_conversations_report_their_own_passages_in_whatever_order_streams_are_read(kind, make):
    """A context variable would give the second stream's passages to the first."""
    model = make(kind)
    model.backend.remember(PASSAGES, encode=True)
    texts = [f"{story}\n{QUESTION}" for story in STORIES]
    alone = ["".join(map(piece, kind.ask(model, "whole", text))) for text in texts]

    def check(answers: Sequence[list[Any]]) -> None:
        assert ["".join(map(piece, items)) for items in answers] == alone
        if kind.model is not langchain.RAGBlendLLM:
            found = [told(items[-1])[0] for items in answers]
            assert [(kv["chunks"], kv["misses"]) for kv in found] == [([name], 0) for name in NAMES]

    streams = [iter(kind.start(model, "stream", text)) for text in texts]
    begun = [[next(stream)] for stream in streams]
    for items, stream in reversed(list(zip(begun, streams, strict=True))):
        items += stream
    check(begun)

    async def together(way: str) -> list[list[Any]]:
        return await asyncio.gather(*(kind.aask(model, way, text) for text in texts))

    for way in ("awaited", "astream"):
        check(asyncio.run(together(way)))


# --- the device and the event loop


@pytest.mark.parametrize(
    ("kind", "way"),
    list(zip(KINDS, ["awaited", "astream", "astream", "awaited"], strict=True)),
    indirect=["kind"],
)
def test_the_event_loop_runs_while_the_device_computes(kind, make, monkeypatch, way):
    """Tokenizing and each forward pass wait for the loop here: a call that blocks it would never end."""
    model, answers = make(kind), []
    kind.ask(model, "whole")

    def wait_for(loop):
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        answers.append(answered.wait(SOON_S))
        assert answers[-1], "the call blocks the event loop"

    async def ask():
        loop, tokenize = asyncio.get_running_loop(), Engine.tokenize
        monkeypatch.setattr(
            Engine, "tokenize", lambda engine, prompt: wait_for(loop) or tokenize(engine, prompt)
        )
        head = model.backend.engine.runtime.loaded.model.lm_head
        hook = head.register_forward_pre_hook(lambda *_: wait_for(loop))
        await kind.aask(model, way)
        hook.remove()

    asyncio.run(ask())
    assert len(answers) > 8


@pytest.mark.parametrize(
    ("kind", "leave"),
    list(zip([*KINDS, "LlamaIndex, chat", "LangChain, chat"], ["close", "drop", "aclose"] * 2, strict=True)),
    indirect=["kind"],
)
def test_closing_or_dropping_a_stream_stops_the_device(kind, make, passes, stopped, leave):
    model = make(kind, max_tokens=1900)
    kind.ask(model, "whole", max_tokens=1)
    forwards = passes(model.backend)

    async def aclose():
        stream = kind.start(model, "astream", QUESTION)
        stream = await stream if inspect.isawaitable(stream) else stream
        await anext(stream)
        await stream.aclose()

    if leave == "aclose":
        asyncio.run(aclose())
    else:
        stream = kind.start(model, "stream", QUESTION)
        next(stream)
        if leave == "close":
            stream.close()
        del stream
    assert stopped(model.backend, forwards)


# --- what is refused


def test_constructing_opens_nothing(kind, tmp_path):
    """Even a wrong model is noticed at the first call only."""
    model = kind.model(model="nobody/has-this", home=tmp_path / "home")
    assert not (tmp_path / "home").exists()
    with pytest.raises(ModelNotFoundError):
        kind.ask(model, "whole")


WRONG = [
    ({"temprature": 1}, "did you mean 'temperature'"),
    ({"temperature": -1}, "temperature must be 0"),
    ({"max_tokens": 3.5}, "tokens"),
    ({"method": "reuze"}, "did you mean 'reuse'"),
    ({"ratio": 1.5}, "ratio"),
    ({"ratio": "much"}, "ratio"),
    ({"timeout": "long"}, "timeout"),
    ({"passages": [7]}, "passage"),
    ({"presence_penalty": 3}, "presence_penalty"),
]


@pytest.mark.parametrize(("kind", "way"), PAIRS, indirect=["kind"])
def test_invalid_options_prompts_over_the_window_and_late_answers_are_the_frameworks_errors(kind, make, way):
    """Wrong options were TypeErrors of torch; a timeout that is no number was a traceback in a thread."""
    model, (invalid, too_long, timed_out) = make(kind), kind.errors
    for wrong, message in WRONG:
        with pytest.raises(invalid, match=message) as raised:
            kind.ask(model, way, **wrong)
        assert isinstance(raised.value, ValueError)
    with pytest.raises(too_long, match="reads at most") as raised:
        kind.ask(model, way, "word " * 3000)
    assert isinstance(raised.value, PromptTooLongError)
    kind.ask(model, way, timeout=SOON_S)  # loading takes its own time
    with pytest.raises(timed_out, match="within timeout=") as raised:
        kind.ask(model, way, max_tokens=1900, timeout=0.3)
    assert isinstance(raised.value, AnswerTimeout)


# --- what is registered


def test_what_a_retriever_finds_is_registered_with_living_models_that_allow_it(framework, make, tmp_path):
    """An application only swaps the model. Each retrieval is registered for the model's home and collection."""
    model, papers = make(framework), make(framework, collection="papers")
    silent = make(framework, register_retrieved=False, home=str(tmp_path / "silent"))
    gone = make(framework, collection="gone").backend
    assert chunks_of(result_of(framework, model, ASKED)) == []
    assert len(framework.retrieve()) == 3
    known = (each.registry for each in (model.backend, papers.backend, silent.backend, gone))
    assert [len(registry) for registry in known] == [3, 3, 0, 0]
    first = result_of(framework, model, ASKED)
    assert (chunks_of(first), first.report.hits) == (NAMES, 0)
    assert model.backend.engine.finish_background(SOON_S)
    for again in (model, make(framework)):  # a new one finds them on the disk
        assert result_of(framework, again, ASKED).report.hits == 3


def test_a_registry_that_fails_does_not_end_the_retrieval(framework, make, monkeypatch, caplog):
    def fail(*_):
        raise OSError("no room")

    model = make(framework)
    monkeypatch.setattr(type(model.backend.registry), "add", fail)
    assert framework.retrieve()
    assert "could not be registered" in caplog.text


@pytest.mark.parametrize(
    "copied",
    [
        lambda model: pickle.loads(pickle.dumps(model)),
        copy.copy,
        copy.deepcopy,
        lambda model: model.model_copy(update={"collection": "other"}),
    ],
    ids=["pickled", "copied", "deep", "model_copy"],
)
def test_a_copy_registers_what_retrievers_find(framework, make, copied):
    """Pydantic does not validate copies, so they were not tracked; worker processes have only copies."""
    model = copied(make(framework))
    for living in (LANGCHAINS, LLAMA_INDEXES):
        living.models.clear()
    model = copied(model)
    framework.retrieve()
    assert len(model.backend.registry) == 3


def test_passages_are_encoded_once_with_a_progress_bar_and_forgotten(framework, make, capsys):
    model = make(framework, register_retrieved=False)
    assert framework.encode(model) == 3
    said = capsys.readouterr()
    assert said.out == "" and "Encoding passages" in said.err and "3/3" in said.err
    stored = list(model.backend.engine.store.keys())
    assert framework.encode(model, show_progress=False) == 3
    assert capsys.readouterr().err == "" and list(model.backend.engine.store.keys()) == stored
    assert result_of(framework, model, ASKED).report.hits == len(stored) == 3
    assert model.forget(["b"]) > 0
    left = result_of(framework, model, ASKED)
    assert (chunks_of(left), left.report.hits) == (["a", "c"], 2)
