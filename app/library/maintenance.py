"""Checks a home, rebuilds what the registry allows (Chroma's index, KV), and reports the store's statistics."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ragblend.app.home import Home
from ragblend.app.library.documents import Document, content_digest
from ragblend.app.library.encoding import KvProgress, encode_missing
from ragblend.app.library.ingest import ingest_file, register
from ragblend.app.library.registry import LOST, Library
from ragblend.app.progress import silent
from ragblend.app.rescue import set_aside_files
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import LibraryError

if TYPE_CHECKING:
    from ragblend.kvstore.store import KVStore

Note = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """One problem, and the part that it is in: library, index or kv."""

    part: str
    message: str


@dataclass(frozen=True)
class RepairReport:
    """The result of a repair. lost: paths of damaged documents that stay incomplete, because their files have changed.

    encoded: passages that the repair encoded; with_kv: how many of all have KV now (None: another process encodes).
    """

    vectors: int
    passages: int
    encoded: int
    with_kv: int | None
    damaged_kv: int
    restored: int
    lost: tuple[str, ...]


def check(workspace: Workspace, collection: str | None = None) -> list[Finding]:
    """All problems found by reading the registry, the KV store and the index completely.

    collection: whose index is read; None: those of all.
    """
    findings = check_library(workspace.home, workspace.library)
    findings += [Finding("kv", problem.message) for problem in workspace.store.check()]
    return findings + check_index(workspace, collection)


def check_library(home: Home, library: Library) -> list[Finding]:
    """Documents that lost passages, and damaged files that were set aside when they were opened."""
    aside = [path for database in (home.library, home.chats, home.jobs) for path in set_aside_files(database)]
    findings = [Finding("library", f"{each.path}: {LOST}") for each in library.incomplete_documents()]
    advice = "was damaged, and what could be read is in a new file. Delete it once you do not need it: it holds text."
    return findings + [Finding("library", f"{path} {advice}") for path in aside]


def check_index(workspace: Workspace, collection: str | None = None) -> list[Finding]:
    """Where the vector index (of that collection or of all) or the index of words disagrees with the registry."""
    findings = []
    if damage := workspace.library.words_damage():
        findings.append(Finding("index", f"index of words: {damage}"))
    for each in _workspaces(workspace, collection):
        findings += _check_vectors(each)
    return list(dict.fromkeys(findings))  # collections share Chroma's files, and so their damage


def _check_vectors(workspace: Workspace) -> list[Finding]:
    name = workspace.settings.collection
    try:
        indexed = workspace.index.node_ids()
    except LibraryError as error:
        return [Finding("index", str(error))]
    registered = {node for nodes, _ in workspace.library.embeddings(name) for node in nodes}
    advice = f"`ragblend store repair --collection {name}` rebuilds the index."
    found = [
        (registered - indexed, "passages of the registry are not in the index"),
        (indexed - registered, "vectors belong to no passage"),
    ]
    return [Finding("index", f"{name}: {len(nodes)} {what}; {advice}") for nodes, what in found if nodes]


def _workspaces(workspace: Workspace, collection: str | None) -> list[Workspace]:
    """The workspace of that collection, or of all."""
    spaces = workspace.workspaces
    return [spaces.of(name) for name in ([collection] if collection else spaces.names())]


def repair(
    workspace: Workspace,
    note: Note,
    progress: Callable[[KvProgress], None] = silent,
    is_cancelled: Callable[[], bool] = lambda: False,
    collection: str | None = None,
) -> RepairReport:
    """Rebuild the index, remove damaged KV, encode passages without KV. The caller holds the writer lock.

    note: shows what is being done; is_cancelled: as in `encode_missing`; collection: as in `check`.
    """
    library = workspace.library
    spaces = {each.settings.collection: each for each in _workspaces(workspace, collection)}
    library.rebuild_words()  # first: with a wrong index of words a passage could not be deleted
    incomplete = [each for each in library.incomplete_documents() if each.collection in spaces]
    restored = [each for each in incomplete if _ingest_if_unchanged(spaces[each.collection], each)]
    lost = tuple(each.path for each in incomplete if each not in restored)
    for path in lost:
        note(f"{path}: {LOST} Its file has changed since; until then only its other passages are found.")
    note("Rebuilding the vector index from the registry ...")
    workspace.workspaces.close_indexes()  # an open one would keep using the old files
    vectors = sum(each.index.rebuild(library.embeddings(name)) for name, each in spaces.items())
    note("Checking the stored KV ...")
    damaged = len(workspace.store.repair())
    for name, each in spaces.items():
        register(each, [p for document in library.documents(name) for p in library.passages_of(document.id)])
    note("Encoding passages without KV ...")
    kv = [encode_missing(each, progress, is_cancelled) for each in spaces.values()]
    return RepairReport(
        vectors,
        passages=sum(each.passages for each in kv),
        encoded=sum(each.encoded for each in kv),
        with_kv=None if any(each.with_kv is None for each in kv) else sum(each.with_kv or 0 for each in kv),
        damaged_kv=damaged,
        restored=len(restored),
        lost=lost,
    )


def _ingest_if_unchanged(workspace: Workspace, document: Document) -> bool:
    """Ingest the document again if its file has not changed since. Returns whether it was ingested."""
    path = document.file
    if not path.is_file() or content_digest(path) != document.facts.sha256:
        return False
    ingest_file(workspace, path)
    return True


def store_stats(kv: "KVStore") -> dict[str, Any]:
    """The store's part of `store stats --json`: totals, and for each tier its contents and hit counts.

    A tier that only another process has (the memory of a running server) has no entries, bytes and budget here.
    """
    from ragblend.kvstore.counters import Counts

    whole, own_tiers, counts = kv.stats(), kv.stats_by_tier(), kv.counts_by_tier()
    tiers: dict[str, Any] = {}
    for tier, totals in kv.totals_by_tier().items():
        content = asdict(own_tiers[tier]) if tier in own_tiers else {}
        process = {"this_process": asdict(counts.get(tier, Counts()))}
        tiers[tier] = content | asdict(totals) | process
    held = {"entries": whole.entries, "bytes": whole.bytes, "budget_bytes": whole.budget_bytes}
    value = held | {"policy": kv.policy, "tiers": tiers}
    if kv.remote is not None:
        kv.remote.check()
        value["remote"] = asdict(kv.remote.stats())
    return value
