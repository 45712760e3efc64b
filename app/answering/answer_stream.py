"""A streamed answer: yields its text, can be stopped, and is saved even if it is stopped or fails."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ragblend.app.answering.answer import Answer, AnswerSource, unsupported_notice
from ragblend.app.answering.breakdown import breakdown_of
from ragblend.app.answering.chats import UNFINISHED, ChatMessage, Chats
from ragblend.app.answering.citations import bracketed_numbers, cite
from ragblend.app.answering.context import PromptContext
from ragblend.app.answering.support import names, number_words_to_digits
from ragblend.app.database import now
from ragblend.app.settings import Settings
from ragblend.app.words import plural
from ragblend.engine.config import Report
from ragblend.engine.prompts.figures import contains, without_known
from ragblend.engine.prompts.segments import Prompt
from ragblend.kvstore.errors import Cancelled, RagBlendError
from ragblend.kvstore.files import Closing

if TYPE_CHECKING:
    from ragblend.engine.interface import EngineInterface
    from ragblend.engine.results import Result, Stream

UNSAVED_ID = -1  # of a message that is not stored
SAVE_EVERY_S = 0.5  # a killed process loses at most this much of the answer that the user has seen


@dataclass(frozen=True)
class PreparedQuestion:
    """A question with its prompt.

    context: None if nothing was found (then notice is the answer), and for a summary, which has prompts of its own.
    """

    question: ChatMessage
    settings: Settings
    context: PromptContext | None = None
    notice: str | None = None
    retrieve_ms: float = 0.0

    @property
    def prompt(self) -> Prompt:
        assert self.context is not None, "nothing was found, so there is no prompt"
        return self.context.prompt


class AnswerStream(Closing):
    """A streamed answer: iterate over it for pieces of text; at the end `message` is stored and `answer` is complete.

    question, sources and notice are available at once. The text is saved twice a second, in case the process is killed;
    of a stopped answer the text so far is saved. An error is stored as `message.report["error"]` and raised by the
    iteration. Without `chats` nothing is saved.
    """

    def __init__(
        self,
        prepared: PreparedQuestion,
        engine: "EngineInterface",
        stream: "Stream | None",
        chats: Chats | None,
    ) -> None:
        self._prepared, self._engine, self._stream, self._chats = prepared, engine, stream, chats
        self.question, self.sources = prepared.question, prepared.context.sources if prepared.context else ()
        self.notice = prepared.notice if stream is not None else None
        self._pieces: list[str] = []
        self._stopped = threading.Event()
        self._report: Report | None = None
        self._save_lock, self._ended, self._saved_at_s = threading.Lock(), False, 0.0
        report = self._report_to_store({UNFINISHED: True})
        self._message = ChatMessage(
            UNSAVED_ID, self.question.chat_id, "assistant", "", now(), self.sources, report
        )
        if stream is not None:
            with suppress(
                RagBlendError
            ):  # the answer is shown anyway; `_save_final` reports why it is not saved
                self._message = self._store(self._message)

    @property
    def message(self) -> ChatMessage:
        """The stored answer. Its id is -1 if it could not be stored; its notice then says why."""
        assert self._ended, "the answer has not ended"
        return self._message

    @property
    def answer(self) -> Answer:
        """The answer with its cost; only after the end."""
        settings = self._prepared.settings
        ratio = None if isinstance(settings.ratio, str) else settings.ratio
        answer = self._build_answer(
            self._report or Report(settings.method, ratio), self.message.report.get("notice")
        )
        sources = self.message.sources
        citations = tuple(citation.to_json() for citation in cite(self.text, sources).citations)
        return replace(answer, sources=sources, citations=citations)

    def _build_answer(self, report: Report, notice: str | None) -> Answer:
        model, device = self._engine.model_name, self._engine.device
        return Answer(self.text, model, device, self.sources, self._prepared.retrieve_ms, report, notice)

    @property
    def all_sources(self) -> tuple[AnswerSource, ...]:
        """All passages in the prompt: those found for this question, and those of earlier ones."""
        return self._prepared.context.all_sources if self._prepared.context else ()

    @property
    def is_by_model(self) -> bool:
        """Whether the model writes the answer; if nothing was found, the answer may be the notice."""
        return self._stream is not None

    @property
    def status(self) -> str:
        """What is being done before the first word of the answer, to show to the user."""
        return f"Reading {plural(len(self.sources), 'passage')} …" if self.sources else "Thinking …"

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def whole(self) -> Answer:
        """Wait until the answer is complete, and return it."""
        with self:
            for _ in self:
                pass
        return self.answer

    def stop(self) -> None:
        """Ask the device to stop and return at once; the iteration then ends."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.stop()

    def close(self) -> None:
        """Stop, wait until the device is free, and save the text so far. Does nothing after the end."""
        if self._ended:
            return
        self._stopped.set()
        if self._stream is not None:
            self._stream.close()
        self._save_final({"stopped": True})

    def __iter__(self) -> Iterator[str]:
        if self._ended:
            return
        if self._stream is None:
            self._pieces.append(self._prepared.notice or "")
            yield self.text
            self._save_final({})
            return
        try:
            for piece in self._stream:
                self._pieces.append(piece)
                self._save_partial()
                yield piece
            report = {"stopped": True} if self._stopped.is_set() else self._final_report(self._stream.result)
        except Cancelled:
            report = {"stopped": True}
        except GeneratorExit:
            self.close()
            raise
        except BaseException as error:
            self._stream.close()
            is_named = isinstance(error, RagBlendError)
            self._save_final({"error": str(error) if is_named else f"{type(error).__name__}: {error}"})
            raise
        self._save_final(report)

    def _final_report(self, result: "Result") -> dict[str, Any]:
        engine, given = self._engine, " ".join(each.text or "" for each in result.prompt.segments)
        answer_names = names(without_known(self.text, given)) if result.prompt.chunks else []
        missing_names = [name for name in answer_names if not contains(given, name)]
        missing = result.report.unsupported_figures
        if missing:  # the passages or the question may have them in words, except that `one` is not 1
            texts = (self.question.text, *(chunk.text or "" for chunk in result.prompt.chunks))
            in_digits = " ".join(map(number_words_to_digits, texts))
            missing = tuple(each for each in missing if each == "1" or not contains(in_digits, each))
        unsupported = tuple(dict.fromkeys((*missing, *missing_names)))
        self._report = replace(result.report, unsupported_figures=unsupported)
        notices = self.notice, result.report.warning, unsupported_notice(unsupported)
        notice = " ".join(text for text in notices if text) or None
        labels = {source.node_id: (source.number, source.label) for source in self.all_sources}
        answer = self._build_answer(self._report, notice)
        return breakdown_of(answer, result.prompt, labels, engine.dtype, engine.known_profile)

    def _report_to_store(self, report: dict[str, Any]) -> dict[str, Any]:
        """The report, with the fields from which `Conversations.measure_full` builds the prompt again."""
        context = self._prepared.context
        basis = {"first_id": context.first_id, **asdict(context.wording)} if context else {"found": False}
        notice = {"notice": self.notice} if self.notice else {}
        return {"question": self.question.id, **basis, **notice, **report}

    def _sources_to_store(self) -> tuple[AnswerSource, ...]:
        """The new sources, and those of earlier turns that the answer cites, or copies a number such as "[2]" from."""
        new = {source.number for source in self.sources}
        cited = {citation.number for citation in cite(self.text, self.all_sources).citations}
        brackets = bracketed_numbers(self.text)
        earlier = (source for source in self.all_sources if source.number not in new)
        return (
            *self.sources,
            *(s for s in earlier if s.number in cited or brackets & bracketed_numbers(s.text)),
        )

    def _save_partial(self) -> None:
        """Save the text so far, if the last save was some time ago."""
        with self._save_lock:
            if self._ended or time.monotonic() < self._saved_at_s + SAVE_EVERY_S:
                return
            with suppress(RagBlendError):  # the next save may succeed; `_save_final` reports a failure
                self._message = self._store(replace(self._message, text=self.text))
            self._saved_at_s = time.monotonic()

    def _save_final(self, report: dict[str, Any]) -> None:
        """Store the finished answer, once. If that fails, its notice says why, and the answer is still shown."""
        with self._save_lock:
            if self._ended:
                return
            sources = self._sources_to_store()
            ended = replace(
                self._message, text=self.text, sources=sources, report=self._report_to_store(report)
            )
            try:
                ended = self._store(ended)
            except RagBlendError as error:
                notice = f"{ended.report.get('notice') or ''} This answer was not saved: {error}".strip()
                ended = replace(ended, id=UNSAVED_ID, report=ended.report | {"notice": notice})
            self._message, self._ended = ended, True

    def _store(self, message: ChatMessage) -> ChatMessage:
        """Update the stored message, or insert it if it is new, and return it; without `chats` nothing is stored."""
        if self._chats is None:
            return message
        if message.id != UNSAVED_ID:
            return self._chats.rewrite(message)
        return self._chats.add(
            message.chat_id, message.role, message.text, message.sources, message.report, self.question.id
        )
