"""Retrieval that says early what it has found so far: for `Engine.stream_staged`, which takes a prompt a stage.

`in_stages` makes it of a FAISS index whose vectors lie in clusters, as RAGCache does (arXiv 2404.12457, section 5.3):
those that a search probes are searched a part at a time, the nearest first.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray


def in_stages(
    index: Any, vector: NDArray[np.float32], top_k: int, stages: int = 4
) -> Iterator[NDArray[np.int64]]:
    """Ids of the passages nearest to vector (D,), best first, after each part of the clusters that are probed.

    The last ones are `index.search`'s; fewer where it has fewer. index: a `faiss.IndexIVF`; its `nprobe` says how many
    clusters.
    """
    import faiss

    query = np.ascontiguousarray(vector, dtype=np.float32)[None]
    far, clusters = index.quantizer.search(query, index.nprobe)
    is_similarity = index.metric_type == faiss.METRIC_INNER_PRODUCT
    scores, found = np.empty(0, np.float32), np.empty(0, np.int64)
    for part in np.array_split(np.arange(index.nprobe), min(stages, index.nprobe)):
        those = np.full_like(clusters, -1)  # which FAISS skips
        those[:, part] = clusters[:, part]
        new_scores, new = index.search_preassigned(query, top_k, those, far)
        scores, found = np.concatenate([scores, new_scores[0]]), np.concatenate([found, new[0]])
        scores, found = scores[found >= 0], found[found >= 0]
        best = np.argsort(-scores if is_similarity else scores, kind="stable")[:top_k]
        scores, found = scores[best], found[best]
        yield found
