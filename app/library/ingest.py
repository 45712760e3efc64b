"""Ingests documents: parse, cut, embed, index; one at a time, so that an interruption loses at most one.

The order of writes makes it safe to stop anywhere:
registry row "pending" -> passages and embeddings (one transaction) -> Chroma, node ids -> delete stale ones -> "done".

The next run continues each document that is not "done", from its passages if those are stored already. A document that
is "done" can be searched. Its KV is encoded later (`encoding.py`); until then, a question computes it in its context.
If many files wait, only a third of each passage's windows is embedded at first (a sketch), and the rest
(`embed_in_full`) after all files.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ragblend.app.library import readers
from ragblend.app.library.chunking import cut_document
from ragblend.app.library.discovery import Discovery, discover, is_gone, is_replaced
from ragblend.app.library.documents import (
    Document,
    DocumentPassage,
    DocumentState,
    FileFacts,
    content_digest,
    id_of_document,
    printable,
)
from ragblend.app.library.encoding import KvProgress, KvReport, encode_missing
from ragblend.app.library.file_checks import check_file
from ragblend.app.library.registry import SKETCHED, Embeddings
from ragblend.app.library.removal import delete_abandoned, remove_document
from ragblend.app.library.switching import choose_embedder, switch_to_next_embedder
from ragblend.app.library.text_recognition import TextRecognition
from ragblend.app.progress import OnProgress, ProgressCounter, silent
from ragblend.app.workspace import Workspace
from ragblend.integrations.embeddings import Part, merge_parts
from ragblend.integrations.passages import Passage as KnownPassage
from ragblend.kvstore.errors import (
    Cancelled,
    DocumentError,
    EmptyDocumentError,
    UnreadableDocumentError,
)

MANY_FILES = 16  # a document is sketched first if at least so many files wait after it,
MANY_PASSAGES = 200  # or if it has at least so many passages
READ_ATTEMPTS = 3  # of a file that changes while it is read
CHANGED_WHILE_READ = (
    "it changed while it was read, so parts of two versions may be in it; the next ingest reads it again"
)


@dataclass
class IngestReport:
    """The result of one run. failed: path -> (name of the error, reason); gone: documents whose file no longer exists.

    skipped: path -> reason, as in `Discovery`, and files that were deleted before they could be read; notes: path ->
    what was guessed, replaced or left out when the file was read in this run; pruned: documents that were removed
    because their file is gone; kv: the result of encoding, None if that was not requested.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    passages: int = 0
    tokens: int = 0
    embedded: int = 0
    encoded: int = 0
    interrupted: bool = False
    notice: str | None = None
    kv: KvReport | None = None

    def to_json(self) -> dict[str, Any]:
        failed = [{"path": path, "type": kind, "reason": why} for path, (kind, why) in self.failed.items()]
        skipped = [{"path": path, "reason": why} for path, why in self.skipped.items()]
        notes = [{"path": path, "notes": said} for path, said in self.notes.items()]
        kv = asdict(self.kv) if self.kv else None
        return {**self.__dict__, "failed": failed, "skipped": skipped, "notes": notes, "kv": kv}


def ingest(workspace: Workspace, paths: Sequence[Path], on_progress: OnProgress = silent) -> IngestReport:
    """Ingest files and folders, and encode passages without KV. Raises as `ingest_paths` and `encode_missing` do."""
    report = ingest_paths(workspace, paths, on_progress)
    if not report.interrupted:
        report.interrupted = not (
            embed_in_full(workspace, on_progress) and switch_to_next_embedder(workspace, on_progress)
        )

    def show(kv: KvProgress) -> None:
        on_progress("encode", kv.done, kv.total)

    return report if report.interrupted else encode_and_report(workspace, report, show)


