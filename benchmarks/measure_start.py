"""Times a new process of `ragblend ask` until the first token of its answer: wall-clock and processor time.

    python -m benchmarks.measure_start --home HOME                    medians of five; HOME filled by `ragblend ingest`
    python -m benchmarks.measure_start --home HOME --other CHECKOUT   alternating with another checkout

A first run of each is not counted: it may convert the model and read files from disk. Linux only, for /proc.
"""

import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.common import REPO, Home, environment_without_openmp, run, run_alternately

QUESTION = "When did the Thornsay Causeway Tramway open?"
TICKS = os.sysconf("SC_CLK_TCK")


def first_token(checkout: Path, home: Path, question: str) -> tuple[float, float]:
    """Wall-clock and processor seconds until the answer begins on stdout; then the process is killed."""
    command = [sys.executable, "-m", "ragblend.app.cli.main", "ask", question, "--home", str(home)]
    own, out, err = environment_without_openmp(PYTHONPATH=str(checkout)), subprocess.PIPE, subprocess.DEVNULL
    begun = time.perf_counter()
    with subprocess.Popen(command, cwd=checkout, env=own, stdout=out, stderr=err) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{command} in {checkout} ended with {process.wait()}, and wrote nothing")
        clock = time.perf_counter() - begun
        user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        process.kill()
    return clock, (int(user) + int(system)) / TICKS


def main(home: Home, other: list[Path] | None = None, question: str = QUESTION, repeats: int = 5) -> None:
    """Measure, and print a line for each checkout."""
    checkouts = {each: partial(first_token, each, home, question) for each in (*(other or ()), REPO)}
    for checkout, found in run_alternately(checkouts, repeats, warm=1).items():
        clocks, processors = zip(*found, strict=True)
        print(
            f"{checkout}: {statistics.median(clocks):.2f} s (least {min(clocks):.2f}), processor time "
            f"{statistics.median(processors):.2f} s (least {min(processors):.2f})"
        )


if __name__ == "__main__":
    run(main, __doc__)
