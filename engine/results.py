"""Results of the engine: reports, a prefilled prompt, an answer, and an answer as a stream."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from ragblend.engine.config import Report
from ragblend.engine.model.rope import Rope
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.scheduling.background import end_at_exit
from ragblend.engine.scheduling.queue import DeviceTurn
from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import Cancelled, without_traceback
from ragblend.kvstore.files import Closing
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.tree import Node

OnText = Callable[[str], None]


@dataclass(frozen=True)
class EncodeReport:
    """What `encode` did. encoded, skipped: numbers of chunks; tokens: number of tokens encoded; keys: of each text's
    KV, in order (None: it has none).
    """

    encoded: int
    skipped: int
    tokens: int
    keys: tuple[ChunkKey | None, ...]


@dataclass(frozen=True)
class Missing:
    """Nodes without KV, the most requested first; their tokens, the bytes that their KV will take on the disk (equal
    passages count once), and room_bytes, the free bytes of the store's budget.

    left_out: how many cannot have KV: longer than the model's window, or not entered for its tokenizer.
    """

    node_ids: tuple[str, ...]
    tokens: int
    nbytes: int
    room_bytes: int
    left_out: int = 0


@dataclass(frozen=True)
class Computed:
    """The KV of a node of the knowledge tree.

    passage: on the first level, the key of the passage alone after its prefix. layers: keys and values (H, T, D) of
    each, views of the cache in which they were computed; rope: of a layer.
    """

    node: Node
    chunk: Chunk
    passage: ChunkKey | None
    layers: Sequence[tuple[Tensor, Tensor]]
    rope: Callable[[int], Rope]


@dataclass
class Prefilled:
    """A prefilled prompt. logits (vocab,) float32 of its last row.

    cache: a cache of transformers' interface; None for a model that cannot be fused. computed: KV that may enter the
    knowledge tree. arrived: values read from a shared store, to be stored here. sure: as in `Policy`, if inexact stored
    KV was used; else 0. prefill_other(prompt, turn): prefills another prompt, with the same options, from stored KV
    without recomputing any.
    """

    prompt: Prompt
    logits: Tensor
    cache: Any
    report: Report
    computed: Sequence[Computed] = ()
    arrived: Mapping[ChunkKey, Blob] = field(default_factory=dict)
    sure: float = 0.0
    prefill_other: Callable[[Prompt, DeviceTurn], "Prefilled"] | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token, its log-probability, and those of the most likely tokens.

    They are the model's own: before temperature, penalties and grammars.
    """

    token_id: int
    logprob: float
    most_likely: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Result:
    """An answer: its text, its token ids (the end token included), the report and the prompt.

    stopped: it ended with an end token or a stop string, and not at the token limit. logprobs: of each token but the
    end token, if requested.
    """

    text: str
    token_ids: tuple[int, ...]
    report: Report
    prompt: Prompt
    stopped: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None


AnswerFunction = Callable[[OnText, threading.Event], Result]  # (on_text, cancel) -> the whole answer


class Stream(Closing):
    """An answer in progress: iterate for the pieces of text; `result` is available when they have ended.

    The answer is computed in a thread of its own; `close()` (or the end of a `with` block) stops it between two layers
    or two tokens. Its errors are raised by the iteration.
    """

    def __init__(self, answer: AnswerFunction) -> None:
        self._pieces: SimpleQueue[str | BaseException | Result] = SimpleQueue()
        self._cancel = threading.Event()
        self._result: Result | None = None
        self._ended = False
        # The thread holds no reference to the stream, so that dropping the stream collects it, which stops the thread.
        self._thread = threading.Thread(
            target=_produce, args=(answer, self._pieces, self._cancel), name="ragblend-stream", daemon=True
        )
        self._thread.start()
        end_at_exit(self, ends_first=True)

    @property
    def result(self) -> Result:
        """The whole answer. Waits for the end, and drops pieces that were not consumed."""
        for _ in self:
            pass
        if self._result is None:
            raise Cancelled("the stream was closed before its answer was complete")
        return self._result

    def __iter__(self) -> Iterator[str]:
        while not self._ended:
            piece = self._pieces.get()
            if isinstance(piece, str):
                yield piece
                continue
            self._ended = True
            if not isinstance(piece, Result):
                raise piece
            self._result = piece

    def stop(self) -> None:
        """Request a stop and return at once; the iteration then ends with Cancelled."""
        self._cancel.set()

    def close(self) -> None:
        """Stop the answer and wait until the device is free. Idempotent."""
        self._cancel.set()
        self._thread.join()
        self._ended = True

    end = close  # called when the process ends

    def __del__(self) -> None:
        self._cancel.set()


def _produce(
    answer: AnswerFunction, pieces: "SimpleQueue[str | BaseException | Result]", cancel: threading.Event
) -> None:
    try:
        pieces.put(answer(pieces.put, cancel))
    except BaseException as error:
        pieces.put(without_traceback(error))
