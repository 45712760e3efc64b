"""Is everything in place? And making again what can be made: Chroma's index and KV, from the registry."""

from collections.abc import Callable
from dataclasses import dataclass

from ragblend.app.library import Library
from ragblend.app.workspace import Workspace
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import LibraryError

Note = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be, and which part it is in: library, index or kv."""

    part: str
    message: str


@dataclass(frozen=True)
class Repaired:
    """What a repair made or took out."""

    vectors: int
    encoded: int
    damaged_kv: int


def check(workspace: Workspace) -> list[Finding]:
    """Everything that is wrong, from reading all of the registry, the index and the KV store."""
    findings = [Finding("library", text) for text in workspace.library.damage()]
    findings += [Finding("kv", problem.message) for problem in workspace.store.check()]
    return findings + check_index(workspace)


def check_index(workspace: Workspace) -> list[Finding]:
    """Where the index and the registry disagree about what there is."""
    try:
        indexed = workspace.index.node_ids()
    except LibraryError as error:
        return [Finding("index", str(error))]
    registered = _registered(workspace.library, workspace.settings.collection)
    advice = "`ragblend store repair` builds the index again."
    findings = []
    if missing := len(registered - indexed):
        findings.append(
            Finding("index", f"{missing} passages of the registry are not in the index; {advice}")
        )
    if extra := len(indexed - registered):
        findings.append(Finding("index", f"{extra} vectors belong to no passage; {advice}"))
    return findings


def repair(workspace: Workspace, note: Note, progress: Callable[[int, int], None] | None = None) -> Repaired:
    """Build the index again, take damaged KV out, encode what is missing. The caller holds the writer lock."""
    library, collection = workspace.library, workspace.settings.collection
    if damage := library.damage():
        raise LibraryError(
            f"Repairing {workspace.home.root}: the registry {library.path} itself is damaged ({damage[0]}). It cannot "
            "be built from anything else: restore it from a backup, or move it away and ingest the documents again."
        )
    note("Building the vector index from the registry ...")
    vectors = workspace.index.rebuild(library.embeddings(collection))
    note("Looking through the stored KV ...")
    damaged = len(workspace.store.repair())
    passages = [p for document in library.documents(collection) for p in library.passages_of(document.id)]
    workspace.known_passages.add([Passage(p.text, p.node_id) for p in passages])
    note("Encoding what is missing ...")
    nodes, texts = [p.node_id for p in passages], [p.text for p in passages]
    encoded = workspace.engine.encode(texts, node_ids=nodes, progress=progress).encoded if passages else 0
    return Repaired(vectors, encoded, damaged)


def _registered(library: Library, collection: str) -> set[str]:
    return {node for nodes, _ in library.embeddings(collection) for node in nodes}
