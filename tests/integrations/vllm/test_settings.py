"""Settings of the connector and options of requests: what is accepted, and what is refused by name."""

import pytest

from ragblend.integrations.vllm.settings import ConnectorSettings, RequestOptions
from ragblend.kvstore.errors import UsageError

MINE = ConnectorSettings.of(
    {"collection": "mine", "collections": ["shared"], "method": "cacheblend", "ratio": 0.2}
)


def test_a_request_without_options_gets_the_servers_settings():
    options = RequestOptions.of(MINE, None, 10)
    found = options.method, options.ratio, options.collection, options.chose_method
    assert found == ("cacheblend", 0.2, "mine", False)


def test_a_request_may_choose_its_options():
    said = {"method": "reuse", "collection": "shared", "spans": [[1, 4], [4, 9]], "ratio": 0.5}
    options = RequestOptions.of(MINE, said | {"encode": False, "label": "mine 7"}, 10)
    assert (options.encode, options.label) == (False, "mine 7")
    assert RequestOptions.of(MINE, {"encode": True}, 10).encode is True
    assert RequestOptions.of(ConnectorSettings(encode_missing=False), {"encode": True}, 10).encode is False
    assert (options.method, options.collection, options.chose_method) == ("reuse", "shared", True)
    assert options.spans == ((1, 4), (4, 9))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("probe-shift", "JSON object"),
        ({"methud": "reuse"}, "method"),
        ({"method": "no-such"}, "no-such"),
        ({"method": 3}, "method"),
        ({"ratio": 2}, "ratio"),
        ({"ratio": "much" * 1000}, "ratio"),
        ({"ratio": True}, "ratio"),
        ({"ratio": None}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"off": "no"}, "off"),
        ({"off": 0}, "off"),
        ([{"method": "reuse"}], "JSON object"),
        ({"do_remote_prefill": True, "remote_host": "elsewhere"}, "do_remote_prefill"),
        ({"method": "reuse" * 1000}, "reuse"),
        ({"collection": None}, "None"),
        ({"collection": "../mine"}, "mine"),
        ({"spans": [[0, 1 << 80]]}, "spans"),
        ({"spans": [[0, 3.0]]}, "spans"),
        ({"spans": [[0, 3, 5]]}, "spans"),
        ({"spans": [[[]]] * 1000}, "spans"),
        ({"spans": {"0": 3}}, "spans"),
        ({"collection": "theirs"}, "theirs"),
        ({"collection": ["mine"]}, "collection"),
        ({"spans": [[4, 2]]}, "spans"),
        ({"spans": [[0, 5], [4, 8]]}, "spans"),
        ({"spans": [[0, 11]]}, "spans"),
        ({"spans": [[-1, 3]]}, "spans"),
        ({"spans": [[0, True]]}, "spans"),
        ({"spans": "all"}, "spans"),
        ({"spans": [[3, 3]]}, "spans"),
        ({"encode": "yes"}, "encode"),
        ({"encode": 1}, "encode"),
        ({"label": 7}, "label"),
        ({"label": "x" * 65}, "label"),
        ({"report": None}, "report"),
    ],
)
def test_invalid_options_are_refused_by_name(said, named):
    with pytest.raises(UsageError, match=named) as refused:
        RequestOptions.of(MINE, said, 10)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "said",
    [
        {"methods": "reuse"},
        {"method": "no-such"},
        {"ratio": 7},
        {"ratio": True},
        {"warm": True},
        {"store_bytes": True},
        {"encode_seconds": True},
        {"step_tokens": 0},
        {"collections": "shared"},
        {"shared": "mine"},
        {"minimum_tokens": 0.5},
        {"warm": -1},
        {"store_bytes": 0},
        {"encode_seconds": "1"},
        {"encode_missing": "false"},
        {"home": 5},
        {"collections": None},
    ],
)
def test_invalid_settings_are_refused(said):
    with pytest.raises(UsageError):
        ConnectorSettings.of(said)


def test_a_cache_salt_has_its_own_part_of_a_collection_unless_that_is_shared():
    shares = ConnectorSettings.of({"collections": ["ours"], "shared": ["ours"]})
    spaces = [shares.space_of("default", salt) for salt in (None, "a", "b", "\ud800")]
    assert spaces[0] == "default" and len(set(spaces)) == 4
    assert shares.space_of("ours", "a") == "ours"
    assert RequestOptions.of(shares, {"collection": "ours"}, 9, "a").space == "ours"


def test_a_shared_stores_url_must_hold_no_password():
    assert ConnectorSettings.of({"remote": "redis://host/0"}).remote == "redis://host/0"
    with pytest.raises(UsageError, match="environment") as refused:
        ConnectorSettings.of({"remote": "redis://:hunter2@host/0"})
    assert "hunter2" not in str(refused.value)
