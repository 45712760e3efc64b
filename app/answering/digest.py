"""Summarises a whole document by map and reduce: first windows of neighbouring passages, then the notes on them.

Each passage is encoded once; two windows share the passage at their border, and its stored KV. A note is
stored with the document, under a hash of its prompt: a summary that was interrupted continues from its notes, and
one that is requested again is ready at once.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.answer_stream import AnswerStream, PreparedQuestion
from ragblend.app.answering.chats import Chats
from ragblend.app.answering.support import sentences
from ragblend.app.library.documents import Document, DocumentPassage
from ragblend.app.progress import OnProgress, Stage, silent
from ragblend.app.workspace import Workspace
from ragblend.engine.config import Report, Timings, TokenCounts
from ragblend.engine.prompts.segments import Chunk, Literal, Message, Prompt, Segment
from ragblend.engine.prompts.tokenizing import PASSAGES_HEADING, SEPARATOR, SYSTEM_MESSAGE
from ragblend.kvstore.errors import Cancelled, LibraryError, PromptTooLongError, RagBlendError

if TYPE_CHECKING:
    from ragblend.engine.interface import EngineInterface
    from ragblend.engine.results import Result

NOTE_TOKENS, SUMMARY_TOKENS = 96, 256  # at most, of a note on one window, and of the summary
PASSAGES_INSTRUCTION = (
    "Sum up what these passages say in a few sentences, with the names and numbers that matter."
)
NOTES_HEADING = "Notes on the parts of a document, in their order:\n\n"
NOTES_INSTRUCTION = (
    "Sum up the whole document from these notes in a few sentences, with the names and numbers that matter."
)
# What the user sees while a stage runs.
STATUS: dict[Stage, str] = {"encode": "Reading passage", "digest": "Summarising part"}


@dataclass
class DocumentSummariser:
    """Summarises one document.

    written: prompts answered now; reused: prompts whose stored answers were reused; total: prompts known so far;
    encoded: passages encoded now.
    """

    workspace: Workspace
    document: Document
    show: OnProgress = silent
    written: int = 0
    reused: int = 0
    total: int = 0
    encoded: int = 0
    status: str = "Looking for its passages …"
    _reports: list[Report] = field(default_factory=list)

    @property
    def engine(self) -> "EngineInterface":
        return self.workspace.engine

    def summarise(self, on_text: Callable[[str], None], cancel: threading.Event) -> "Result":
        """Write the summary. on_text: receives its pieces, but not those of the notes.

        Raises LibraryError if the document has no passages, PromptTooLongError, Cancelled.
        """
        from ragblend.engine.results import Result

        begun = time.perf_counter()
        passages = self.workspace.library.passages_of(self.document.id)
        if not passages:
            raise LibraryError(
                f"Summarising {self.document.name}: it has no passages in the library. Ingest it again."
            )
        self._encode([passage.node_id for passage in passages], cancel)
        prompts = self._passage_prompts(passages)
        self.total = len(prompts)
        while len(prompts) > 1:
            prompts = self._note_prompts([self._answer_to(prompt, NOTE_TOKENS, cancel) for prompt in prompts])
            self.total += len(prompts)
        before_ms = 1e3 * (time.perf_counter() - begun)
        text = self._answer_to(prompts[0], self._summary_tokens, cancel, on_text)
        self._show_progress("digest", self.total, self.total)
        return Result(text, (), self._report(before_ms, 1e3 * (time.perf_counter() - begun)), prompts[0])

    def nearest(self, text: str) -> tuple[AnswerSource, ...]:
        """The document's passages that are nearest to the sentences of a text, in the document's order, numbered."""
        library, document = self.workspace.library, self.document
        passages = library.passages_of(document.id)
        _, embeddings = library.embeddings_of(document.id)
        best: dict[int, float] = {}
        for start, stop in sentences(text) if embeddings else ():
            vector = self.workspace.embedder.embed_question(text[start:stop])
            scores = [float(np.max(rows @ vector)) for rows in embeddings]
            nearest = int(np.argmax(scores))
            best[nearest] = max(scores[nearest], best.get(nearest, -1.0))
        return tuple(
            AnswerSource.of(document, passages[index], best[index], number)
            for number, index in enumerate(sorted(best), start=1)
        )

    # --- inside

    def _show_progress(self, stage: Stage, done: int, total: int) -> None:
        self.status = f"{STATUS[stage]} {min(done + 1, total)} of {total} …"
        self.show(stage, done, total, self.document.name)

    def _encode(self, nodes: Sequence[str], cancel: threading.Event) -> None:
        missing = self.engine.missing(nodes).node_ids
        for done, tokens in enumerate(self.engine.encode_nodes(missing, cancel), start=1):
            self.encoded += bool(tokens)
            self._show_progress("encode", done, len(missing))

    def _passage_prompts(self, passages: Sequence[DocumentPassage]) -> list[Prompt]:
        """A prompt for each window of `top_k` passages, or fewer if the model's window is small.

        Each starts with the last passage of the previous window, if it has room for another passage.
        """
        collection = self.document.collection
        chunks = [Chunk(p.text, p.node_id, collection=collection, entered=True) for p in passages]
        windows = self._pack([p.text for p in passages], self.workspace.settings.top_k, overlap=1)
        return [self._prompt(chunks[start:stop]) for start, stop in windows]

    def _note_prompts(self, texts: Sequence[str]) -> list[Prompt]:
        """A prompt for each group of notes, of as many as fit. Raises PromptTooLongError if two notes do not fit."""
        notes = [Literal(text.strip(), verbatim=True) for text in texts]
        groups = list(self._pack(texts, len(texts)))
        if any(stop - start == 1 for start, stop in groups[:-1]):
            raise PromptTooLongError(
                f"Summarising {self.document.name}: two notes do not fit into the window of "
                f"{self.engine.model_name}. Use a model with a longer window."
            )
        return [self._prompt(notes[start:stop], NOTES_HEADING, NOTES_INSTRUCTION) for start, stop in groups]

    def _pack(self, texts: Sequence[str], max_texts: int, overlap: int = 0) -> Iterator[tuple[int, int]]:
        """(start, stop) of runs of at most max_texts texts that fit into one prompt; each has at least one text.

        overlap: texts that a run shares with the next one, if it has more than one.
        """
        lengths = [self.engine.count_tokens(text) + self._separator_tokens for text in texts]
        start = stop = 0
        while stop < len(texts):
            stop, tokens = start + 1, lengths[start]
            while stop < min(len(texts), start + max_texts) and tokens + lengths[stop] <= self._room_tokens:
                stop, tokens = stop + 1, tokens + lengths[stop]
            yield start, stop
            start = stop - overlap if stop - start > 1 else stop

    def _prompt(
        self,
        parts: Sequence[Segment],
        heading: str = PASSAGES_HEADING,
        instruction: str = PASSAGES_INSTRUCTION,
    ) -> Prompt:
        segments: list[Segment] = [Literal(heading)]
        for part in parts:
            segments += [part, Literal(SEPARATOR)]
        messages = [
            Message("system", (Literal(SYSTEM_MESSAGE),)),
            Message("user", (*segments, Literal(instruction))),
        ]
        return self.engine.tokenize(self.engine.chat(messages))

    @property
    def _summary_tokens(self) -> int:
        return self.workspace.settings.max_new_tokens or SUMMARY_TOKENS

    @cached_property
    def _room_tokens(self) -> int:
        """Tokens available for passages or notes and their separators."""
        empty_prompts = self._prompt([], NOTES_HEADING, NOTES_INSTRUCTION), self._prompt([])
        wording_tokens = max(len(prompt.token_ids) for prompt in empty_prompts)
        return self.engine.context_window - wording_tokens - max(NOTE_TOKENS, self._summary_tokens)

    @cached_property
    def _separator_tokens(self) -> int:
        return self.engine.count_tokens(SEPARATOR)

    def _answer_to(
        self,
        prompt: Prompt,
        max_tokens: int,
        cancel: threading.Event,
        on_text: Callable[[str], None] = silent,
    ) -> str:
        """The answer to a prompt: the stored one, or a new one, which is then stored. Raises Cancelled."""
        self._show_progress("digest", self.written + self.reused, self.total)
        library, settings = self.workspace.library, self.workspace.settings
        options = settings.answering | {"max_new_tokens": max_tokens, "one_sentence": False}
        cache_key = json.dumps([settings.model, options, prompt.token_ids])
        key = hashlib.sha256(cache_key.encode()).hexdigest()
        note = library.note(self.document.id, key)
        if note is not None:
            self.reused += 1
            on_text(note)
            return note
        if cancel.is_set():
            raise Cancelled("the summary was cancelled; its notes are kept")
        result = self.engine.generate(prompt, cancel=cancel, on_text=on_text, **options)
        self.written += 1
        self._reports.append(result.report)
        library.store_note(self.document, key, result.text)
        return result.text

    def _report(self, before_ms: float, total_ms: float) -> Report:
        """The total cost: sums over all prompts, except that ttft_ms is the time to the summary's first word.

        before_ms: the time before the summary's own prompt.
        """
        settings, reports = self.workspace.settings, self._reports
        last = reports[-1] if reports else Report(settings.method, None)
        tokens = {
            each.name: sum(getattr(r.tokens, each.name) for r in reports) for each in fields(TokenCounts)
        }
        times = {
            name: sum(getattr(r.timings, name) for r in reports)
            for name in ("load_ms", "stall_ms", "prefill_ms")
        }
        return Report(
            last.method,
            last.ratio,
            TokenCounts(**tokens),
            timings=Timings(
                ttft_ms=before_ms + last.timings.ttft_ms,
                total_ms=total_ms,
                tokens_per_s=last.timings.tokens_per_s,
                **times,
            ),
            hits=sum(r.hits for r in reports),
            misses=sum(r.misses for r in reports),
            warning=next((r.warning for r in reports if r.warning), None),
        )


class DocumentSummary(AnswerStream):
    """A streamed summary. After its end, `sources` are the passages that support it."""

    def __init__(
        self, prepared: PreparedQuestion, summariser: DocumentSummariser, chats: Chats | None
    ) -> None:
        from ragblend.engine.results import Stream

        self.summariser = summariser
        super().__init__(prepared, summariser.engine, Stream(summariser.summarise), chats)

    @property
    def status(self) -> str:
        return self.summariser.status

    def _final_report(self, result: "Result") -> dict[str, Any]:
        self._report = result.report
        return {"notice": result.report.warning} if result.report.warning else {}

    def _report_to_store(self, report: dict[str, Any]) -> dict[str, Any]:
        return {"question": self.question.id, "digest": self.summariser.document.id, **report}

    def _sources_to_store(self) -> tuple[AnswerSource, ...]:
        with suppress(RagBlendError):  # the document may have been deleted; the summary is shown anyway
            self.sources = self.summariser.nearest(self.text)
        return self.sources

    def to_json(self) -> dict[str, Any]:
        summariser = self.summariser
        counts = {
            "parts_written": summariser.written,
            "parts_kept": summariser.reused,
            "passages_encoded": summariser.encoded,
        }
        document = {"document": summariser.document.name, "passages": summariser.document.passages}
        return self.answer.to_json() | document | counts
