"""The optional reranker: a cross-encoder that scores how well a passage answers a question."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragblend.engine.model.checkpoints import checked_folder
from ragblend.engine.model.hub import download, is_hub_id, local_copy
from ragblend.engine.scheduling.queue import Cancel, DeviceQueue, DeviceTurn
from ragblend.kvstore.errors import (
    Cancelled,
    CorruptModelError,
    DeviceError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from ragblend.kvstore.files import Closing

BATCH_PAIRS = 8


def find_reranker(name: str) -> Path:
    """The folder of a reranker; downloads a hub id if needed. Raises subclasses of ModelError."""
    path = Path(os.path.expanduser(name))
    if not os.path.isdir(path) and not is_hub_id(name):
        raise ModelNotFoundError(
            f"Looking for the reranker: there is no folder {path}. Name a cross-encoder's folder or hub id "
            "(owner/name), or none (`reranker` in the settings)."
        )
    try:
        return checked_folder(path if os.path.isdir(path) else local_copy(name) or download(name))
    except ModelError as error:
        raise type(error)(f"Looking for the reranker: {error}") from error


class CrossEncoder(Closing):
    """A cross-encoder of transformers with one label, loaded on first use. Thread-safe.

    It runs in float32: in bfloat16, passages that match about equally well get the same score. device: None for the
    best one. queue: runs one thread at a time, which the tokenizer requires too, and yields between batches.
    """

    def __init__(self, name: str, device: str | None, queue: DeviceQueue | None = None) -> None:
        self.name, self._device_name, self._queue = name, device, queue or DeviceQueue()
        self._model: Any = None
        self._tokenizer: Any = None

    def load(self) -> None:
        """Load the model now. Raises subclasses of ModelError, and UsageError for a missing device."""
        with self._queue.turn() as turn:
            self._load(turn)

    def close(self) -> None:
        """Free the weights; the next use loads them again."""
        with self._queue.turn():
            self._model = self._tokenizer = None

    def scores(self, question: str, texts: Sequence[str], cancel: Cancel | None = None) -> list[float]:
        """How well each text answers the question: higher is better. Raises as `load` does, DeviceError, Cancelled."""
        with self._queue.turn(cancel) as turn:
            self._load(turn)
            try:
                return self._scores(question, texts, turn)
            except RuntimeError as error:
                raise DeviceError(
                    f"Reranking by {self.name} on {self._model.device}: the device failed ({error}). Name a smaller "
                    "reranker or none (`reranker` in the settings)."
                ) from error

    def count_tokens(self, texts: Sequence[str]) -> int:
        """The number of tokens of all texts, without truncation. Raises as `load` does."""
        with self._queue.turn() as turn:
            self._load(turn)
            return sum(len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)

    def _scores(self, question: str, texts: Sequence[str], turn: DeviceTurn) -> list[float]:
        import torch

        # A tokenizer may have no limit, and RoBERTa reserves two of its positions.
        max_tokens = min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings - 2)
        # Only the passage is truncated, unless the question is so long that it leaves no room.
        is_short = len(self._tokenizer(question, add_special_tokens=False)["input_ids"]) <= max_tokens // 2
        truncation = {"truncation": "only_second" if is_short else "longest_first", "max_length": max_tokens}
        scores, by_length = [0.0] * len(texts), sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(by_length), BATCH_PAIRS):
            turn.between_layers()
            batch = by_length[start : start + BATCH_PAIRS]  # similar lengths need little padding
            pairs = [question] * len(batch), [texts[index] for index in batch]
            inputs = self._tokenizer(*pairs, padding=True, return_tensors="pt", **truncation)
            with torch.inference_mode():
                batch_scores = self._model(**inputs.to(self._model.device)).logits[:, 0].tolist()
            for index, score in zip(batch, batch_scores, strict=True):
                scores[index] = score
        return scores

    def _load(self, turn: DeviceTurn) -> None:
        if self._model is not None:
            return
        folder = find_reranker(self.name)
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification

        from ragblend.engine.model.device import exclusive_model_loading, pick_device
        from ragblend.engine.model.load import load_tokenizer

        device = pick_device(self._device_name)
        try:
            labels = AutoConfig.from_pretrained(str(folder)).num_labels
            if labels != 1:
                raise UnsupportedModelError(
                    f"Loading the reranker in {folder}: it has {labels} labels, and a cross-encoder has one, its "
                    "score. Name another model, or none (`reranker` in the settings)."
                )
            self._tokenizer = load_tokenizer(folder)
            with exclusive_model_loading():
                loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                    str(folder), dtype="float32", local_files_only=True, output_loading_info=True
                )
            model, loading = loaded
            if missing := sorted(loading["missing_keys"]):  # transformers fills these with random numbers
                raise ValueError(f"{len(missing)} weights are missing ({missing[0]}, ...)")
            self._model = model.eval().to(device)
            self._scores("Is this read?", ["Yes.", "It is."], turn)  # if the model cannot run, fail now
        except Exception as error:  # transformers may raise anything for a damaged file
            self._model = None
            if isinstance(error, (ModelError, Cancelled)):
                raise
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                raise DeviceError(
                    f"there is too little memory on {device} for the reranker in {folder}; name a smaller one, or "
                    "none (`reranker` in the settings)"
                ) from error
            raise CorruptModelError(
                f"Loading the reranker in {folder}: it cannot be used ({type(error).__name__}: {error}). Fetch it "
                "again, name another model, or none (`reranker` in the settings)."
            ) from error
