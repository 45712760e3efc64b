"""A whole document summed up: windows of neighbouring passages first, then what was written of them (map and reduce).

Each passage is encoded once; two windows share the passage at their border, whose stored KV serves both. What was
written is kept with the document, by the prompt that it was written from: a digest that was stopped, or killed, goes on
there, and one that is asked for again is there at once.
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
    from ragblend.engine.engine import Engine
    from ragblend.engine.results import Result

NOTE_TOKENS, SUMMARY_TOKENS = 96, 256  # what is written of one window, and of all
PASSAGES = "Sum up what these passages say in a few sentences, with the names and numbers that matter."
NOTES = "Notes on the parts of a document, in their order:\n\n"
WHOLE = (
    "Sum up the whole document from these notes in a few sentences, with the names and numbers that matter."
)
DOING: dict[Stage, str] = {"encode": "Reading passage", "digest": "Summing up part"}


@dataclass
class DocumentSummariser:
    """The work on one document. steps: prompts that were answered now; kept: that had been answered before."""

    workspace: Workspace
    document: Document
    show: OnProgress = silent
    steps: int = 0
    kept: int = 0
    encoded: int = 0
    doing: str = "Looking for its passages …"
    _reports: list[Report] = field(default_factory=list)

    @property
    def engine(self) -> "Engine":
        return self.workspace.engine

    def work(self, on_text: Callable[[str], None], cancel: threading.Event) -> "Result":
        """The summary; on_text has its pieces, and nothing of what it is made from.

        Raises LibraryError where there is no passage, PromptTooLongError, Cancelled.
        """
        from ragblend.engine.results import Result

        begun = time.perf_counter()
        passages = self.workspace.library.passages_of(self.document.id)
        if not passages:
            raise LibraryError(
                f"Summing up {self.document.name}: no passage of it is in the library. Ingest it again."
            )
        self._encode([passage.node_id for passage in passages], cancel)
        prompts = [self._of_passages(window) for window in self._windows(passages)]
        total = len(prompts)
        while len(prompts) > 1:
            texts = []
            for prompt in prompts:
                self._tell("digest", self.steps + self.kept, total)
                texts.append(self._written(prompt, NOTE_TOKENS, cancel))
            prompts = [self._of_notes(group) for group in self._groups(texts)]
            total += len(prompts)
        self._tell("digest", self.steps + self.kept, total)
        before_ms = 1e3 * (time.perf_counter() - begun)
        text = self._written(prompts[0], self._summary_tokens, cancel, on_text)
        self._tell("digest", total, total)
        return Result(text, (), self._report(before_ms, 1e3 * (time.perf_counter() - begun)), prompts[0])

    def nearest(self, text: str) -> tuple[AnswerSource, ...]:
        """For each sentence the passage of the document that is nearest to it, in their order, numbered."""
        library, document = self.workspace.library, self.document
        passages = library.passages_of(document.id)
        _, embeddings = library.embeddings_of(document.id)
        best: dict[int, float] = {}
        for start, stop in sentences(text) if embeddings else ():
            asked = self.workspace.embedder.embed_question(text[start:stop])
            scores = [float(np.max(rows @ asked)) for rows in embeddings]
            place = int(np.argmax(scores))
            best[place] = max(scores[place], best.get(place, -1.0))
        found = [(passages[place], best[place]) for place in sorted(best)]
        return tuple(
            AnswerSource(
                number, p.node_id, document.id, document.collection, document.name, p.location,
                round(score, 4), p.text,
            )
            for number, (p, score) in enumerate(found, start=1)
        )  # fmt: skip

    # --- inside

    def _tell(self, stage: Stage, done: int, total: int) -> None:
        self.doing = f"{DOING[stage]} {min(done + 1, total)} of {total} …"
        self.show(stage, done, total, self.document.name)

    def _encode(self, nodes: Sequence[str], cancel: threading.Event) -> None:
        missing = self.engine.missing(nodes).node_ids
        for done, tokens in enumerate(self.engine.encode_nodes(missing, cancel.is_set), start=1):
            self.encoded += bool(tokens)
            self._tell("encode", done, len(missing))

    def _windows(self, passages: Sequence[DocumentPassage]) -> Iterator[Sequence[DocumentPassage]]:
        """So many as are read for a question, or fewer where the model's window is small; each begins with the last of
        the one before, where that leaves room for another.
        """
        lengths = [self.engine.count_tokens(passage.text) + self._around for passage in passages]
        start = stop = 0
        while stop < len(passages):
            stop, tokens = start + 1, lengths[start]
            while (
                stop < min(len(passages), start + self.workspace.settings.top_k)
                and tokens + lengths[stop] <= self._room
            ):
                stop, tokens = stop + 1, tokens + lengths[stop]
            yield passages[start:stop]
            start = stop - 1 if stop - start > 1 else stop

    def _groups(self, texts: Sequence[str]) -> Iterator[Sequence[str]]:
        """As many notes together as fit. Raises PromptTooLongError where not even two do."""
        group, tokens = list[str](), 0
        for text in texts:
            length = self.engine.count_tokens(text) + self._around
            if group and tokens + length > self._room:
                if len(group) == 1:
                    raise PromptTooLongError(
                        f"Summing up {self.document.name}: two notes do not fit into the window of "
                        f"{self.engine.model_name}. Name a model with a longer one."
                    )
                yield group
                group, tokens = [], 0
            group, tokens = [*group, text], tokens + length
        yield group

    def _of_passages(self, window: Sequence[DocumentPassage]) -> Prompt:
        name = self.document.collection
        return self._prompt([Chunk(p.text, p.node_id, collection=name, entered=True) for p in window])

    def _of_notes(self, texts: Sequence[str]) -> Prompt:
        return self._prompt([Literal(text.strip(), verbatim=True) for text in texts], NOTES, WHOLE)

    def _prompt(self, parts: Sequence[Segment], opening: str = "", closing: str = PASSAGES) -> Prompt:
        said: list[Segment] = [Literal(opening or OPENING)]
        for part in parts:
            said += [part, Literal(SEPARATOR)]
        messages = [Message("system", (Literal(SYSTEM),)), Message("user", (*said, Literal(closing)))]
        return self.engine.tokenize(self.engine.chat(messages))

    @property
    def _summary_tokens(self) -> int:
        return self.workspace.settings.max_new_tokens or SUMMARY_TOKENS

    @cached_property
    def _room(self) -> int:
        """Tokens for passages or notes with what stands between them."""
        words = max(len(self._prompt([], NOTES, WHOLE).token_ids), len(self._prompt([]).token_ids))
        return self.engine.context_window - words - max(NOTE_TOKENS, self._summary_tokens)

    @cached_property
    def _around(self) -> int:
        return self.engine.count_tokens(SEPARATOR)

    def _written(
        self,
        prompt: Prompt,
        most_tokens: int,
        cancel: threading.Event,
        on_text: Callable[[str], None] = silent,
    ) -> str:
        """The answer to a prompt: what is kept of it, or the model's, which is kept. Raises Cancelled."""
        library, settings = self.workspace.library, self.workspace.settings
        options = settings.answering | {"max_new_tokens": most_tokens, "one_sentence": False}
        told = json.dumps([settings.model, options, prompt.token_ids])
        key = hashlib.sha256(told.encode()).hexdigest()
        found = library.note(self.document.id, key)
        if found is not None:
            self.kept += 1
            on_text(found)
            return found
        if cancel.is_set():
            raise Cancelled("the digest was left on request; what was written is kept")
        result = self.engine.generate(prompt, cancel=cancel, on_text=on_text, **options)
        self.steps += 1
        self._reports.append(result.report)
        library.keep_note(self.document, key, result.text)
        return result.text

    def _report(self, before_ms: float, total_ms: float) -> Report:
        """What all of it took: tokens, hits and misses added up; ttft_ms: until the first word of the summary."""
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
    """A summary on its way: iterate it for its pieces. `sources`, when it has ended, are the passages it rests on."""

    def __init__(self, asked: PreparedQuestion, reading: DocumentSummariser, chats: Chats | None) -> None:
        from ragblend.engine.results import Stream

        self.reading = reading
        super().__init__(asked, reading.engine, Stream(reading.work), chats)

    @property
    def doing(self) -> str:
        return self.reading.doing

    def _described(self, result: "Result") -> dict[str, Any]:
        self._result = result
        return {"notice": result.report.warning} if result.report.warning else {}

    def _report(self, more: dict[str, Any]) -> dict[str, Any]:
        return {"digest": self.reading.document.id, **more}

    def _cited(self) -> tuple[AnswerSource, ...]:
        with suppress(RagBlendError):  # the document may be gone: what was said of it is shown all the same
            self.sources = self.reading.nearest(self.text)
        return self.sources

    def to_json(self) -> dict[str, Any]:
        reading = self.reading
        counts = {
            "parts_written": reading.steps,
            "parts_kept": reading.kept,
            "passages_encoded": reading.encoded,
        }
        document = {"document": reading.document.name, "passages": reading.document.passages}
        return self.answer.to_json() | document | counts
