"""What a call is told, by either framework: the engine's names, the last layer wins, nonsense is named."""

import pytest

from ragblend.integrations.backend import Backend, Turn
from ragblend.integrations.calls import Call
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import UsageError


def call(*layers):
    return Call.of(Backend(), (), True, *layers)


def test_the_last_layer_that_says_something_wins():
    fields, more = {"temperature": 0.3, "top_p": 0.5, "max_tokens": 9}, {"temperature": 0.7, "top_k": 3}
    told = call(fields, more, {"temperature": 0.9, "stop_sequences": ["a"], "seed": None, "timeout": 4})
    expected = {"temperature": 0.9, "top_p": 0.5, "top_k": 3, "max_new_tokens": 9, "stop": ["a"]}
    assert (told.arguments, told.timeout) == (expected, 4)
    assert call({"max_new_tokens": 9}, {"max_completion_tokens": 6}).arguments == {"max_new_tokens": 6}


NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "stream_usage": True,
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "logit_bias": {},
}


def test_what_says_nothing_here_is_taken_and_another_value_of_it_refused_by_name():
    told = call({"max_tokens": 9}, NEUTRAL, {"request_timeout": 3, "n": None, "stream_usage": False})
    assert (told.arguments, told.timeout) == ({"max_new_tokens": 9}, 3)
    for name, value in {"n": 2, "presence_penalty": 0.1, "logit_bias": {"7": 100}}.items():
        with pytest.raises(UsageError, match=f"{name}=.* cannot be done"):
            call({name: value})


def chat_model(**told):
    from ragblend.integrations.langchain import ChatRAGBlend

    return ChatRAGBlend(**told)


def text_model(**told):
    from ragblend.integrations.langchain import RAGBlendLLM

    return RAGBlendLLM(**told)


def llama_index_model(**told):
    from ragblend.integrations.llama_index import RAGBlendLLM

    return RAGBlendLLM(**told)


@pytest.mark.parametrize("make", [chat_model, text_model, llama_index_model])
def test_a_constructor_of_another_model_is_taken_as_it_is(make):
    """And what cannot be done is refused there, not at the first call, in more options too."""
    told = {
        "temperature": 0.5,
        "max_tokens": 12,
        "request_timeout": 30.0,
        "api_key": "sk-1",
        "max_retries": 2,
        "base_url": "http://localhost",
        "api_base": "http://localhost",
    }
    model = make(**told, **NEUTRAL)
    assert (model.temperature, model.max_new_tokens, model.timeout) == (0.5, 12, 30.0)
    more = "model_kwargs" if "model_kwargs" in type(model).model_fields else "generate_kwargs"
    assert not getattr(model, more) and "sk-1" not in repr(model)
    for wrong, word in (({"n": 3}, "n=3"), ({"presence_penalty": 0.5}, "presence_penalty=0.5")):
        for given in (wrong, {more: wrong}):
            with pytest.raises(ValueError, match=f"{word} cannot be done"):
                make(**given)
    with pytest.raises(ValueError, match="'num_beams' is unknown"):
        make(**{more: {"num_beams": 4}})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_new_tokens and max_tokens mean the same"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens and max_completion_tokens mean the same"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0"),
        ({"timeout": "soon"}, "timeout must be a number of seconds above 0"),
    ],
)
def test_nonsense_is_named(told, message):
    with pytest.raises(UsageError, match=message):
        call(told)


def test_why_nothing_is_reused_is_said_once_for_each_reason_and_only_where_it_is_true(place, caplog):
    backend, text = Backend(**place), "The bell at the causeway is rung by hand, twice a day. " * 40
    other, learning = (Backend(**place, collection=name) for name in ("other", "learning"))

    def said(words, named=(), learn=False, backend=backend, **arguments) -> list[str]:
        caplog.clear()
        told = Call.of(backend, named, learn, arguments)
        for _ in range(2):
            told.chat_prompt([Turn("user", (words,))])
        return [record.message.partition("): ")[2][:24] for record in caplog.records]

    def retrieved(changed: str) -> None:
        backend.remember([Passage(changed, "lamp")])
        backend.registry.awaited = len(changed)

    assert said("Give this chat a title.") == said(text, method="full") == []
    other.remember([Passage("Something else, which is known.")])
    assert said(text, backend=other) == said(text, learn=True, backend=learning) == []
    assert said(text) == ["nothing is known in this"]
    assert said(text, named=[Passage("A passage that is elsewhere.")]) == ["passages that this call "]
    assert said(text.upper(), learn=True) == []
    retrieved(text.replace("bell", "lamp"))
    assert said("Condense the question.") == []
    assert said(text.replace("bell", "lamp") + "Who?") == said(text) == []  # found, and then none is awaited
    retrieved(text.replace("bell", "lamp"))
    assert said(text, learn=True) == ["passages were retrieved,"]
