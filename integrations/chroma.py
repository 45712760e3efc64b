"""The vector index, in Chroma: node ids and our own embeddings only, a vector for each window of a node.

It can be rebuilt from the registry, which has texts and embeddings. Only the holder of the writer lock may call
`upsert`, `delete` and `rebuild`: two writing processes silently corrupt Chroma 1.5.

Chroma only marks deleted vectors in its graph; its log keeps them until a thousand entries have followed, and free
pages for ever. So `delete` overwrites a vector before it removes it, and `erase` flushes this to the disk.
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
FOREIGN = "an older version or another program made it"
NODE = "node"  # the metadata key of the node id of a vector
VECTORS_A_HIT = 4  # vectors to query per wanted node
DELETE_NODES = 500  # in one query
SPREAD = 1e-3  # how far a vector is moved; its length is 1
REBUILT_NODES = 1000  # per write: ten times faster than one write per document
SYNC_ENTRIES = 1100  # after a thousand (`sync_threshold`) Chroma writes its graph and purges its log
# Chroma shares one system for a folder, and gives it to other threads while it is still starting.
_starting = threading.RLock()
# A query makes Chroma write pending data, which must not happen while its files are swept.
_using = threading.RLock()


@dataclass(frozen=True)
class Hit:
    """A found node; score is the cosine similarity, 1 for the same direction."""

    node_id: str
    score: float


class VectorIndex:
    """The vectors of one collection by one embedder. Raises LibraryError, naming the repair, for Chroma's errors."""

    def __init__(self, folder: Path, collection: str, embedder: str = DEFAULT) -> None:
        self.folder = folder
        other = "" if embedder == DEFAULT else f".{hashlib.sha256(embedder.encode()).hexdigest()[:12]}"
        self.name = f"ragblend{other}-{collection}"  # Chroma refuses names of fewer than three letters
        self._client: Any = None

    def upsert(self, node_ids: Sequence[str], embeddings: Sequence[Embeddings]) -> None:
        """Add or replace nodes, each with its vectors (W, E).

        Unchanged vectors are not rewritten, because HNSW would relink others and may lose the path to some.
        """
        embeddings = [apart(node, rows) for node, rows in zip(node_ids, embeddings, strict=True)]
        given = {
            f"{node}#{n}": (node, row)
            for node, rows in zip(node_ids, embeddings, strict=True)
            for n, row in enumerate(rows)
        }
        with self._named_errors("writing to"):
            collection, most = self._collection(), self._connect().get_max_batch_size()
            for part in _slices(len(given), most):
                names = list(given)[part]
                found = collection.get(ids=names, include=["embeddings"])
                known = dict(zip(found["ids"], found["embeddings"], strict=True))
                new = [
                    n for n in names if n not in known or not np.allclose(known[n], given[n][1], atol=1e-6)
                ]
                if new:
                    collection.upsert(
                        ids=new,
                        embeddings=np.stack([given[name][1] for name in new]),
                        metadatas=[{NODE: given[name][0]} for name in new],
                    )

    def delete(self, node_ids: Sequence[str]) -> None:
        """Remove nodes; unknown ids are no error. Their bytes are erased by the next `erase`."""
        with self._named_errors("deleting from"):
            for part in _slices(len(node_ids), DELETE_NODES):
                found = self._collection().get(where={NODE: {"$in": list(node_ids[part])}}, include=[])["ids"]
                if found:
                    self._overwrite(found)
                    self._collection().delete(ids=found)

    def _overwrite(self, ids: Sequence[str]) -> None:
        """Replace the vectors by random ones: the graph keeps what is deleted."""
        collection = self._collection()
        known = collection.get(ids=ids[:1], include=["embeddings"])["embeddings"]
        chance = np.random.default_rng().normal(size=(len(ids), known.shape[1])).astype(np.float32)
        for part in _slices(len(ids), self._connect().get_max_batch_size()):
            collection.update(ids=ids[part], embeddings=chance[part])

    def erase(self) -> None:
        """Remove every byte of deleted vectors from the files."""
        with self._named_errors("erasing from"):
            collection = self._collection()
            if collection.count():
                collection.delete(ids=[f"nobody#{n}" for n in range(SYNC_ENTRIES)])
                self._sweep(collection)
            else:  # in that case Chroma writes no graph, and its log would stay
                self.rebuild(())

    def query(self, embedding: Embeddings, count: int) -> list[Hit]:
        """The nearest nodes to one embedding (E,), best first; fewer when there are fewer."""
        with self._named_errors("searching"):
            asked = count * VECTORS_A_HIT
            while True:  # the nearest vectors may all belong to a few nodes: query more
                best = self._nearest(embedding, asked)
                if len(best) >= count or asked >= self._collection().count():
                    return best[:count]
                asked *= 4

    def _nearest(self, embedding: Embeddings, vectors: int) -> list[Hit]:
        """The nodes of the nearest vectors, each with its best score."""
        found = self._collection().query(
            query_embeddings=embedding[None, :], n_results=vectors, include=["distances", "metadatas"]
        )
        best: dict[str, float] = {}
        for owner, distance in zip(found["metadatas"][0], found["distances"][0], strict=True):
            best.setdefault(_node_of(owner), 1.0 - float(distance))
        return [Hit(node, score) for node, score in best.items()]

    def count(self) -> int:
        """The number of nodes."""
        return len(self.node_ids())

    def node_ids(self) -> set[str]:
        with self._named_errors("listing"):
            return {_node_of(owner) for owner in self._collection().get(include=["metadatas"])["metadatas"]}

    def rebuild(self, batches: Iterable[tuple[Sequence[str], Sequence[Embeddings]]]) -> int:
        """Rebuild the collection from the registry's embeddings, and erase the rest; returns the number of nodes."""
        self._drop()
        total = 0
        for node_ids, embeddings in _joined(batches, REBUILT_NODES):
            self.upsert(node_ids, embeddings)
            total += len(node_ids)
        with self._named_errors("erasing from"):
            self._sweep(self._collection())
        return total

    def drop(self) -> None:
        """Delete all of it, and erase it from the files."""
        with self._named_errors("deleting"):
            self._any_collection()
            self._connect().delete_collection(self.name)
            self._sweep(None)

    def close(self) -> None:
        with _starting:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _connect(self) -> Any:
        import chromadb
        from chromadb.config import Settings

        with _starting:
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
        collection = self._any_collection()
        measure = (collection.configuration_json.get("hnsw") or {}).get("space")
        if measure != SPACE:  # Chroma silently keeps an existing configuration
            raise ValueError(f"it measures distances by {measure}, not by {SPACE}; {FOREIGN}")
        return collection

    def _any_collection(self) -> Any:
        # embedding_function=None: the default one downloads a model from the internet.
        return self._connect().get_or_create_collection(
            self.name, embedding_function=None, configuration={"hnsw": {"space": SPACE}}
        )

    def _drop(self) -> None:
        """Delete the collection; if Chroma cannot open its files, delete those (the other collections' too)."""
        try:
            with self._named_errors("deleting"):
                self._any_collection()
                self._connect().delete_collection(self.name)
        except LibraryError:
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _sweep(self, collection: Any) -> None:
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
    def _named_errors(self, doing: str) -> Iterator[None]:
        try:
            with _using:
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
    if not metadata or NODE not in metadata:
        raise ValueError(f"it holds vectors without the id of a passage; {FOREIGN}")
    return str(metadata[NODE])


def _joined(
    batches: Iterable[tuple[Sequence[str], Sequence[Embeddings]]], least: int
) -> Iterator[tuple[list[str], list[Embeddings]]]:
    """Join batches until each has at least that many nodes."""
    nodes, rows = list[str](), list[Embeddings]()
    for node_ids, embeddings in batches:
        nodes += node_ids
        rows += embeddings
        if len(nodes) >= least:
            yield nodes, rows
            nodes, rows = [], []
    if nodes:
        yield nodes, rows


def apart(node_id: str, rows: Embeddings) -> Embeddings:
    """Deduplicate a node's vectors (W, E) and move each slightly, so that no two nodes share one -> (W', E).

    HNSW links a vector to its nearest ones. If many of these are equal, some become unreachable: with three of 13
    windows in common, no question found 80 of 400 passages. At a distance of SPREAD, which changes a score by about
    5e-5, all are found.
    """
    _, first = np.unique(rows, axis=0, return_index=True)
    once = rows[np.sort(first)]
    seed = int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:8])
    chance = np.random.default_rng(seed).normal(size=once.shape)
    moved: Embeddings = (once + SPREAD / np.sqrt(once.shape[1]) * chance).astype(np.float32)
    return moved


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, total, step)]
