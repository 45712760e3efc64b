"""Retrieval in stages, for `Engine.stream_staged`, which takes one prompt for each stage.

`in_stages` searches a FAISS index of clusters as RAGCache does (arXiv 2404.12457, section 5.3): the probed clusters
are searched in parts, the nearest first.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray


def in_stages(
    index: Any, vector: NDArray[np.float32], top_k: int, stages: int = 4
) -> Iterator[NDArray[np.int64]]:
    """Yield the ids nearest to vector (D,) among the clusters searched so far, best first, after each stage.

    The last ids equal those of `index.search`; there are fewer than top_k if the clusters hold fewer.
    index: a `faiss.IndexIVF`, which probes `nprobe` clusters.
    """
    import faiss

    query = np.ascontiguousarray(vector, dtype=np.float32)[None]
    distances, clusters = index.quantizer.search(query, index.nprobe)
    is_similarity = index.metric_type == faiss.METRIC_INNER_PRODUCT
    scores, ids = np.empty(0, np.float32), np.empty(0, np.int64)
    for part in np.array_split(np.arange(index.nprobe), min(stages, index.nprobe)):
        searched = np.full_like(clusters, -1)  # FAISS skips -1
        searched[:, part] = clusters[:, part]
        new_scores, new_ids = index.search_preassigned(query, top_k, searched, distances)
        scores, ids = np.concatenate([scores, new_scores[0]]), np.concatenate([ids, new_ids[0]])
        scores, ids = scores[ids >= 0], ids[ids >= 0]
        best = np.argsort(-scores if is_similarity else scores, kind="stable")[:top_k]
        scores, ids = scores[best], ids[best]
        yield ids