def ingest_paths(
    workspace: Workspace,
    paths: Sequence[Path],
    on_progress: OnProgress = silent,
    prune: bool = False,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> IngestReport:
    """Make files and folders searchable, without KV. Ctrl-C ends the run early and keeps what is done
    (`report.interrupted`), and so does a KeyboardInterrupt of is_cancelled(), called between two passages or pages.

    prune: remove the documents of these folders whose file is gone. Those without passages, and those where a folder
    has replaced the file or a file its folder, are removed in any case. One bad document is listed and stops nothing; a
    full disk, a missing model and the like are raised. Between two files other threads may take the writer lock.
    """
    run, workspaces = _IngestRun(workspace, ProgressCounter(on_progress, is_cancelled)), workspace.workspaces
    is_over = has_yielded = False
    try:
        steps = run.ingest_all(discover(paths, workspace.settings.skip, workspace.home.root), prune)
        while not is_over:
            with workspaces.writing(patient=has_yielded):
                delete_abandoned(workspaces)
                is_over = not any(workspaces.has_waiting_writer for _ in steps)
            has_yielded = True
    except KeyboardInterrupt:
        run.report.interrupted = True
    return run.report


def embed_in_full(
    workspace: Workspace, on_progress: OnProgress = silent, is_cancelled: Callable[[], bool] = lambda: False
) -> bool:
    """Embed the windows that sketches left out. False if Ctrl-C or is_cancelled() ended it; what is done is kept.

    The writer lock is held for a moment per document.
    """
    found = workspace.library.documents(workspace.settings.collection)
    waiting = [document for document in found if document.recipe.endswith(SKETCHED)]
    meter = ProgressCounter(on_progress, is_cancelled)
    try:
        if waiting:
            meter.count("embed", more=sum(document.passages for document in waiting))
        for document in waiting:
            meter.name = document.name
            _embed_rest(workspace, document, meter)
            meter.count("embed", done=document.passages)
    except (Cancelled, KeyboardInterrupt):
        return False
    return True


def _embed_rest(workspace: Workspace, document: Document, meter: ProgressCounter) -> None:
    library = workspace.library
    passages, (nodes, sketches) = library.passages_of(document.id), library.embeddings_of(document.id)
    texts = [passage.text for passage in passages]
    rest = workspace.embedder.embed_passages(texts, meter.within("embed"), "rest")
    with workspace.workspaces.writing():
        if library.documents_with([document.id]).get(document.id) != document:
            return  # deleted or ingested again meanwhile
        rows = [merge_parts(*both) for both in zip(sketches, rest, strict=True)]
        workspace.index.upsert(nodes, rows)  # first: after an interruption here, it is done again
        recipe = document.recipe.removesuffix(SKETCHED)
        library.replace_passages(document.id, document.facts, recipe, passages, rows, document.notes)


def encode_and_report(
    workspace: Workspace,
    report: IngestReport,
    show: Callable[[KvProgress], None],
    is_cancelled: Callable[[], bool] = lambda: False,
) -> IngestReport:
    """Encode passages without KV and add the result to the report. The writer lock is not held."""
    report.kv = kv = encode_missing(workspace, show, is_cancelled)
    report.encoded, report.tokens = kv.encoded, kv.tokens
    report.interrupted = kv.stopped == "left"
    report.notice = kv.message or None
    return report


def ingest_file(
    workspace: Workspace,
    path: Path,
    show: OnProgress = silent,
    is_cancelled: Callable[[], bool] = lambda: False,
    files_waiting: int = 0,
) -> IngestReport:
    """Ingest one file, for a caller that holds the writer lock.

    files_waiting: how many files wait after it; if many, it is only sketched, and `embed_in_full` does the rest.
    Raises DocumentError, Cancelled, and the errors that stop a whole run.
    """
    run = _IngestRun(workspace, ProgressCounter(show, is_cancelled))
    run.ingest_one(path, files_waiting)
    return run.report


class _IngestRun:
    """One ingest run: the documents in turn, and the report on them."""

    def __init__(self, workspace: Workspace, meter: ProgressCounter) -> None:
        self._workspace, self._meter = workspace, meter
        self._library = workspace.library
        self._collection = workspace.settings.collection
        self.report = IngestReport()
        choose_embedder(workspace)

    def ingest_all(self, found: Discovery, prune: bool) -> Iterator[None]:
        """Ingest the files; yields after each one, where the writer lock may be released and acquired again."""
        self.report.skipped = {printable(path): why for path, why in found.skipped.items()}
        for path, error in found.failed:
            self._record_failure(path, error)
        self._meter.count("parse", more=len(found.files))
        for number, path in enumerate(found.files, 1):
            self._meter.name = printable(path.name)
            try:
                self.ingest_one(path, len(found.files) - number)
            except DocumentError as error:
                self._record_failure(path, error)
            self._meter.count("parse", done=1)
            yield
        for document in self._missing_documents((*found.folders, *found.files)):
            removes = prune or not document.passages or is_replaced(document.file)
            (self.report.pruned if removes else self.report.gone).append(document.path)
            if removes:
                remove_document(self._workspace, document)

    def ingest_one(self, path: Path, files_waiting: int = 0) -> None:
        """Ingest a file if it is new or has changed. A failure is stored with the document, and raised.

        A file that no longer exists is only listed as skipped.
        """
        name = printable(path)
        known = self._library.document(self._collection, name) or self._undo_deletion(name)
        try:
            kind = self._ingest_if_changed(path, known, files_waiting)
        except DocumentError as error:
            if is_gone(path) and not path.is_symlink():
                self.report.skipped[name] = "it was deleted before it could be read"
                return
            kept = " Its earlier version is kept and still used." if known and known.passages else ""
            reason = printable(f"{error}{kept}")
            self._library.fail(self._library.begin(self._collection, name), reason)
            raise
        if known and known.path != name:
            self._library.set_path(known.id, name)
        getattr(self.report, kind).append(name)

    def _undo_deletion(self, name: str) -> Document | None:
        """Undo the deletion of the document of that path, if it is hidden. Returns it, or None."""
        key = id_of_document(self._collection, name)
        for document in self._library.hidden(self._collection):
            if document.id == key:
                restore_document(self._workspace, document)
                return self._library.document(self._collection, name)
        return None

    def _ingest_if_changed(self, path: Path, known: Document | None, files_waiting: int) -> str:
        """Ingest the file if needed. Returns the field of the report to list it in."""
        recipe = known.recipe.removesuffix(SKETCHED) if known else ""
        is_current = known is not None and known.state is DocumentState.DONE and recipe == self._recipe
        if known and is_current and known.facts.fit(path):
            return "unchanged"
        facts = _read_facts(path)
        is_same_text = known is not None and known.facts.sha256 == facts.sha256 and recipe == self._recipe
        if known and is_current and is_same_text:  # only the time differs: touched, copied, checked out again
            self._library.set_facts(known.id, facts)
            return "unchanged"
        self._meter.count("parse")
        has_passages = bool(known and is_same_text and known.passages)
        if not has_passages:
            facts, text = self._read_unchanged(path, facts)
        document = self._library.begin(self._collection, printable(path))
        if not has_passages:
            self._cut_and_embed(path, document, facts, text, known, files_waiting)
        self._write_to_index(document)
        self._library.finish(document)
        if notes := self._library.documents_with([document])[document].notes:
            self.report.notes[printable(path)] = notes
        return "added" if known is None or not known.passages else "resumed" if has_passages else "updated"

    def _read_unchanged(self, path: Path, facts: FileFacts) -> tuple[FileFacts, readers.DocumentText]:
        """The file's text, and its facts when it was read; read again if the file changes meanwhile."""
        recognition = TextRecognition(
            self._workspace.settings.ocr_language, self._workspace.home.models / "ocr"
        )
        for _ in range(READ_ATTEMPTS):
            text = readers.read_document(path, self._show_pages, recognition)
            if facts.fit(path):
                return facts, text
            facts = _read_facts(path)
        # These facts fit no file, so that the next run reads it again.
        return replace(facts, mtime_ns=-1, sha256=""), replace(text, notes=(*text.notes, CHANGED_WHILE_READ))

    def _cut_and_embed(
        self,
        path: Path,
        document_id: str,
        facts: FileFacts,
        text: readers.DocumentText,
        known: Document | None,
        files_waiting: int,
    ) -> None:
        settings, engine = self._workspace.settings, self._workspace.engine

        def count(piece: str) -> int:
            self._meter.check()
            return engine.count_tokens(piece)

        passages = cut_document(document_id, text.parts, count, settings.chunk_tokens)
        if not passages:
            raise EmptyDocumentError(f"Reading {path}: there is no text in it. Nothing of it was ingested.")
        is_new = not (known and known.passages)  # a changed document has most of its vectors already
        is_sketch = is_new and (files_waiting >= MANY_FILES or len(passages) >= MANY_PASSAGES)
        embeddings = self._embed(passages, known, "sketch" if is_sketch else "whole")
        recipe = self._recipe + (SKETCHED if is_sketch else "")
        self._library.replace_passages(document_id, facts, recipe, passages, embeddings, text.notes)

    def _show_pages(self, done: int, total: int) -> None:
        if total:  # 0 for formats without pages, which call this only to be cancelled
            self._meter.show("recognise", done, total)
        self._meter.check()

    def _embed(
        self, passages: Sequence[DocumentPassage], known: Document | None, part: Part
    ) -> list[Embeddings]:
        """The embeddings, (W, E) each; those of unchanged passages come from the registry."""
        embedder = self._workspace.embedder
        earlier: dict[str, Embeddings] = {}
        if known and known.passages:
            earlier = dict(zip(*self._library.embeddings_of(known.id), strict=True))
        new = [passage for passage in passages if passage.node_id not in earlier]
        self._meter.count("embed", more=len(new))
        progress = self._meter.within("embed")
        rows = embedder.embed_passages([p.text for p in new], progress, part) if new else []
        self._meter.count("embed", done=len(new))
        self.report.embedded += len(new)
        earlier |= {passage.node_id: row for passage, row in zip(new, rows, strict=True)}
        return [earlier[passage.node_id] for passage in passages]

    def _write_to_index(self, document_id: str) -> None:
        """Copy a document from the registry to Chroma and the engine's nodes; then delete stale nodes from both."""
        workspace, stale = self._workspace, self._library.stale(document_id)
        workspace.index.upsert(*self._library.embeddings_of(document_id))
        for index in workspace.indexes:
            index.delete(stale)
        passages = self._library.passages_of(document_id)
        register(workspace, passages)  # KV of nodes that are deleted from now on is deleted too
        if stale:
            workspace.known_passages.remove(stale)
            workspace.engine.forget(stale)  # last, so that KV which old and new nodes share is kept
        self.report.passages += len(passages)

    def _missing_documents(self, paths: Sequence[Path]) -> list[Document]:
        """Documents at or below these paths whose file no longer exists."""
        given, failed = frozenset(paths), self.report.failed
        # A document without passages that failed in this run stays listed: a link that leads nowhere, for example.
        known = [d for d in self._library.documents(self._collection) if d.passages or d.path not in failed]
        inside = [each for each in known if not given.isdisjoint((each.file, *each.file.parents))]
        return [document for document in inside if is_gone(document.file)]

    def _record_failure(self, path: Path, error: DocumentError) -> None:
        self.report.failed[printable(path)] = (type(error).__name__, printable(str(error)))

    @property
    def _recipe(self) -> str:
        """Everything besides a file's content that its passages depend on."""
        settings = self._workspace.settings
        scans = "" if settings.ocr_language == "default" else f"scans in {settings.ocr_language}, "
        return f"readers {readers.VERSION}, {scans}{settings.model}, {settings.chunk_tokens}"


def restore_document(workspace: Workspace, document: Document) -> None:
    """Undo `hide_document`; nothing is embedded again. Call it inside `workspaces.writing()`.

    The registry comes last: after an interruption the document is still deleted.
    """
    library = workspace.library
    nodes, rows = library.embeddings_of(document.id)
    workspace.engine.unhide(nodes)
    workspace.index.upsert(nodes, rows)
    register(workspace, library.passages_of(document.id))
    library.set_hidden(document.id, False)


def register(workspace: Workspace, passages: Sequence[DocumentPassage]) -> None:
    """Make passages known to the engine, and to the registry that recognises them in frameworks' prompts."""
    workspace.known_passages.add([KnownPassage(passage.text, passage.node_id) for passage in passages])
    if passages:
        workspace.engine.enter([p.text for p in passages], [p.node_id for p in passages])


def _read_facts(path: Path) -> FileFacts:
    check_file(path)  # before hashing: a pipe would never end, and a huge file would take long
    try:
        found = path.stat()  # before the content: a change while hashing makes the next run look again
        return FileFacts(found.st_size, found.st_mtime_ns, content_digest(path))
    except OSError as error:
        raise UnreadableDocumentError(f"Reading {path}: {error.strerror}. Check the disk.") from error
