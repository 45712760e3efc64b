"""What the engine hands back."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ragblend.engine.config import Report
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.scheduling.queue import end_at_exit
from ragblend.kvstore.errors import Cancelled, without_frames
from ragblend.kvstore.files import Closing
from ragblend.kvstore.keys import ChunkKey

if TYPE_CHECKING:
    from ragblend.engine.prompts.paths import Computed
    from ragblend.kvstore.blob import Blob


@dataclass(frozen=True)
class EncodeReport:
    """encoded and skipped count chunks; tokens those that were encoded; keys one a text, in order (None: no KV)."""

    encoded: int
    skipped: int
    tokens: int
    keys: tuple[ChunkKey | None, ...]


@dataclass(frozen=True)
class Missing:
    """Nodes without KV, the most asked for first; their tokens, the bytes that their KV takes on the disk (of equal
    passages one is counted), and those that the store's budget has left for it.

    left_out: how many get none: longer than the model's window, or not entered for its tokenizer.
    """

    node_ids: tuple[str, ...]
    tokens: int
    nbytes: int
    room_bytes: int
    left_out: int = 0


@dataclass
class Prefilled:
    """A prompt that has been read. logits (vocab,) float32 of its last row.

    cache: transformers' kind of cache; None for a model that cannot be fused. computed: what of it may be entered in
    the knowledge tree. arrived: values that were read from a shared store, to be kept here. sure: the policy's, where
    stored KV was used that other text changes; else 0.
    """

    prompt: Prompt
    logits: Tensor
    cache: Any
    report: Report
    computed: Sequence["Computed"] = ()
    arrived: Mapping[ChunkKey, "Blob"] = field(default_factory=dict)
    sure: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """A token that was chosen, the logarithm of its probability, and the same of the most likely ones.

    The model's own probabilities: before temperature, penalties and grammars.
    """

    token_id: int
    logprob: float
    most_likely: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Result:
    """An answer: its text, the ids of its tokens (the end token included), what it took, and to which prompt.

    stopped: by its end token or a stop string, rather than by the most tokens that were wanted. logprobs: of each token
    but the end token, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    report: Report
    prompt: Prompt
    stopped: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None


Work = Callable[[Callable[[str], None], threading.Event], Result]  # (on_text, cancel) -> the whole answer


class Stream(Closing):
    """An answer on its way: iterate for the pieces of text; `result` is there when they have ended.

    The device works in a thread of its own; `close()` (or leaving a `with` block) stops it between two layers or two
    tokens. An error of the work is raised by the iteration.
    """

    def __init__(self, work: Work) -> None:
        self._pieces: SimpleQueue[str | BaseException | Result] = SimpleQueue()
        self._cancel = threading.Event()
        self._result: Result | None = None
        self._ended = False
        # The thread holds no reference to the stream: one that nobody holds any more is collected, and stops the work.
        self._thread = threading.Thread(
            target=_produce, args=(work, self._pieces, self._cancel), name="ragblend-stream", daemon=True
        )
        self._thread.start()
        end_at_exit(self)

    @property
    def result(self) -> Result:
        """The whole answer. Asked for early, it waits for the end and drops the pieces not yet taken."""
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
        """Ask the work to stop, and return at once; the iteration then ends with Cancelled."""
        self._cancel.set()

    def close(self) -> None:
        """Stop the work and wait until the device is free; closing twice, or after the end, does nothing."""
        self._cancel.set()
        self._thread.join()
        self._ended = True

    end = close  # when the process ends

    def __del__(self) -> None:
        self._cancel.set()


def _produce(
    work: Work, pieces: "SimpleQueue[str | BaseException | Result]", cancel: threading.Event
) -> None:
    try:
        pieces.put(work(pieces.put, cancel))
    except BaseException as error:
        pieces.put(without_frames(error))
