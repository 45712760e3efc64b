"""Chroma as the vector index: node ids and embeddings only, always our own embeddings, one collection of ours each.

Chroma is rebuildable: texts and embeddings live in the registry. Only the holder of the writer lock may call `upsert`,
`delete` and `rebuild`: Chroma 1.5 is silently corrupted by two writing processes.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragblend.kvstore.errors import LibraryError

Embeddings = NDArray[np.float32]


@dataclass(frozen=True)
class Hit:
    """A node that was found; score is the cosine similarity, 1 for the same direction."""

    node_id: str
    score: float


class VectorIndex:
    """The vectors of one collection. Raises LibraryError, naming the repair, for whatever Chroma raises."""

    def __init__(self, folder: Path, collection: str) -> None:
        self.folder = folder
        self.name = f"ragblend-{collection}"  # Chroma refuses names of fewer than three letters
        self._client: Any = None

    def upsert(self, node_ids: Sequence[str], embeddings: Embeddings) -> None:
        """Add or replace vectors (N, E), all or an error."""
        with self._named_errors("writing to"):
            collection = self._collection()
            for part in _slices(len(node_ids), self._connect().get_max_batch_size()):
                collection.upsert(ids=list(node_ids[part]), embeddings=embeddings[part])

    def delete(self, node_ids: Sequence[str]) -> None:
        """Remove vectors; ids that are not there are no error."""
        with self._named_errors("deleting from"):
            for part in _slices(len(node_ids), self._connect().get_max_batch_size()):
                self._collection().delete(ids=list(node_ids[part]))

    def query(self, embedding: Embeddings, count: int) -> list[Hit]:
        """The nearest nodes to one embedding (E,), best first; fewer when there are fewer."""
        with self._named_errors("searching"):
            found = self._collection().query(
                query_embeddings=embedding[None, :], n_results=count, include=["distances"]
            )
        return [
            Hit(node, 1.0 - float(far))
            for node, far in zip(found["ids"][0], found["distances"][0], strict=True)
        ]

    def count(self) -> int:
        with self._named_errors("counting"):
            return int(self._collection().count())

    def node_ids(self) -> set[str]:
        with self._named_errors("listing"):
            return set(self._collection().get(include=[])["ids"])

    def rebuild(self, batches: Iterable[tuple[Sequence[str], Embeddings]]) -> int:
        """Make the collection again from the registry's embeddings. Returns how many vectors it holds."""
        self._drop()
        total = 0
        for node_ids, embeddings in batches:
            self.upsert(node_ids, embeddings)
            total += len(node_ids)
        return total

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connect(self) -> Any:
        if self._client is None:
            import chromadb
            from chromadb.config import Settings

            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            settings = Settings(anonymized_telemetry=False)
            try:
                self._client = chromadb.PersistentClient(path=self.folder, settings=settings)
            except BaseException:
                self._forget_failed_start()
                raise
        return self._client

    def _forget_failed_start(self) -> None:
        """Chroma keeps what failed to start, a folder each, and would hand it out again after a repair."""
        from chromadb.api.shared_system_client import SharedSystemClient

        SharedSystemClient._identifier_to_system.pop(str(self.folder), None)

    def _collection(self) -> Any:
        # embedding_function=None: the default one downloads a model from the internet.
        return self._connect().get_or_create_collection(
            self.name, embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
        )

    def _drop(self) -> None:
        """Delete the collection; when Chroma cannot even open its files, delete those (the others' vectors too)."""
        try:
            with self._named_errors("deleting"):
                self._collection()
                self._connect().delete_collection(self.name)
        except LibraryError:
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def _named_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # its Rust core panics with a BaseException
            raise LibraryError(
                f"{doing.capitalize()} the vector index in {self.folder}: {error}. Documents and texts are unharmed; "
                "run `ragblend store repair` to build the index again."
            ) from error


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, total, step)]
