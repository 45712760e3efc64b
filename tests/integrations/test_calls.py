"""What a call is told, by either framework: the engine's names, the last layer wins, nonsense is named."""

import pytest

from ragblend.integrations.backend import Backend
from ragblend.integrations.calls import Call
from ragblend.kvstore.errors import UsageError


def call(*layers):
    return Call.of(Backend(), (), True, *layers)


def test_the_last_layer_that_says_something_wins():
    fields, more = {"temperature": 0.3, "top_p": 0.5, "max_tokens": 9}, {"temperature": 0.7, "top_k": 3}
    told = call(fields, more, {"temperature": 0.9, "stop_sequences": ["a"], "seed": None, "timeout": 4})
    expected = {"temperature": 0.9, "top_p": 0.5, "top_k": 3, "max_new_tokens": 9, "stop": ["a"]}
    assert (told.arguments, told.timeout) == (expected, 4)
    assert call({"max_new_tokens": 9}, {"max_completion_tokens": 6}).arguments == {"max_new_tokens": 6}


@pytest.mark.parametrize(
    ("told", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.0}, 1.0),
        ({"do_sample": True, "temperature": 0.4}, 0.4),
        ({"do_sample": False, "temperature": 0.4}, 0.0),
    ],
)
def test_do_sample_is_said_by_the_temperature(told, temperature):
    assert call({"temperature": 0.2}, told).arguments == {"temperature": temperature}


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
