"""`ragblend doctor`'s checks of the installation: each is a function in the table CHECKS."""

import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from ragblend.app.library.maintenance import check_index, check_library
from ragblend.app.library.sandbox import run_in_sandbox, unneeded_rights
from ragblend.app.library.similarity import recorded_similarity
from ragblend.app.words import plural
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import RagBlendError, UnsupportedModelError, install_hint
from ragblend.kvstore.system import HAS_MODES

Status = Literal["ok", "warning", "failed"]
Check = Callable[[Workspace], tuple[Status, str]]
LOW_DISK_BYTES = 2 * 1024**3
PACKAGES = ("torch", "transformers", "chromadb", "llama-index-core")


@dataclass(frozen=True)
class CheckResult:
    """One line of the report; a warning is not a failure."""

    name: str
    status: Status
    detail: str


def examine(workspace: Workspace) -> Iterator[CheckResult]:
    """Run all checks in turn; one that raises has failed, with its reason."""
    for name, check in CHECKS.items():
        try:
            yield CheckResult(name, *check(workspace))
        except RagBlendError as error:
            yield CheckResult(name, "failed", str(error))
        except Exception as error:  # one broken part must not stop the report
            yield CheckResult(name, "failed", f"{type(error).__name__}: {error}")


def _python(_: Workspace) -> tuple[Status, str]:
    return "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _packages(_: Workspace) -> tuple[Status, str]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return "failed", f"not installed: {', '.join(missing)}; run `{install_hint()}`"
    return "ok", ", ".join(found)


def _device(workspace: Workspace) -> tuple[Status, str]:
    import torch

    engine, threads = workspace.engine, torch.get_num_threads()
    return "ok", f"{engine.device} in {engine.dtype}, {threads} threads, {os.cpu_count()} cores"


def _model(workspace: Workspace) -> tuple[Status, str]:
    engine = workspace.engine
    detail = f"{engine.model_name}, window {engine.context_window:,} tokens"
    with suppress(UnsupportedModelError):  # reported by `_gate`
        detail += f", {engine.token_bytes / 1000:.0f} KB of KV a token in {engine.dtype}"
    return "ok", detail


def _gate(workspace: Workspace) -> tuple[Status, str]:
    gate = workspace.engine.gate
    if gate.passed:
        return "ok", f"passed ({', '.join(check.name for check in gate.checks)})"
    return "warning", f"answers are computed by full prefill, which is slower but exact: {gate.reason}"


def _embedder(workspace: Workspace) -> tuple[Status, str]:
    embedder, known = workspace.embedder, workspace.library.embedder(workspace.settings.collection)
    embedder.load()
    if known is None or known.unrelated is None:
        if recorded_similarity(embedder.name) is not None:
            return "ok", embedder.name
        how = "too few passages to measure which ones are unrelated to a question: all are used"
    else:
        how = f"unrelated to a question below {known.unrelated.best:.2f}, measured with {known.measured} passages"
    return "ok", f"{embedder.name}; {how}"


def _home(workspace: Workspace) -> tuple[Status, str]:
    loose = workspace.home.paths_open_to_others()
    if loose:
        advice = f"run `chmod -R go= {workspace.home.root}`"
        return "warning", f"other users may read {len(loose)} paths, such as {loose[0]}; {advice}"
    readers = "readable for you only" if HAS_MODES else "readable for all who may read its parent folder"
    return "ok", f"{workspace.home.root}, {readers}"


def _disk(workspace: Workspace) -> tuple[Status, str]:
    free = shutil.disk_usage(workspace.home.root).free
    return "warning" if free < LOW_DISK_BYTES else "ok", f"{free / 1024**3:.1f} GiB free for the home"


def _library(workspace: Workspace) -> tuple[Status, str]:
    library, states = workspace.library, Counter[str]()
    if findings := check_library(workspace.home, library):
        return "failed", findings[0].message + (f" (and {len(findings) - 1} more)" if findings[1:] else "")
    names = library.collections()
    for name in names:
        states.update(library.counts_by_state(name))
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()) if count)
    where = f" in {', '.join(names)}" if len(names) > 1 else ""
    return "ok", f"{plural(states.total(), 'document')}{where}" + (f" ({counts})" if counts else "")


def _parser(workspace: Workspace) -> tuple[Status, str]:
    registry = workspace.library.path
    if left := run_in_sandbox(unneeded_rights, registry.with_name("none"), str(registry)):
        return (
            "warning",
            f"on this system a hostile document that takes over its parser could {' and '.join(left)}",
        )
    return "ok", "may read its document, but may not change files or use the network"


def _store(workspace: Workspace) -> tuple[Status, str]:
    problems, stats = workspace.store.check(), workspace.store.stats()
    if problems:
        return (
            "failed",
            f"{len(problems)} problems, such as {problems[0].message}; run `ragblend store repair`",
        )
    return "ok", f"{stats.entries} KV values, {stats.bytes / 1024**2:.1f} MiB, all sound"


def _remote(workspace: Workspace) -> tuple[Status, str]:
    remote = workspace.store.remote
    if remote is None:
        return "ok", "not configured"
    remote.check()
    stats = remote.stats()
    return "ok" if remote.is_available else "warning", f"{stats.where}: {stats.state}"


def _index(workspace: Workspace) -> tuple[Status, str]:
    workspaces = workspace.workspaces
    if findings := check_index(workspace):
        return "failed", findings[0].message
    vectors = sum(workspaces.of(name).index.count() for name in workspaces.names())
    return "ok", f"{vectors} vectors, one for each passage in the registry"


CHECKS: dict[str, Check] = {
    "python": _python, "packages": _packages, "device": _device, "model": _model, "self-test": _gate,
    "embedder": _embedder, "home": _home, "disk": _disk, "library": _library, "parser": _parser,
    "kv store": _store, "shared store": _remote, "vector index": _index,
}  # fmt: skip
