"""Imports run down only, and the engine and the store know no framework."""

import ast
import graphlib
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# huggingface_hub is a part of transformers' surface: what its own `from_pretrained` downloads with.
ENGINE_LIBRARIES = {"torch", "transformers", "huggingface_hub", "safetensors", "diskcache", "numpy"}
# Asked for inside a function only: where the data folder is, when no home is given; what reads a GGUF; what holds
# answers to a schema; what speaks to a shared store; and what knows the free memory.
LATE_LIBRARIES = {"platformdirs", "gguf", "llguidance", "redis", "obstore", "psutil"}
# Taken where they are there (`kvstore/checksum.py`, `engine/kernels`).
OPTIONAL_LIBRARIES = {"isal", "triton"}
FOLDERS = ("app", "benchmarks", "engine", "integrations", "kvstore", "ui")
# Class names that still have several meanings; RAGBlendLLM is what both frameworks' users import.
SHARED_CLASS_NAMES = {"RAGBlendLLM"}  # one for each framework
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"


def imported_roots(tree: ast.AST, late: bool) -> Iterator[str]:
    """Top-level names of what is imported: with `late`, inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            yield (node.module or "").split(".")[0]
        elif late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported_roots(node, late)


def foreign_imports(folder: Path, late: bool) -> dict[str, set[str]]:
    """What is neither the standard library's nor ragblend's nor one of the five, by file."""
    own = sys.stdlib_module_names | ENGINE_LIBRARIES | OPTIONAL_LIBRARIES | {"ragblend"}
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
    assert trees
    return {
        name: foreign for name, tree in trees.items() if (foreign := set(imported_roots(tree, late)) - own)
    }


@pytest.mark.parametrize("folder", ["kvstore", "engine"])
def test_the_engine_and_the_store_import_with_five_libraries(repo, folder) -> None:
    assert foreign_imports(repo / folder, late=False) == {}
    inside_functions = foreign_imports(repo / folder, late=True)
    assert set().union(*inside_functions.values()) <= LATE_LIBRARIES, inside_functions


def test_foreign_imports_are_seen_inside_functions_and_classes(tmp_path) -> None:
    (tmp_path / "late.py").write_text(
        "def load():\n    from llama_index.core import Document\n    return Document\n"
    )
    (tmp_path / "early.py").write_text("import json, torch\nclass Model:\n    import gradio\n")
    assert foreign_imports(tmp_path, late=False) == {"early.py": {"gradio"}}
    assert foreign_imports(tmp_path, late=True) == {"early.py": {"gradio"}, "late.py": {"llama_index"}}


def imports_within(root: Path, folders: tuple[str, ...]) -> dict[str, set[str]]:
    """Which of the folders' modules each of them imports, in functions and for types only, too."""
    names = dict[str, Path]()
    for path in (path for folder in folders for path in sorted((root / folder).rglob("*.py"))):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(("ragblend", *parts)).removesuffix(".__init__")] = path
    found = {name: set[str]() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= submodules & names.keys() or {node.module} & names.keys()
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & names.keys()
    return found


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_each_other_in_no_circle(repo) -> None:
    folders = ("app", "engine", "integrations", "kvstore", "measuring", "ui")
    imports = imports_within(repo / "ragblend", folders)
    assert len(imports) > 50
    assert circle_in(imports) == []


def test_circles_are_seen_for_types_and_inside_functions(tmp_path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "one.py").write_text("def late():\n    from ragblend.engine import two\n")
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ragblend.engine.one import late\n"
    (tmp_path / "engine" / "two.py").write_text(typed)
    assert set(circle_in(imports_within(tmp_path, ("engine",)))) == {
        "ragblend.engine.one",
        "ragblend.engine.two",
    }


@pytest.fixture
def checked_copy(clean_environment, repo, tmp_path):
    """Lint a copy of the installed package with a line added to some modules: exit code and report."""

    def check(lines: dict[str, str]):
        shutil.copytree(clean_environment.site_packages / "ragblend", tmp_path / "ragblend")
        for module, line in lines.items():
            with (tmp_path / "ragblend" / module).open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")
        command = (LINT_IMPORTS, "--no-cache", "--no-logo", "--config", repo / "pyproject.toml")
        return clean_environment.run(*command, folder=tmp_path)

    return check


def test_the_layers_hold(checked_copy) -> None:
    done = checked_copy({})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kept, 0 broken" in done.stdout


def test_imports_that_run_up_or_out_are_caught(checked_copy) -> None:
    lines = {
        "kvstore/errors.py": "import ragblend.app.settings",
        "integrations/__init__.py": "import ragblend.ui",
        "app/__init__.py": "import benchmarks.common",
        "engine/__init__.py": "def late():\n    import gradio",
    }
    done = checked_copy(lines)
    assert done.returncode == 1
    for contract in (
        "imports run down only",
        "the product knows no benchmark",
        "engine and kvstore know no framework",
    ):
        assert f"{contract} BROKEN" in done.stdout
    for told in ("ragblend.kvstore.errors -> ragblend.app", "ragblend.integrations -> ragblend.ui"):
        assert told in done.stdout
    assert "ragblend.app -> benchmarks" in done.stdout and "ragblend.engine -> gradio" in done.stdout


def test_each_public_class_name_has_one_meaning(repo) -> None:
    paths = [path for folder in FOLDERS for path in sorted((repo / folder).rglob("*.py"))]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert len(names) > 300
    twice = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert twice - SHARED_CLASS_NAMES == set()
