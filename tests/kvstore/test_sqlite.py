"""The SQLite helpers that adapters share: whoever imports them must not wait for torch."""

import subprocess
import sys

import pytest

MODULES = ("ragblend.kvstore.sqlite", "ragblend.integrations.passages", "ragblend.kvstore.policy")


@pytest.mark.parametrize("module", MODULES)
def test_importing_it_loads_no_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
