"""Methods by name, with parameters, and from other packages."""

import importlib
import sys

import pytest

from ragblend.engine.selection import ATTENTION_FREE, METHODS, method_names, policy_named
from ragblend.kvstore.errors import UsageError


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("prob", "did you mean 'probe'"),
        ("prob", "cacheblend-gradual"),
        ("", "there are full"),
        ("a3:kernl=1", "did you mean 'kernel'"),
        ("a3:kernl=1", "kernel=5"),
        ("a3:kernel", "name=value"),
        ("a3:", "name=value"),
        ("a3:kernel=two", "whole number"),
        ("a3:kernel=4", "odd"),
        ("epic:first=-1", "first must be at least 0"),
        ("cacheblend:check_layer=-1", "check_layer"),
        ("full:x=1", "there are sure=0.0"),
        ("full:choose=1", "no parameter"),
        ("probe:name=x", "no parameter"),
    ],
)
def test_unknown_methods_and_parameters_are_reported(method, said):
    with pytest.raises(UsageError, match=said):
        policy_named(method)


def test_parameters_set_the_policy_and_its_parts():
    assert policy_named("cacheblend") is METHODS["cacheblend"]
    assert policy_named(ATTENTION_FREE) is ATTENTION_FREE
    policy = policy_named("cacheblend:check_layer=2, shares=3/1")
    assert (policy.check_layer, policy.shares, policy.name) == (
        2,
        "3/1",
        "cacheblend:check_layer=2, shares=3/1",
    )
    assert policy_named("a3:kernel=1").parameters == {"kernel": 1, "figure_gain": 0.0, "sure": 0.0}
    assert METHODS["a3"].parameters == {"kernel": 5, "figure_gain": 0.0, "sure": 0.0}


MODULE = """
from ragblend.engine.selection.base import every_row
from ragblend.engine.selection.static import Beginnings, Static

EVERYTHING = Static(every_row)
FIRST = Static(Beginnings(first=2))
KIND = Static
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(name, **entry points): a distribution of that name, version 1.0, on the path."""

    def install(name, **points):
        (tmp_path / f"{name}.py").write_text(MODULE)
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{point} = {name}:{value}" for point, value in points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[ragblend.policies]", *lines]))
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    return install


def test_other_packages_add_policies(package):
    package("their_policies", everything="EVERYTHING", first="FIRST")
    assert "their_policies" not in sys.modules  # listing imports nothing
    assert {"everything", "first"} <= set(method_names())
    assert "their_policies" not in sys.modules
    assert policy_named("everything").name == "everything"
    assert policy_named("first:first=3").parameters == {"first": 3, "sure": 0.0}
    assert policy_named("epic") is METHODS["epic"] and "everything" not in METHODS
    with pytest.raises(UsageError, match="everything"):
        policy_named("unheard of")


def test_packages_cannot_replace_our_methods(package):
    package("their_policies", **{"probe-shift": "EVERYTHING"})
    assert policy_named("probe-shift") is METHODS["probe-shift"]
    assert method_names().count("probe-shift") == 1


@pytest.mark.parametrize("value", ["ABSENT", "KIND", "__doc__"])
def test_broken_policies_are_reported_with_their_package(package, value):
    package("broken_policies", theirs=value)
    with pytest.raises(
        UsageError, match=r"method 'theirs' of the package broken_policies 1\.0 cannot be used"
    ):
        policy_named("theirs")
    assert policy_named("epic") is METHODS["epic"]


def test_names_that_two_packages_add_are_refused(package):
    package("one_package", theirs="EVERYTHING")
    package("other_package", theirs="FIRST")
    with pytest.raises(UsageError, match=r"(one|other)_package 1\.0 and (one|other)_package 1\.0"):
        policy_named("theirs")
