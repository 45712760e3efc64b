"""Is everything in place, and how much? And making again what can be made: Chroma's index and KV, from the registry."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.home import Home
from ragblend.app.library.documents import Document, content_digest
from ragblend.app.library.encoding import KvProgress, encode_missing
from ragblend.app.library.ingest import ingest_file
from ragblend.app.library.registry import LOST, Library
from ragblend.app.progress import silent
from ragblend.app.rescue import set_aside_files
from ragblend.app.workspace import Workspace
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import LibraryError

if TYPE_CHECKING:
    from ragblend.kvstore.store import KVStore

Note = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be, and which part it is in: library, index or kv."""

    part: str
    message: str


@dataclass(frozen=True)
class RepairReport:
    """What a repair made or took out. lost: paths of damaged documents whose files are no longer what they were.

    encoded: by the repair itself; with_kv of all passages have KV at its end (None: another process encodes them).
    """

    vectors: int
    passages: int
    encoded: int
    with_kv: int | None
    damaged_kv: int
    restored: int
    lost: tuple[str, ...]


def check(workspace: Workspace, collection: str | None = None) -> list[Finding]:
    """Everything that is wrong, from reading all of the registry, the KV store and the index.

    collection: whose index; None: that of every one.
    """
    findings = check_library(workspace.home, workspace.library)
    findings += [Finding("kv", problem.message) for problem in workspace.store.check()]
    return findings + check_index(workspace, collection)


def check_library(home: Home, library: Library) -> list[Finding]:
    """Documents that have lost passages, and damaged files that were set aside when they were opened."""
    aside = [path for database in (home.library, home.chats, home.jobs) for path in set_aside_files(database)]
    findings = [Finding("library", f"{each.path}: {LOST}") for each in library.incomplete_documents()]
    said = (
        "was damaged, and what could be read of it is in a new file. Remove it once you do not need it: your text is "
        "in it."
    )
    return findings + [Finding("library", f"{path} {said}") for path in aside]


def check_index(workspace: Workspace, collection: str | None = None) -> list[Finding]:
    """Where the index of that collection or of all, or that of words, and the registry disagree about what there is."""
    findings = []
    if damage := workspace.library.words_damage():
        findings.append(Finding("index", f"that of words: {damage}"))
    for each in _opened(workspace, collection):
        findings += _check_vectors(each)
    return list(dict.fromkeys(findings))  # collections share Chroma's files, and what is wrong with these


def _check_vectors(workspace: Workspace) -> list[Finding]:
    name = workspace.settings.collection
    try:
        indexed = workspace.index.node_ids()
    except LibraryError as error:
        return [Finding("index", str(error))]
    registered = {node for nodes, _ in workspace.library.embeddings(name) for node in nodes}
    advice = f"`ragblend store repair --collection {name}` builds the index again."
    found = [
        (registered - indexed, "passages of the registry are not in the index"),
        (indexed - registered, "vectors belong to no passage"),
    ]
    return [Finding("index", f"{name}: {len(nodes)} {said}; {advice}") for nodes, said in found if nodes]


def _opened(workspace: Workspace, collection: str | None) -> list[Workspace]:
    """Of that collection of the home, or of every one."""
    spaces = workspace.workspaces
    return [spaces.of(name) for name in ([collection] if collection else spaces.names())]


def repair(
    workspace: Workspace,
    note: Note,
    progress: Callable[[KvProgress], None] = silent,
    leave: Callable[[], bool] = lambda: False,
    collection: str | None = None,
) -> RepairReport:
    """Build the index again, take damaged KV out, encode what is missing. The caller holds the writer lock.

    leave: as in `encode_missing`; collection: as in `check`.
    """
    library = workspace.library
    spaces = {each.settings.collection: each for each in _opened(workspace, collection)}
    library.index_words()  # first: a passage whose words it has otherwise could not be taken out
    incomplete = [each for each in library.incomplete_documents() if each.collection in spaces]
    lost = tuple(each.path for each in incomplete if not _restored(spaces[each.collection], each))
    for path in lost:
        note(
            f"{path}: {LOST} Its file is not what was ingested; until then only its other passages are found."
        )
    note("Building the vector index from the registry ...")
    workspace.workspaces.close_indexes()  # one that is open would keep hold of files that another one makes anew
    vectors = sum(each.index.rebuild(library.embeddings(name)) for name, each in spaces.items())
    note("Looking through the stored KV ...")
    damaged = len(workspace.store.repair())
    for each in spaces.values():
        _enter(each)
    note("Encoding what is missing ...")
    kv = [encode_missing(each, progress, leave) for each in spaces.values()]
    return RepairReport(
        vectors,
        passages=sum(each.passages for each in kv),
        encoded=sum(each.encoded for each in kv),
        with_kv=None if any(each.with_kv is None for each in kv) else sum(each.with_kv or 0 for each in kv),
        damaged_kv=damaged,
        restored=len(incomplete) - len(lost),
        lost=lost,
    )


def _enter(workspace: Workspace) -> None:
    """Make known again, to the engine and to frameworks, what the collection's passages are."""
    library, known = workspace.library, workspace.library.documents(workspace.settings.collection)
    passages = [p for d in known for p in library.passages_of(d.id)]
    workspace.known_passages.add([Passage(p.text, p.node_id) for p in passages])
    if passages:
        workspace.engine.enter([p.text for p in passages], [p.node_id for p in passages])


def _restored(workspace: Workspace, document: Document) -> bool:
    """Whether the document's file is what was ingested; then it is ingested again."""
    path = Path(document.path)
    if not path.is_file() or content_digest(path) != document.facts.sha256:
        return False
    ingest_file(workspace, path)
    return True


def stats_value(kv: "KVStore") -> dict[str, Any]:
    """What `store stats --json` says of the store: the whole, and for each tier what it holds and how it did.

    A tier that only other processes have (the memory of a running server) has no entries, bytes and budget here.
    """
    from ragblend.kvstore.uses import Counts

    whole, here, counts = kv.stats(), kv.stats_by_tier(), kv.counts_by_tier()
    tiers: dict[str, Any] = {}
    for tier, totals in kv.totals_by_tier().items():
        now = asdict(here[tier]) if tier in here else {}
        process = {"this_process": asdict(counts.get(tier, Counts()))}
        tiers[tier] = now | asdict(totals) | process
    held = {"entries": whole.entries, "bytes": whole.bytes, "budget_bytes": whole.budget_bytes}
    value = held | {"policy": kv.policy, "tiers": tiers}
    if kv.remote is not None:
        kv.remote.check()
        value["remote"] = asdict(kv.remote.stats())
    return value
