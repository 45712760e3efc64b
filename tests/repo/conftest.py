"""The wheel, built from a copy of the sources, and a clean environment that it is installed in."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "ragblend", "kvstore", "engine", "integrations", "app", "ui")


@dataclass(frozen=True)
class CleanEnvironment:
    """A new virtual environment whose only package is the wheel; other people's packages are lent to it by a .pth."""

    python: Path
    site_packages: Path
    empty_folder: Path

    def run(self, *command: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        return run(command, folder or self.empty_folder)

    def python_says(self, code: str) -> str:
        """What `code` prints when it runs in an empty folder."""
        done = self.run(self.python, "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def run(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in `folder` without what the test run, or make around it, left in the environment."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MAKE", "MFLAGS"))
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes beside the sources, and puts what it left there into the next wheel."""
    copy = tmp_path_factory.mktemp("sources")
    for name in FOLDERS:
        shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy / name)
    done = run(
        [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('out')"], copy
    )
    assert done.returncode == 0, done.stderr
    return next((copy / "out").glob("ragblend-*.tar.gz"))


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as by an installer that is given that."""
    out = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", out]
    done = run([sys.executable, "-m", "pip", "wheel", *options, sdist], out)
    assert done.returncode == 0, done.stderr
    return next(out.glob("ragblend-*.whl"))


@pytest.fixture(scope="session")
def clean_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False)
    python = root / "bin" / "python"
    options = ["--quiet", "--no-deps", "--no-index"]
    done = run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], root)
    assert done.returncode == 0, done.stderr
    site_packages = next(root.glob("lib/python*/site-packages"))
    # Lines of a .pth are put on the path as they are: .pth files *in* that folder, such as the one of an editable
    # ragblend, are not read.
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    return CleanEnvironment(python, site_packages, tmp_path_factory.mktemp("empty"))
