"""Which versions of vLLM are supported, with a fake module of each version."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragblend.integrations.vllm import versions
from ragblend.integrations.vllm.versions import missing_name, refusal, untested_warning


@pytest.mark.parametrize("version", ["0.32.0", "v0.32.1"])
def test_a_tested_version_is_accepted_without_a_warning(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert refusal() is None and untested_warning() is None


def test_a_version_whose_interface_was_read_is_accepted_with_a_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0"))
    assert refusal() is None
    assert "0.33.0" in str(untested_warning()) and "was not tested" in str(untested_warning())


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.3.0", "1.0"])
def test_another_version_is_refused_by_name(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert version in str(refusal()) and "0.32.*" in str(refusal())


def test_a_missing_vllm_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "pip install" in str(refusal())


def test_a_missing_private_name_is_refused_with_its_consequence(has_vllm):
    assert missing_name() is None
    assert missing_name(versions.ROUTE_NAMES) is None
    for module, path, consequence in (*versions.PRIVATE_NAMES, *versions.ROUTE_NAMES):
        said = missing_name(((module, f"{path}_x", consequence),))
        assert f"has no {path}_x in {module}; without it {consequence}" in str(said)


def test_an_unsupported_vllm_says_so_when_it_loads_the_connector(has_vllm):
    """It said `Unsupported connector type`. In its own process: the module is imported once."""
    script = (
        "import vllm; vllm.__version__ = '0.34.0'\n"
        "from ragblend.integrations.vllm.plugin import register; register()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory\n"
        "factory.get_connector_class_by_name('RAGBlendConnector')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 1 and "this is 0.34.0; install one of those" in ended.stderr


def test_the_dashboard_shows_every_counter(has_vllm):
    from ragblend.integrations.vllm.metrics import COUNTERS

    shown = (Path(__file__).parents[3] / "deploy" / "grafana.json").read_text()
    assert set(re.findall(r"vllm:ragblend_(\w+)_total", shown)) == set(COUNTERS)
