"""A process that imports only the store, and forks a child for each scenario of the fault suite.

Scenarios kill, trace and fork. They do so from here and not from pytest, which has threads and hundreds of megabytes.
Reads one JSON object a line: scenario (module:function) and arguments. Answers with one a line: result, or failed (a
traceback) and oracle (whether an OracleError it was).
"""

import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from fault_values import OracleError, put, version_read

from ragblend.kvstore.store import KVStore


def warm_up() -> None:
    """Whatever is imported or computed at first use happens before anything is traced."""
    with tempfile.TemporaryDirectory() as folder, KVStore.open(Path(folder, "kv"), 1 << 20) as store:
        put(store, 0)
        version_read(store, 0, {0})
        store.check()
        store.gc([])


def answer(scenario: str, arguments: dict[str, Any]) -> dict[str, Any]:
    module, function = scenario.split(":")
    try:
        return {"result": getattr(importlib.import_module(module), function)(**arguments)}
    except Exception as error:
        return {"failed": traceback.format_exc(), "oracle": isinstance(error, OracleError)}


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # whatever a scenario prints is no answer
    warm_up()
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            reply = answer(job["scenario"], job["arguments"])
            os.write(out, (json.dumps(reply) + "\n").encode())
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            os.write(out, (json.dumps({"failed": f"it died: {status}", "oracle": False}) + "\n").encode())


if __name__ == "__main__":
    main()
