"""Which versions of vLLM are taken, by a made-up module of that version."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from ragblend.integrations.vllm.versions import refusal, warning


@pytest.mark.parametrize("version", ["0.32.0", "v0.32.1"])
def test_one_that_the_tests_run_in_is_taken_without_a_word(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert refusal() is None and warning() is None


def test_one_whose_interface_was_read_is_taken_with_a_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0"))
    said = warning()
    assert refusal() is None and said is not None
    assert "0.33.0" in said and "nothing was run" in said


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.3.0", "1.0"])
def test_another_one_is_refused_by_name(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    said = refusal()
    assert said is not None and version in said and "0.32.*" in said


def test_none_at_all_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    said = refusal()
    assert said is not None and "pip install" in said


def test_another_one_says_so_where_the_connector_is_named(has_vllm):
    """It was `Unsupported connector type`, as if RAGBlend were not there. In a process of its own: it imports once."""
    script = (
        "import vllm; vllm.__version__ = '0.34.0'\n"
        "from ragblend.integrations.vllm.plugin import register; register()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory\n"
        "factory.get_connector_class_by_name('RAGBlendConnector')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 1 and "this is 0.34.0; install one of those" in ended.stderr
