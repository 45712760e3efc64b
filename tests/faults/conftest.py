"""Fixtures of the fault suite: repeat counts, a process to kill others in, and the store's folder."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_values import FULL, OracleError


@pytest.fixture(scope="session")
def count() -> Callable[[float, float], Any]:
    """count(full, reduced): how often, or how long; `make faults` asks for the full count."""
    return lambda full, reduced: full if FULL else reduced


class Lab:
    """Runs scenarios in a process of its own, each with its own limit: what hangs is killed and is a failure."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("fault_lab.py"))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )

    def run(self, scenario: str, limit_s: float, **arguments: Any) -> Any:
        """The scenario's result; OracleError where its oracle saw one, RuntimeError for anything else."""
        line = json.dumps({"scenario": scenario, "arguments": arguments}, default=str)
        self.process.stdin.write((line + "\n").encode())
        reply = json.loads(self._line(scenario, limit_s))
        if "failed" in reply:
            raise (OracleError if reply["oracle"] else RuntimeError)(reply["failed"])
        return reply["result"]

    def _line(self, scenario: str, limit_s: float) -> bytes:
        deadline, line = time.monotonic() + limit_s, b""
        while not line.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.close()
                raise OracleError(f"{scenario} did not end within {limit_s} s: a deadlock")
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, "the laboratory died"
            line += more
        return line

    def close(self) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()


@pytest.fixture(scope="session")
def running_lab() -> Iterator[list[Lab]]:
    labs: list[Lab] = []
    yield labs
    for each in labs:
        each.close()


@pytest.fixture
def lab(running_lab: list[Lab]) -> Lab:
    """One for the session; a new one after a deadlock."""
    if not running_lab or running_lab[-1].process.returncode is not None:
        running_lab.append(Lab())
    return running_lab[-1]
