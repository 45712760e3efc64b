"""A FAISS search in stages: each stage is the search of the clusters so far, and the last one of all."""

import numpy as np
import pytest

from ragblend.integrations.staged import in_stages

faiss = pytest.importorskip("faiss", reason="needs the extra faiss")
SIZE, LISTS = 16, 24


@pytest.fixture(scope="module", params=["METRIC_L2", "METRIC_INNER_PRODUCT"])
def index(request):
    vectors = np.random.default_rng(0).normal(size=(1500, SIZE)).astype(np.float32)
    made = faiss.index_factory(SIZE, f"IVF{LISTS},Flat", getattr(faiss, request.param))
    made.train(vectors)
    made.add(vectors)
    return made


@pytest.mark.parametrize(("probed", "stages"), [(12, 4), (24, 5), (3, 8), (1, 1)])
def test_each_stage_is_the_search_of_the_clusters_so_far(index, probed, stages):
    changed = 0
    for vector in np.random.default_rng(1).normal(size=(20, SIZE)).astype(np.float32):
        index.nprobe = probed
        found = list(in_stages(index, vector, 4, stages))
        assert index.nprobe == probed and len(found) == min(stages, probed)
        so_far = 0
        for part, ids in zip(np.array_split(np.arange(probed), len(found)), found, strict=True):
            so_far += len(part)
            index.nprobe = so_far
            assert ids.tolist() == [
                each for each in index.search(vector[None], 4)[1][0].tolist() if each >= 0
            ]
        changed += found[0].tolist() != found[-1].tolist()
    assert changed or len(found) == 1, "stages that never change would show nothing"


def test_fewer_vectors_than_wanted(index):
    index.nprobe = 2
    last = list(in_stages(index, np.ones(SIZE, np.float32), 10_000, 2))[-1]
    assert 0 < len(last) < 1500 and len(set(last.tolist())) == len(last)
