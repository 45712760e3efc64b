"""Summarises a whole document by map and reduce: first windows of neighbouring passages, then the notes on them.

Each passage is encoded once; two windows share the passage at their border, and its stored KV. A note is
stored with the document, under a hash of its prompt: a summary that was stopped or killed continues there, and one that
is requested again is ready at once.
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
from ragblend.engine.prompts.tokenizing import OPENING, SEPARATOR, SYSTEM
from ragblend.kvstore.errors import Cancelled, LibraryError, PromptTooLongError, RagBlendError

if TYPE_CHECKING:
    from ragblend.engine.interface import EngineInterface
    from ragblend.engine.results import Result

NOTE_TOKENS, SUMMARY_TOKENS = 96, 256  # the longest note on one window, and the longest summary
PASSAGES = "Sum up what these passages say in a few sentences, with the names and numbers that matter."
NOTES = "Notes on the parts of a document, in their order:\n\n"
WHOLE = (
    "Sum up the whole document from these notes in a few sentences, with the names and numbers that matter."
)
STATUS: dict[Stage, str] = {"encode": "Reading passage", "digest": "Summarising part"}


@dataclass
class DocumentSummariser:
    """Summarises one document.

    steps: prompts answered now; kept: prompts answered earlier, whose notes are reused; total: prompts known so far.
    """

    workspace: Workspace
    document: Document
    show: OnProgress = silent
    steps: int = 0
    kept: int = 0
    total: int = 0
    encoded: int = 0
    status: str = "Looking for its passages …"
    _reports: list[Report] = field(default_factory=list)

    @property
    def engine(self) -> "EngineInterface":
        return self.workspace.engine

    def work(self, on_text: Callable[[str], None], cancel: threading.Event) -> "Result":
        """Write the summary; on_text gets its pieces, without those of the notes.

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
        """The document's passages that are nearest to the sentences of a text, in order, numbered."""
        library, document = self.workspace.library, self.document
        passages = library.passages_of(document.id)
        _, embeddings = library.embeddings_of(document.id)
        best: dict[int, float] = {}
        for start, stop in sentences(text) if embeddings else ():
            vector = self.workspace.embedder.embed_question(text[start:stop])
            scores = [float(np.max(rows @ vector)) for rows in embeddings]
            place = int(np.argmax(scores))
            best[place] = max(scores[place], best.get(place, -1.0))
        return tuple(
            AnswerSource.of(document, passages[place], best[place], number)
            for number, place in enumerate(sorted(best), start=1)
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

        Each starts with the last passage of the window before, if there is room for another.
        """
        name = self.document.collection
        chunks = [Chunk(p.text, p.node_id, collection=name, entered=True) for p in passages]
        most = self.workspace.settings.top_k
        windows = self._packed([passage.text for passage in passages], most, overlap=1)
        return [self._prompt(chunks[start:stop]) for start, stop in windows]

    def _note_prompts(self, texts: Sequence[str]) -> list[Prompt]:
        """A prompt for each group of as many notes as fit into one. Raises PromptTooLongError if two do not fit."""
        notes = [Literal(text.strip(), verbatim=True) for text in texts]
        groups = list(self._packed(texts, len(texts)))
        if any(stop - start == 1 for start, stop in groups[:-1]):
            raise PromptTooLongError(
                f"Summarising {self.document.name}: two notes do not fit into the window of "
                f"{self.engine.model_name}. Use a model with a longer one."
            )
        return [self._prompt(notes[start:stop], NOTES, WHOLE) for start, stop in groups]

    def _packed(self, texts: Sequence[str], most: int, overlap: int = 0) -> Iterator[tuple[int, int]]:
        """(start, stop) of runs of at most `most` texts that fit into one prompt; a run has one text at least."""
        lengths = [self.engine.count_tokens(text) + self._separator_tokens for text in texts]
        start = stop = 0
        while stop < len(texts):
            stop, tokens = start + 1, lengths[start]
            while stop < min(len(texts), start + most) and tokens + lengths[stop] <= self._room_tokens:
                stop, tokens = stop + 1, tokens + lengths[stop]
            yield start, stop
            start = stop - overlap if stop - start > 1 else stop

    def _prompt(self, parts: Sequence[Segment], opening: str = "", closing: str = PASSAGES) -> Prompt:
        segments: list[Segment] = [Literal(opening or OPENING)]
        for part in parts:
            segments += [part, Literal(SEPARATOR)]
        messages = [Message("system", (Literal(SYSTEM),)), Message("user", (*segments, Literal(closing)))]
        return self.engine.tokenize(self.engine.chat(messages))

    @property
    def _summary_tokens(self) -> int:
        return self.workspace.settings.max_new_tokens or SUMMARY_TOKENS

    @cached_property
    def _room_tokens(self) -> int:
        """Tokens available for passages or notes and their separators."""
        words = max(len(self._prompt([], NOTES, WHOLE).token_ids), len(self._prompt([]).token_ids))
        return self.engine.context_window - words - max(NOTE_TOKENS, self._summary_tokens)

    @cached_property
    def _separator_tokens(self) -> int:
        return self.engine.count_tokens(SEPARATOR)

    def _answer_to(
        self,
        prompt: Prompt,
        most_tokens: int,
        cancel: threading.Event,
        on_text: Callable[[str], None] = silent,
    ) -> str:
        """The answer to a prompt: the stored one, or a new one, which is then stored. Raises Cancelled."""
        self._show_progress("digest", self.steps + self.kept, self.total)
        library, settings = self.workspace.library, self.workspace.settings
        options = settings.answering | {"max_new_tokens": most_tokens, "one_sentence": False}
        cache_key = json.dumps([settings.model, options, prompt.token_ids])
        key = hashlib.sha256(cache_key.encode()).hexdigest()
        found = library.note(self.document.id, key)
        if found is not None:
            self.kept += 1
            on_text(found)
            return found
        if cancel.is_set():
            raise Cancelled("the summary was cancelled; its notes are kept")
        result = self.engine.generate(prompt, cancel=cancel, on_text=on_text, **options)
        self.steps += 1
        self._reports.append(result.report)
        library.keep_note(self.document, key, result.text)
        return result.text

    def _report(self, before_ms: float, total_ms: float) -> Report:
        """The total cost: sums of tokens, hits and misses; ttft_ms: until the first word of the summary."""
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

    def __init__(self, asked: PreparedQuestion, summariser: DocumentSummariser, chats: Chats | None) -> None:
        from ragblend.engine.results import Stream

        self.summariser = summariser
        super().__init__(asked, summariser.engine, Stream(summariser.work), chats)

    @property
    def status(self) -> str:
        return self.summariser.status

    def _final_report(self, result: "Result") -> dict[str, Any]:
        self._report = result.report
        return {"notice": result.report.warning} if result.report.warning else {}

    def _with_basis(self, more: dict[str, Any]) -> dict[str, Any]:
        return {"question": self.question.id, "digest": self.summariser.document.id, **more}

    def _stored_sources(self) -> tuple[AnswerSource, ...]:
        with suppress(RagBlendError):  # the document may be deleted: the summary is shown all the same
            self.sources = self.summariser.nearest(self.text)
        return self.sources

    def to_json(self) -> dict[str, Any]:
        summariser = self.summariser
        counts = {
            "parts_written": summariser.steps,
            "parts_kept": summariser.kept,
            "passages_encoded": summariser.encoded,
        }
        document = {"document": summariser.document.name, "passages": summariser.document.passages}
        return self.answer.to_json() | document | counts
