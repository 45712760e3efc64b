"""Is everything in place? And making again what can be made: Chroma's index and KV, from the registry."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ragblend.app.documents import Document, content_digest, document_id
from ragblend.app.encoding import KvProgress, encode_missing
from ragblend.app.ingest import ingest_file
from ragblend.app.library import DAMAGED, Library
from ragblend.app.progress import silent
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


def check(workspace: Workspace) -> list[Finding]:
    """Everything that is wrong, from reading all of the registry, the index and the KV store.

    Where the registry's file itself is damaged nothing else is looked at.
    """
    findings = check_library(workspace.library)
    if workspace.library.damage:
        return findings
    findings += [Finding("kv", problem.message) for problem in workspace.store.check()]
    return findings + check_index(workspace)


def check_library(library: Library) -> list[Finding]:
    """The file as a whole, or else every document and passage against its checksum."""
    if library.damage:
        return [Finding("library", library.damage)]
    return [Finding("library", f"{each.path}: {DAMAGED}") for each in library.damaged_documents()]


def check_index(workspace: Workspace) -> list[Finding]:
    """Where the index and the registry disagree about what there is."""
    try:
        indexed = workspace.index.node_ids()
    except LibraryError as error:
        return [Finding("index", str(error))]
    collection = workspace.library.embeddings(workspace.settings.collection)
    registered = {node for nodes, _ in collection for node in nodes}
    advice = "`ragblend store repair` builds the index again."
    findings = []
    if damage := workspace.library.words_damage():
        findings.append(Finding("index", f"that of words: {damage}"))
    if missing := len(registered - indexed):
        findings.append(
            Finding("index", f"{missing} passages of the registry are not in the index; {advice}")
        )
    if extra := len(indexed - registered):
        findings.append(Finding("index", f"{extra} vectors belong to no passage; {advice}"))
    return findings


def repair(workspace: Workspace, note: Note, progress: Callable[[KvProgress], None] = silent) -> Repaired:
    """Build the index again, take damaged KV out, encode what is missing. The caller holds the writer lock.

    Raises LibraryError where the registry's file itself is damaged: it cannot be built from anything else.
    """
    library, collection = workspace.library, workspace.settings.collection
    library.index_words()  # first: a passage whose words it has otherwise could not be taken out
    damaged_here = [each for each in library.damaged_documents() if each.collection == collection]
    lost = tuple(each.path for each in damaged_here if not _restored(workspace, each))
    for path in lost:
        note(f"{path}: {DAMAGED} Its file is not what was ingested; until then its passages are left out.")
    note("Building the vector index from the registry ...")
    vectors = workspace.index.rebuild(library.embeddings(collection))
    note("Looking through the stored KV ...")
    damaged = len(workspace.store.repair())
    passages = [
        p for d in library.documents(collection) if d.reason != DAMAGED for p in library.passages_of(d.id)
    ]
    workspace.known_passages.add([Passage(p.text, p.node_id) for p in passages])
    note("Encoding what is missing ...")
    if passages:
        workspace.engine.enter([p.text for p in passages], [p.node_id for p in passages])
    kv = encode_missing(workspace, progress)
    restored = len(damaged_here) - len(lost)
    return Repaired(vectors, kv.passages, kv.encoded, kv.with_kv, damaged, restored, lost)


def _restored(workspace: Workspace, document: Document) -> bool:
    path = Path(document.path)
    if document.id != document_id(document.collection, document.path) or not path.is_file():
        return False
    if workspace.library.is_sealed(document.id):
        if content_digest(path) != document.facts.sha256:
            return False
    else:  # its row cannot be changed, and says nothing of the file that could be believed
        workspace.library.remove(document.id)
    ingest_file(workspace, path)
    return True
