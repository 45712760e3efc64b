"""A streamed answer: its pieces, stopping it, and saving it whatever happens."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ragblend.app.answering.answer import Answer, AnswerSource, unsupported_notice
from ragblend.app.answering.breakdown import breakdown_of
from ragblend.app.answering.chats import UNFINISHED, ChatMessage, Chats
from ragblend.app.answering.citations import cite, marks_in
from ragblend.app.answering.context import PromptContext
from ragblend.app.answering.support import in_digits, names
from ragblend.app.database import now
from ragblend.app.settings import Settings
from ragblend.app.words import plural
from ragblend.engine.config import Report
from ragblend.engine.prompts.figures import contains
from ragblend.engine.prompts.segments import Prompt
from ragblend.kvstore.errors import Cancelled, RagBlendError
from ragblend.kvstore.files import Closing

if TYPE_CHECKING:
    from ragblend.engine.interface import EngineInterface
    from ragblend.engine.results import Result, Stream

UNSAVED = -1
SAVE_EVERY_S = 0.5  # a kill loses at most so much of an answer that was shown


@dataclass(frozen=True)
class PreparedQuestion:
    """A question with its prompt. context: None if nothing was found; then notice is the answer."""

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
    """Iterate it for pieces of text; afterwards `message` is the stored message, and `answer` has the cost.

    question, sources and notice are available at once. The text is saved twice a second, so that a kill does not lose
    it; a stopped answer is saved as far as it came. An error is stored as `message.report["error"]` and raised by the
    iteration. Without `chats` nothing is saved.
    """

    def __init__(
        self, asked: PreparedQuestion, engine: "EngineInterface", stream: "Stream | None", chats: Chats | None
    ) -> None:
        self._asked, self._engine, self._stream, self._chats = asked, engine, stream, chats
        self.question, self.sources = asked.question, asked.context.sources if asked.context else ()
        self.notice = asked.notice if stream is not None else None
        self._pieces: list[str] = []
        self._stopped = threading.Event()
        self._report: Report | None = None
        self._saving, self._ended, self._saved_at_s = threading.Lock(), False, 0.0
        report = self._with_basis({UNFINISHED: True})
        self._message = ChatMessage(
            UNSAVED, self.question.chat_id, "assistant", "", now(), self.sources, report
        )
        if stream is not None:
            with suppress(RagBlendError):  # shown all the same; `_save_final` says why it is not saved
                self._message = self._stored(self._message)

    @property
    def message(self) -> ChatMessage:
        """The stored answer. Its id is -1 if it could not be stored; its notice then says why."""
        assert self._ended, "the answer has not ended"
        return self._message

    @property
    def answer(self) -> Answer:
        """The answer with what it cost, once it has ended well."""
        settings = self._asked.settings
        ratio = None if isinstance(settings.ratio, str) else settings.ratio
        answer = self._answer(
            self._report or Report(settings.method, ratio), self.message.report.get("notice")
        )
        sources = self.message.sources
        citations = tuple(citation.to_json() for citation in cite(self.text, sources).citations)
        return replace(answer, sources=sources, citations=citations)

    def _answer(self, report: Report, notice: str | None) -> Answer:
        model, device = self._engine.model_name, self._engine.device
        return Answer(self.text, model, device, self.sources, self._asked.retrieve_ms, report, notice)

    @property
    def all_sources(self) -> tuple[AnswerSource, ...]:
        """All passages in the prompt: those found for this question, and those of earlier ones."""
        return self._asked.context.all_sources if self._asked.context else ()

    @property
    def is_by_model(self) -> bool:
        """Whether the model answers; if nothing was found, the answer may be the notice."""
        return self._stream is not None

    @property
    def status(self) -> str:
        """The current work, before the first word of the answer."""
        return f"Reading {plural(len(self.sources), 'passage')} …" if self.sources else "Thinking …"

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def whole(self) -> Answer:
        """Wait for the end."""
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
        """Stop, wait until the device is free, and save the text so far; after the end it does nothing."""
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
            self._pieces.append(self._asked.notice or "")
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
            named = isinstance(error, RagBlendError)
            self._save_final({"error": str(error) if named else f"{type(error).__name__}: {error}"})
            raise
        self._save_final(report)

    def _final_report(self, result: "Result") -> dict[str, Any]:
        engine, given = self._engine, " ".join(each.text or "" for each in result.prompt.segments)
        unknown = [name for name in names(self.text) if result.prompt.chunks and not contains(given, name)]
        missing = result.report.unsupported_figures
        if missing:  # unless the passages or the question have it in words; `one` is none
            texts = (self.question.text, *(chunk.text or "" for chunk in result.prompt.chunks))
            said = " ".join(map(in_digits, texts))
            missing = tuple(each for each in missing if each == "1" or not contains(said, each))
        figures = tuple(dict.fromkeys((*missing, *unknown)))
        self._report = replace(result.report, unsupported_figures=figures)
        unsupported = unsupported_notice(figures)
        notice = " ".join(text for text in (self.notice, result.report.warning, unsupported) if text) or None
        labels = {source.node_id: (source.number, source.label) for source in self.all_sources}
        answer = self._answer(self._report, notice)
        return breakdown_of(answer, result.prompt, labels, engine.dtype, engine.known_profile)

    def _with_basis(self, more: dict[str, Any]) -> dict[str, Any]:
        """The report with what the prompt is built from again."""
        context = self._asked.context
        basis = {"first_id": context.first_id, **asdict(context.words)} if context else {"found": False}
        notice = {"notice": self.notice} if self.notice else {}
        return {"question": self.question.id, **basis, **notice, **more}

    def _stored_sources(self) -> tuple[AnswerSource, ...]:
        """The sources found, and those of earlier turns that the answer cites, or copies a mark such as "[2]" from."""
        mine = {source.number for source in self.sources}
        cited = {citation.number for citation in cite(self.text, self.all_sources).citations}
        marks = marks_in(self.text)
        earlier = (source for source in self.all_sources if source.number not in mine)
        return (*self.sources, *(s for s in earlier if s.number in cited or marks & marks_in(s.text)))

    def _save_partial(self) -> None:
        """Save the text so far, if the last save was some time ago."""
        with self._saving:
            if self._ended or time.monotonic() < self._saved_at_s + SAVE_EVERY_S:
                return
            with suppress(RagBlendError):  # the next save may work again; `_save_final` reports if not
                self._message = self._stored(replace(self._message, text=self.text))
            self._saved_at_s = time.monotonic()

    def _save_final(self, report: dict[str, Any]) -> None:
        """Store the finished answer, once. What cannot be stored is shown all the same."""
        with self._saving:
            if self._ended:
                return
            sources = self._stored_sources()
            ended = replace(self._message, text=self.text, sources=sources, report=self._with_basis(report))
            try:
                ended = self._stored(ended)
            except RagBlendError as error:
                notice = f"{ended.report.get('notice') or ''} This answer was not saved: {error}".strip()
                ended = replace(ended, id=UNSAVED, report=ended.report | {"notice": notice})
            self._message, self._ended = ended, True

    def _stored(self, message: ChatMessage) -> ChatMessage:
        """Store the message over that of the last save, or as a new one; without `chats` it is not stored."""
        if self._chats is None:
            return message
        if message.id != UNSAVED:
            return self._chats.rewrite(message)
        return self._chats.add(
            message.chat_id, message.role, message.text, message.sources, message.report, self.question.id
        )
