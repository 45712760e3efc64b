"""One answer on its way: pieces as they come, Stop, and the message that is kept whatever happens."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ragblend.app.chat_records import Message
from ragblend.app.chats import Chats
from ragblend.app.citations import SourceRow
from ragblend.app.database import now
from ragblend.kvstore.closing import Closing
from ragblend.kvstore.errors import Cancelled, RagBlendError

if TYPE_CHECKING:
    from ragblend.engine.results import Result, Stream

UNSAVED = -1
Describe = Callable[["Result"], dict[str, Any]]  # the finished answer's report
Cite = Callable[[str], Sequence[SourceRow]]  # an answer's text -> the sources to keep with it


class Turn(Closing):
    """Iterate it for pieces of text; afterwards `message` is what was stored.

    question, sources and notice are there at once. A stopped answer is kept as far as it came. An error of the work is
    stored as `message.report["error"]` and raised by the iteration.
    """

    def __init__(
        self,
        chats: Chats,
        question: Message,
        sources: tuple[SourceRow, ...],
        notice: str | None,
        stream: "Stream | None",
        describe: Describe,
        cite: Cite,
        basis: dict[str, Any],
        fixed_text: str = "",
    ) -> None:
        self.question, self.sources, self.notice = question, sources, notice
        self._chats, self._stream, self._describe, self._cite = chats, stream, describe, cite
        self._basis, self._fixed_text = basis, fixed_text
        self._pieces: list[str] = []
        self._stopped = threading.Event()
        self._message: Message | None = None
        self._keeping = threading.Lock()

    @property
    def message(self) -> Message:
        """The stored answer. Its id is -1 if it could not be stored; its notice then says why."""
        assert self._message is not None, "the answer has not ended"
        return self._message

    @property
    def text(self) -> str:
        """All that has come."""
        return "".join(self._pieces)

    def stop(self) -> None:
        """Ask the device to stop, and return at once; the iteration then ends."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.stop()

    def close(self) -> None:
        """Stop, wait until the device is free, keep what has come; after the end it does nothing."""
        if self._message is not None:
            return
        self._stopped.set()
        if self._stream is not None:
            self._stream.close()
        self._keep({"stopped": True})

    def __iter__(self) -> Iterator[str]:
        if self._message is not None:
            return
        if self._stream is None:
            self._pieces.append(self._fixed_text)
            yield self._fixed_text
            self._keep({})
            return
        try:
            for piece in self._stream:
                self._pieces.append(piece)
                yield piece
            report = {"stopped": True} if self._stopped.is_set() else self._describe(self._stream.result)
        except Cancelled:
            report = {"stopped": True}
        except GeneratorExit:
            self.close()
            raise
        except BaseException as error:
            self._stream.close()
            self._keep(
                {
                    "error": str(error)
                    if isinstance(error, RagBlendError)
                    else f"{type(error).__name__}: {error}"
                }
            )
            raise
        self._keep(report)

    def _keep(self, report: dict[str, Any]) -> None:
        """Store the answer, once. What cannot be stored is shown all the same."""
        with self._keeping:
            if self._message is not None:
                return
            notice = {"notice": self.notice} if self.notice else {}
            report = {**self._basis, **notice, **report}
            text, sources = self.text, tuple(self._cite(self.text))
            try:
                self._message = self._chats.add(self.question.chat_id, "assistant", text, sources, report)
            except RagBlendError as error:
                said = f"{report.get('notice') or ''} This answer was not kept: {error}".strip()
                report["notice"] = said
                chat = self.question.chat_id
                self._message = Message(UNSAVED, chat, "assistant", text, now(), sources, report)
