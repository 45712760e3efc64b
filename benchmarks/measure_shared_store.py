"""Measures what a shared store gains, and what a slow one costs: first tokens of a prompt over Redis behind a proxy.

    python -m benchmarks.measure_shared_store --limit 5

Six passages of 512 tokens are in a redis-server on this machine (apt-get install redis-server), and none in the home.
For each simulated connection to it: the median time to the first token of the first prompt and of the next one, in
milliseconds beyond full prefill's, which is measured before and after each of them; alternating between connections.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import AnyHome, Limit, Model, run, texts
from ragblend import Engine
from ragblend.kvstore.keys import ChunkKey
from ragblend.measuring.prefilling import prompt_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for the server and its proxy
from shared_servers import Redis, proxy_to  # type: ignore[import-not-found]

PASSAGES, PASSAGE_TOKENS, TIMEOUT_S = 6, 512, 2.0
LINES: dict[str, dict[str, Any]] = {
    "local": {},
    "100 MB/s": {"bytes_per_s": 1e8},
    "1 MB/s": {"bytes_per_s": 1e6},
    "silent": {"most": 0},
}


def measured(model: str, home: str, url: str, passages: list[str], keys: list[ChunkKey]) -> Iterator[float]:
    """Milliseconds of full prefill, then those that the first and the next prompt over that store take beyond it."""
    engine = Engine.open(model, home=home, remote=url)
    prompt = prompt_of(engine, passages, "Who mended a fence?")

    def full_ms() -> float:
        return float(engine.prefill(prompt, method="full").report.timings.ttft_ms)

    full_ms()  # warms up
    before = full_ms()
    yield before
    for _ in range(2):
        engine.runtime.store.delete(keys)
        report = engine.prefill(prompt).report
        engine.finish_background()
        after = full_ms()
        yield report.timings.ttft_ms - (before + after) / 2
        before = after
    engine.close()


def main(model: Model = "default", home: AnyHome = None, limit: Limit = 5) -> None:
    """Measure each connection `limit` times, and print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        redis = Redis()
        try:
            rows = list(_rows(model, str(home or folder), redis, limit))
        finally:
            redis.end()
    for line in LINES | {"dead": {}}:
        fulls, firsts, nexts = zip(*(times for name, times in rows if name == line), strict=True)
        first, later = (
            f"{statistics.median(each):+,.0f} ms (at most {max(each):+,.0f})" for each in (firsts, nexts)
        )
        said = f"first prompt {first}, the next {later}"
        print(f"{line}: full prefill {statistics.median(fulls):,.0f} ms, {said}")


def _rows(model: str, home: str, redis: Redis, limit: int) -> Iterator[tuple[str, list[float]]]:
    engine = Engine.open(model, home=home, remote=f"{redis.url()}?timeout_s=60")
    passages = texts(engine, PASSAGES, PASSAGE_TOKENS, first=time.time_ns())
    keys = [key for key in engine.encode(passages).keys if key is not None]
    engine.close()  # waits until everything is uploaded
    options = f"timeout_s={TIMEOUT_S:g}&retry_s=600"
    for _ in range(limit):
        for line, how in LINES.items():
            with proxy_to(redis.port, **how) as proxy:
                url = f"{redis.url(proxy.port)}?{options}"
                yield line, list(measured(model, home, url, passages, keys))
        yield "dead", list(measured(model, home, f"{redis.url(proxy.port)}?{options}", passages, keys))


if __name__ == "__main__":
    run(main, __doc__)
