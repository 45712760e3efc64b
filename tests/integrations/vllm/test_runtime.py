"""What a worker of vLLM makes of its process."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest


def cores_of_readers(home: Path, core: int) -> set[int]:
    """Where a reader may run in a process whose main thread is bound as vLLM binds a worker's."""
    from ragblend.integrations.vllm.runtime import VllmRuntime
    from ragblend.integrations.vllm.settings import Settings

    os.sched_setaffinity(0, {core})
    model = SimpleNamespace(model="m", dtype="torch.bfloat16")
    config = SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type="cpu"))
    runtime = VllmRuntime(config, Settings(home=str(home)))
    try:
        return set(runtime.readers.submit(os.sched_getaffinity, 0).result())
    finally:
        runtime.close()


def test_readers_are_not_bound_to_the_core_that_computes(tmp_path):
    """They inherited it, and took its time from the product that ran there."""
    mine = os.sched_getaffinity(0)
    if len(mine) == 1:
        pytest.skip("there is one core")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as worker:
        assert worker.submit(cores_of_readers, tmp_path, min(mine)).result(60) == mine
