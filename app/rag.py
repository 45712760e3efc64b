"""A question over the library: retrieve, build the prompt, let the engine answer.   <- START HERE"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragblend.app.answer import Answer, Source
from ragblend.app.retrieval import Retriever
from ragblend.app.settings import Settings
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import PromptTooLongError, UsageError

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine
    from ragblend.engine.prompt import Prompt

History = Sequence[tuple[str, str]]  # (question, answer), oldest first


class Rag:
    """Answers questions over one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._retriever = Retriever(workspace)
        self._warm = False

    def ask(self, question: str, *, history: History = (), **changes: Any) -> Answer:
        """The whole answer. changes: what of the settings is otherwise: method, ratio, top_k, max_new_tokens, ...

        Raises UsageError for an impossible change or no question, LibraryError when nothing was ingested,
        PromptTooLongError when the question alone does not fit the model's window.
        """
        with self.stream(question, history=history, **changes) as stream:
            for _ in stream:
                pass
            return stream.answer

    def stream(self, question: str, *, history: History = (), **changes: Any) -> "AnswerStream":
        """Like `ask`, but the pieces of text as they come; its `answer` is there after the last one."""
        settings = self._workspace.settings.changed(changes)
        if not question.strip():
            raise UsageError("Asking: the question is empty. Write what you want to know.")
        self.warm_up()
        start = time.perf_counter()
        sources = self._retriever.retrieve(question, settings.top_k)
        retrieve_ms = (time.perf_counter() - start) * 1000
        fitted = fit(self._workspace.engine, settings, sources, question, history)
        return AnswerStream(self._workspace.engine, settings, fitted, retrieve_ms)

    def warm_up(self) -> None:
        """Load the embedder and open the index, so that what is timed is retrieval and not loading."""
        if not self._warm:
            self._workspace.embedder.embed_question("warm up")
            self._workspace.index.count()
            self._warm = True


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits the window, the sources that are in it, and what had to be left out."""

    prompt: "Prompt"
    sources: tuple[Source, ...]
    notice: str | None


class AnswerStream:
    """The pieces of one answer. Close it, or use it as a context manager, to stop the engine early."""

    def __init__(self, engine: "Engine", settings: Settings, fitted: Fitted, retrieve_ms: float) -> None:
        self._engine, self._fitted, self._retrieve_ms = engine, fitted, retrieve_ms
        self._stream = engine.stream(fitted.prompt, keep_tokens=settings.keep_tokens, **settings.answering)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    @property
    def answer(self) -> Answer:
        """The answer, once all pieces have come."""
        result, notices = self._stream.result, [self._fitted.notice]
        assert result is not None, "the stream has not ended"
        notices.append(result.report.warning)
        return Answer(
            text=result.text,
            model=self._engine.model_name,
            device=str(self._engine.device),
            sources=self._fitted.sources,
            retrieve_ms=self._retrieve_ms,
            report=result.report,
            notice=" ".join(notice for notice in notices if notice) or None,
        )

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fit(
    engine: "Engine", settings: Settings, sources: Sequence[Source], question: str, history: History = ()
) -> Fitted:
    """The prompt of as many of the best passages as the window takes beside the answer. Raises PromptTooLongError."""
    from ragblend.engine.prompt import Chunk

    room = engine.context_window - settings.max_new_tokens
    kept = list(sources)
    while True:
        # The best passage last, next to the question: measured on the samples, small models then answer more often, by
        # full prefill and fused alike.
        chunks = [Chunk(text=source.text, node_id=source.node_id) for source in reversed(kept)]
        prompt = engine.tokenize(engine.chat_prompt(settings.system, chunks, question, history))
        over = len(prompt.token_ids) - room
        if over <= 0:
            return Fitted(prompt, tuple(kept), _left_out(sources, kept, engine.context_window))
        if not kept:
            raise PromptTooLongError(_too_long(engine, settings, len(prompt.token_ids)))
        lengths = [len(chunk.token_ids or ()) for chunk in reversed(prompt.chunks)]
        while kept and over > 0:  # the lowest-ranked go first
            kept.pop()
            over -= lengths.pop()


def _left_out(sources: Sequence[Source], kept: Sequence[Source], window: int) -> str | None:
    if len(kept) == len(sources):
        return None
    return (
        f"The {len(sources) - len(kept)} lowest-ranked of {len(sources)} passages were left out: the model's window "
        f"is {window} tokens."
    )


def _too_long(engine: "Engine", settings: Settings, tokens: int) -> str:
    return (
        f"Asking: the question alone makes a prompt of {tokens} tokens; the window of {engine.model_name} is "
        f"{engine.context_window}, of which {settings.max_new_tokens} are kept for the answer. Shorten the question "
        "or lower max_new_tokens."
    )
