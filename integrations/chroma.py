"""The vector index, in Chroma: node ids and our own embeddings only, a vector for each window of a node.

It can be rebuilt from the registry, which has texts and embeddings. Only the holder of the writer lock may call
`upsert`, `delete` and `rebuild`: two writing processes silently corrupt Chroma 1.5.

Chroma only marks deleted vectors in its graph. Its log keeps them until a thousand further entries are written, and
its free pages keep them for ever. So `delete` overwrites a vector before it removes it, and `erase` flushes this to the
disk.
"""

import hashlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragblend.integrations.embeddings import DEFAULT
from ragblend.kvstore.errors import LibraryError

Embeddings = NDArray[np.float32]
SPACE = "cosine"
MADE_ELSEWHERE = "an older version or another program made it"
NODE_KEY = "node"  # the metadata key of the node id of a vector
VECTORS_PER_HIT = 4  # vectors to query per wanted node
NODES_PER_DELETE = 500
JITTER = 1e-3  # distance by which `separate_vectors` moves a vector; its length is 1
NODES_PER_REBUILD_BATCH = 1000  # ten times faster than one write per document
SYNC_ENTRIES = 1100  # after a thousand (`sync_threshold`) Chroma writes its graph and purges its log
# Chroma shares one client per folder and process, and hands it to other threads while it is still starting.
_start_lock = threading.RLock()
# A query makes Chroma write pending data, which must not happen while its files are swept.
_use_lock = threading.RLock()


@dataclass(frozen=True)
class Hit:
    """A found node; score is the cosine similarity, 1 for the same direction."""

    node_id: str
    score: float


class VectorIndex:
    """The vectors of one collection by one embedder. Raises LibraryError, naming the repair, for Chroma's errors."""

    def __init__(self, folder: Path, collection: str, embedder: str = DEFAULT) -> None:
        self.folder = folder
        suffix = "" if embedder == DEFAULT else f".{hashlib.sha256(embedder.encode()).hexdigest()[:12]}"
        self.name = f"ragblend{suffix}-{collection}"  # Chroma refuses names of fewer than three letters
        self._client: Any = None

    def upsert(self, node_ids: Sequence[str], embeddings: Sequence[Embeddings]) -> None:
        """Add or replace nodes, each with its vectors (W, E).

        Unchanged vectors are not rewritten, because HNSW would relink others and may lose the path to some.
        """
        embeddings = [separate_vectors(node, rows) for node, rows in zip(node_ids, embeddings, strict=True)]
        vectors = {
            f"{node}#{n}": (node, row)
            for node, rows in zip(node_ids, embeddings, strict=True)
            for n, row in enumerate(rows)
        }
        with self._library_errors("writing to"):
            collection, max_batch = self._collection(), self._connect().get_max_batch_size()
            for part in _slices(len(vectors), max_batch):
                ids = list(vectors)[part]
                found = collection.get(ids=ids, include=["embeddings"])
                known = dict(zip(found["ids"], found["embeddings"], strict=True))
                changed = [
                    i for i in ids if i not in known or not np.allclose(known[i], vectors[i][1], atol=1e-6)
                ]
                if changed:
                    collection.upsert(
                        ids=changed,
                        embeddings=np.stack([vectors[i][1] for i in changed]),
                        metadatas=[{NODE_KEY: vectors[i][0]} for i in changed],
                    )

    def delete(self, node_ids: Sequence[str]) -> None:
        """Remove nodes; unknown ids are no error. Their bytes are erased by the next `erase`."""
        with self._library_errors("deleting from"):
            for part in _slices(len(node_ids), NODES_PER_DELETE):
                of_nodes = {NODE_KEY: {"$in": list(node_ids[part])}}
                found = self._collection().get(where=of_nodes, include=[])["ids"]
                if found:
                    self._overwrite(found)
                    self._collection().delete(ids=found)

    def _overwrite(self, ids: Sequence[str]) -> None:
        """Replace the vectors by random ones, because the graph keeps deleted vectors."""
        collection = self._collection()
        known = collection.get(ids=ids[:1], include=["embeddings"])["embeddings"]
        noise = np.random.default_rng().normal(size=(len(ids), known.shape[1])).astype(np.float32)
        for part in _slices(len(ids), self._connect().get_max_batch_size()):
            collection.update(ids=ids[part], embeddings=noise[part])

    def erase(self) -> None:
        """Remove every byte of deleted vectors from the files."""
        with self._library_errors("erasing from"):
            collection = self._collection()
            if collection.count():  # deleting unknown ids fills the log, so that Chroma purges it
                collection.delete(ids=[f"nobody#{n}" for n in range(SYNC_ENTRIES)])
                self._sweep(collection)
            else:  # without vectors Chroma writes no graph, and its log would stay
                self.rebuild(())

    def query(self, embedding: Embeddings, count: int) -> list[Hit]:
        """The `count` nodes nearest to an embedding (E,), best first; fewer if the index has fewer."""
        with self._library_errors("searching"):
            vector_count = count * VECTORS_PER_HIT
            while True:  # the nearest vectors may all belong to a few nodes: query more
                best = self._nearest(embedding, vector_count)
                if len(best) >= count or vector_count >= self._collection().count():
                    return best[:count]
                vector_count *= 4

    def _nearest(self, embedding: Embeddings, vector_count: int) -> list[Hit]:
        """The nodes of the `vector_count` nearest vectors, each with its best score."""
        found = self._collection().query(
            query_embeddings=embedding[None, :], n_results=vector_count, include=["distances", "metadatas"]
        )
        best: dict[str, float] = {}
        for owner, distance in zip(found["metadatas"][0], found["distances"][0], strict=True):
            best.setdefault(_node_of(owner), 1.0 - float(distance))
        return [Hit(node, score) for node, score in best.items()]

    def count(self) -> int:
        """The number of nodes."""
        return len(self.node_ids())

    def node_ids(self) -> set[str]:
        with self._library_errors("listing"):
            return {_node_of(owner) for owner in self._collection().get(include=["metadatas"])["metadatas"]}

    def rebuild(self, batches: Iterable[tuple[Sequence[str], Sequence[Embeddings]]]) -> int:
        """Rebuild the collection from the registry's embeddings, and erase the rest; returns the number of nodes."""
        self._drop_even_if_damaged()
        total = 0
        for node_ids, embeddings in _larger_batches(batches, NODES_PER_REBUILD_BATCH):
            self.upsert(node_ids, embeddings)
            total += len(node_ids)
        with self._library_errors("erasing from"):
            self._sweep(self._collection())
        return total

    def drop(self) -> None:
        """Delete the collection, and erase it from the files."""
        with self._library_errors("deleting"):
            self._unchecked_collection()
            self._connect().delete_collection(self.name)
            self._sweep(None)

    def close(self) -> None:
        with _start_lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _connect(self) -> Any:
        import chromadb
        from chromadb.config import Settings

        with _start_lock:
            if self._client is None:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                settings = Settings(anonymized_telemetry=False)
                try:
                    self._client = chromadb.PersistentClient(path=self.folder, settings=settings)
                except BaseException:
                    self._forget_failed_start()
                    raise
            return self._client

    def _forget_failed_start(self) -> None:
        """Chroma keeps a system that failed to start, and would return it again after a repair."""
        from chromadb.api.shared_system_client import SharedSystemClient

        SharedSystemClient._identifier_to_system.pop(str(self.folder), None)

    def _collection(self) -> Any:
        """Chroma's collection, created if necessary. Raises ValueError if it measures distances otherwise."""
        collection = self._unchecked_collection()
        space = (collection.configuration_json.get("hnsw") or {}).get("space")
        if space != SPACE:  # Chroma silently keeps an existing configuration
            raise ValueError(f"it measures distances by {space}, not by {SPACE}; {MADE_ELSEWHERE}")
        return collection

    def _unchecked_collection(self) -> Any:
        # embedding_function=None: the default one downloads a model from the internet.
        return self._connect().get_or_create_collection(
            self.name, embedding_function=None, configuration={"hnsw": {"space": SPACE}}
        )

    def _drop_even_if_damaged(self) -> None:
        """Delete the collection; if Chroma cannot open its files, delete the files, of the other collections too."""
        try:
            with self._library_errors("deleting"):
                self._unchecked_collection()
                self._connect().delete_collection(self.name)
        except LibraryError:
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _sweep(self, collection: Any) -> None:
        """Run `chroma_sweep.py` on the folder; None: the collection was deleted."""
        script = Path(__file__).with_name("chroma_sweep.py")
        command = [
            sys.executable,
            "-I",
            str(script),
            str(self.folder),
            str(collection.id if collection else ""),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"deleted vectors may still be in its files ({done.stderr.strip()})")

    @contextmanager
    def _library_errors(self, doing: str) -> Iterator[None]:
        """Raise LibraryError for any error, with what was being done."""
        try:
            with _use_lock:
                yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # its Rust core panics with a BaseException
            raise LibraryError(
                f"{doing.capitalize()} the vector index in {self.folder}: {error}. Documents and texts are unharmed; "
                "run `ragblend store repair` to rebuild the index."
            ) from error


