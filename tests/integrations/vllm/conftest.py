"""vLLM servers with the connector; the tests are skipped where vLLM cannot be imported."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no folder of tests on the path

import tiny_models
from vllm_helpers import SHAPE, STORED, Server, listening_on, passage, serve

from ragblend.engine.engine import Engine


@pytest.fixture(scope="session")
def has_vllm() -> None:
    """Skips the test where vLLM is not installed."""
    reason = "vLLM is not installed here; `make test-vllm` makes an environment with it"
    pytest.importorskip("vllm", reason=reason)


@pytest.fixture
def serving(has_vllm: None) -> Any:
    """Starts servers, and closes them at the end of the test."""
    with ExitStack() as stack:

        def start(*where: Any, **options: Any) -> Server:
            made = serve(*where, **options)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def fail_fusing(has_vllm: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has fusing fail for requests of which `when` is true; gives the methods that were tried."""
    from ragblend.integrations.vllm import worker

    prefill = worker.prefill

    def install(when: Any = lambda request: True, message: str = "no room") -> list[str]:
        tried = list[str]()

        def failing(runtime: Any, request: Any) -> Any:
            tried.append(request.policy.name)
            if when(request):
                raise MemoryError(message)
            return prefill(runtime, request)

        monkeypatch.setattr(worker, "prefill", failing)
        return tried

    return install


@pytest.fixture(scope="module")
def server(has_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama with six stored passages, p(0) to p(5)."""
    base = tmp_path_factory.mktemp("vllm")
    folder = tiny_models.save_model("llama", base / "llama", is_endless=True, **SHAPE)
    made = serve(folder, base / "home")
    made.engine.encode([passage(n) for n in range(6)], [f"p{n}" for n in range(6)])
    yield made
    made.close()


@pytest.fixture(scope="session")
def listening(has_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of a Llama whose STORED passages were encoded by the built-in engine."""
    base = tmp_path_factory.mktemp("served")
    folder = tiny_models.save_model("llama", base / "model", is_endless=True, **SHAPE)
    engine = Engine.open(str(folder), base / "home", device="cpu", dtype="float32")
    engine.encode(STORED, [f"p{n}" for n in range(len(STORED))])
    engine.close()
    named = ("--served-model-name", "tiny", "--block-size", "32")
    with listening_on(folder, base / "home", "float32", *named, minimum_tokens=32) as made:
        yield made
