"""What could be wrong with this installation, one check a line: each is a function, each gives one verdict."""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from ragblend.app.upkeep import check_index
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import RagBlendError

LOW_DISK_BYTES = 2 * 1024**3
PACKAGES = ("torch", "transformers", "chromadb", "llama-index-core", "sentence-transformers")


@dataclass(frozen=True)
class Verdict:
    """One line of the doctor's report; a warning is not a failure."""

    name: str
    status: str
    detail: str

    def __post_init__(self) -> None:
        assert self.status in {"ok", "warning", "failed"}, self.status


Check = Callable[[Workspace], tuple[str, str]]


def examine(workspace: Workspace) -> Iterator[Verdict]:
    """All checks in turn; one that cannot be made has failed, with its reason."""
    for name, check in CHECKS.items():
        try:
            yield Verdict(name, *check(workspace))
        except RagBlendError as error:
            yield Verdict(name, "failed", str(error))
        except Exception as error:  # the doctor is for broken installations: he must not fall ill himself
            yield Verdict(name, "failed", f"{type(error).__name__}: {error}")


def _python(_: Workspace) -> tuple[str, str]:
    return "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _packages(_: Workspace) -> tuple[str, str]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return "failed", f"not installed: {', '.join(missing)}; run `pip install ragblend`"
    return "ok", ", ".join(found)


def _device(workspace: Workspace) -> tuple[str, str]:
    import torch

    engine = workspace.engine
    return (
        "ok",
        f"{engine.device} in {engine.dtype}, {torch.get_num_threads()} threads, {os.cpu_count()} cores",
    )


def _model(workspace: Workspace) -> tuple[str, str]:
    engine = workspace.engine
    return "ok", f"{engine.model_name}, window {engine.context_window:,} tokens"


def _gate(workspace: Workspace) -> tuple[str, str]:
    gate = workspace.engine.gate
    if gate.passed:
        return "ok", f"passed ({', '.join(check.name for check in gate.checks)})"
    return "warning", f"answers come from full prefill, slower but right: {gate.reason}"


def _embedder(workspace: Workspace) -> tuple[str, str]:
    workspace.embedder.load()
    return "ok", workspace.embedder.name


def _home(workspace: Workspace) -> tuple[str, str]:
    loose = workspace.home.loose_paths()
    if loose:
        return (
            "warning",
            f"others may read {len(loose)} paths, such as {loose[0]}; run `chmod -R go= {workspace.home.root}`",
        )
    return "ok", f"{workspace.home.root}, readable for you only"


def _disk(workspace: Workspace) -> tuple[str, str]:
    free = shutil.disk_usage(workspace.home.root).free
    status = "warning" if free < LOW_DISK_BYTES else "ok"
    return status, f"{free / 1024**3:.1f} GiB free for the home"


def _library(workspace: Workspace) -> tuple[str, str]:
    damage = workspace.library.damage()
    if damage:
        return (
            "failed",
            f"the registry is damaged: {damage[0]}; restore {workspace.home.library} from a backup",
        )
    documents = workspace.library.documents(workspace.settings.collection)
    states = [str(document.state) for document in documents]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    return "ok", f"{len(documents)} documents" + (f" ({counts})" if counts else "")


def _store(workspace: Workspace) -> tuple[str, str]:
    problems, stats = workspace.store.check(), workspace.store.stats()
    if problems:
        return (
            "failed",
            f"{len(problems)} problems, such as {problems[0].message}; run `ragblend store repair`",
        )
    return "ok", f"{stats.entries} KV values, {stats.bytes / 1024**2:.1f} MiB, all sound"


def _index(workspace: Workspace) -> tuple[str, str]:
    findings = check_index(workspace)
    if findings:
        return "failed", findings[0].message
    return "ok", f"{workspace.index.count()} vectors, as many as the registry has passages"


CHECKS: dict[str, Check] = {
    "python": _python,
    "packages": _packages,
    "device": _device,
    "model": _model,
    "model gate": _gate,
    "embedder": _embedder,
    "home": _home,
    "disk": _disk,
    "library": _library,
    "kv store": _store,
    "vector index": _index,
}
