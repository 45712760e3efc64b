"""The options of one call, in either framework: the engine's names, later layers win, nonsense is refused by name."""

import pytest

from ragblend.integrations.backend import Backend, ChatTurn
from ragblend.integrations.calls import Call
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import UsageError

NEUTRAL = {"n": 1, "best_of": 1, "echo": False, "stream_usage": True}
HOSTED = {"api_key": "sk-1", "max_retries": 2, "base_url": "http://localhost", "api_base": "http://localhost"}


def call(*layers):
    return Call.of(Backend(), (), True, *layers)


@pytest.mark.parametrize(
    ("layers", "arguments", "timeout"),
    [
        (
            (
                {"temperature": 0.3, "top_p": 0.5, "max_tokens": 9},
                {"temperature": 0.7, "top_k": 3},
                {"temperature": 0.9, "stop_sequences": ["a"], "seed": None, "timeout": 4},
            ),
            {"temperature": 0.9, "top_p": 0.5, "top_k": 3, "max_new_tokens": 9, "stop": ["a"]},
            4,
        ),
        (({"max_new_tokens": 9}, {"max_completion_tokens": 6}), {"max_new_tokens": 6}, None),
        (
            ({"max_tokens": 9}, NEUTRAL, {"request_timeout": 3, "n": None, "stream_usage": False}),
            {"max_new_tokens": 9},
            3,
        ),
    ],
    ids=["layers", "aliases", "options without effect"],
)
def test_options_are_merged_under_the_engines_names(layers, arguments, timeout):
    merged = call(*layers)
    assert (merged.arguments, merged.timeout) == (arguments, timeout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n=.* is not supported"),
        ({"presence_penalty": 3}, "presence_penalty must be from -2 to 2"),
        ({"logit_bias": {"7": 101}}, "logit_bias must have token ids"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_new_tokens and max_tokens mean the same"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens and max_completion_tokens mean the same"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0"),
        ({"timeout": "soon"}, "timeout must be a number of seconds above 0"),
        ({"temperature": -1}, "temperature must be 0"),
        ({"max_tokens": 3.5}, "max_new_tokens"),
        ({"stop": 3}, "stop"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        call(options)


@pytest.fixture(params=["langchain.ChatRAGBlend", "langchain.RAGBlendLLM", "llama_index.RAGBlendLLM"])
def make(request):
    """The class of a framework's model."""
    framework, _, name = request.param.partition(".")
    return getattr(pytest.importorskip(f"ragblend.integrations.{framework}"), name)


def test_a_model_takes_the_arguments_of_a_hosted_one(make):
    """And refuses what it cannot do, when it is constructed."""
    model = make(temperature=0.5, max_tokens=12, request_timeout=30.0, **HOSTED, **NEUTRAL)
    assert (model.temperature, model.max_new_tokens, model.timeout) == (0.5, 12, 30.0)
    more = "model_kwargs" if "model_kwargs" in make.model_fields else "generate_kwargs"
    assert not getattr(model, more) and "sk-1" not in repr(model)
    for wrong, message in (
        ({"n": 3}, "n=3 is not supported"),
        ({"best_of": 2}, "best_of=2 is not supported"),
    ):
        for given in (wrong, {more: wrong}):
            with pytest.raises(ValueError, match=message):
                make(**given)
    with pytest.raises(ValueError, match="'num_beams' is unknown"):
        make(**{more: {"num_beams": 4}})


def test_a_model_refuses_invalid_parameters_without_showing_a_key(make):
    wrong = {
        "temperature": "hot",
        "max_tokens": 0,
        "stop": 3,
        "timeout": -1,
        "ratio": 1.5,
        "method": "cachblend",
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name.removeprefix("max_")) as raised:
            make(**{name: value, "api_key": "sk-1"})
        assert "sk-1" not in str(raised.value)


def test_the_reason_why_nothing_is_reused_is_logged_once_and_only_where_it_is_true(place, caplog):
    backend, text = Backend(**place), "The bell at the causeway is rung by hand, twice a day. " * 40
    other, learning = (Backend(**place, collection=name) for name in ("other", "learning"))

    def logged(words, named=(), learn=False, backend=backend, **arguments) -> list[str]:
        caplog.clear()
        made = Call.of(backend, named, learn, arguments)
        for _ in range(2):
            made.chat_prompt([ChatTurn("user", (words,))])
        return [record.message.partition("): ")[2][:24] for record in caplog.records]

    def retrieve(text: str) -> None:
        backend.remember([Passage(text, "lamp")])
        backend.registry.retrieved_chars = len(text)

    assert logged("Give this chat a title.") == logged(text, method="full") == []
    other.remember([Passage("Something else, which is known.")])
    assert logged(text, backend=other) == logged(text, learn=True, backend=learning) == []
    assert logged(text) == ["no passage is registered"]
    assert logged(text, named=[Passage("A passage that is elsewhere.")]) == ["the passages that this c"]
    assert logged(text.upper(), learn=True) == []
    lamp = text.replace("bell", "lamp")
    retrieve(lamp)
    assert logged("Condense the question.") == []
    assert logged(lamp + "Who?") == logged(text) == []  # once it was found, none is expected
    retrieve(lamp)
    assert logged(text, learn=True) == ["passages were retrieved,"]


def test_passages_that_cannot_be_read_do_not_fail_a_prompt(place, caplog):
    """Looking for them was only logged, but counting them for the note on such prompts raised an error."""
    backend = Backend(**place)
    (backend.engine.runtime.home / "nodes.sqlite").mkdir(parents=True)
    made = Call.of(backend, (), False).chat_prompt([ChatTurn("user", ("The bell is rung by hand. " * 50,))])
    assert made.token_ids and not made.chunks
    assert [each.message[:26] for each in caplog.records] == ["no passages are looked for"]