def _node_of(metadata: Mapping[str, Any] | None) -> str:
    """The node that a vector belongs to. Raises ValueError for a vector that is not ours."""
    if not metadata or NODE_KEY not in metadata:
        raise ValueError(f"it holds vectors without the id of a passage; {MADE_ELSEWHERE}")
    return str(metadata[NODE_KEY])


def _larger_batches(
    batches: Iterable[tuple[Sequence[str], Sequence[Embeddings]]], min_nodes: int
) -> Iterator[tuple[list[str], list[Embeddings]]]:
    """Join batches, so that each but the last has at least `min_nodes` nodes."""
    nodes, rows = list[str](), list[Embeddings]()
    for node_ids, embeddings in batches:
        nodes += node_ids
        rows += embeddings
        if len(nodes) >= min_nodes:
            yield nodes, rows
            nodes, rows = [], []
    if nodes:
        yield nodes, rows


def separate_vectors(node_id: str, rows: Embeddings) -> Embeddings:
    """Deduplicate a node's vectors (W, E) and move each slightly, so that no two nodes share one -> (W', E).

    HNSW links a vector to its nearest ones. If many of these are equal, some become unreachable: with three of 13
    windows in common, no question found 80 of 400 passages. At a distance of JITTER, which changes a score by about
    5e-5, all are found.
    """
    _, first = np.unique(rows, axis=0, return_index=True)
    distinct = rows[np.sort(first)]
    seed = int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:8])
    noise = np.random.default_rng(seed).normal(size=distinct.shape)
    moved: Embeddings = (distinct + JITTER / np.sqrt(distinct.shape[1]) * noise).astype(np.float32)
    return moved


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, total, step)]
