"""What a shared store is worth, and what a bad one costs: first tokens of one prompt, over a real Redis behind a line.

    python -m benchmarks.measure_shared --limit 5

Six passages of 512 tokens lie in redis-server on this machine (apt-get install redis-server), and none at home. For
each line to it: the median time to the first token of the first prompt that meets it and of the next one, in
milliseconds beyond full prefill's, which is measured before and behind each of them; each way in turns.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import AnyHome, Limit, Model, run, texts
from ragblend import Chunk, Engine
from ragblend.kvstore.keys import ChunkKey

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for the server, and the line to it
from shared_servers import Redis, proxy_to  # type: ignore[import-not-found]

PASSAGES, PASSAGE_TOKENS, TIMEOUT_S = 6, 512, 2.0
LINES: dict[str, dict[str, Any]] = {
    "local": {},
    "100 MB/s": {"bytes_per_s": 1e8},
    "1 MB/s": {"bytes_per_s": 1e6},
    "silent": {"most": 0},
}


def measured(model: str, home: str, url: str, passages: list[str], keys: list[ChunkKey]) -> Iterator[float]:
    """Milliseconds of full prefill, then what the first prompt and the next one over that store take beyond it."""
    engine = Engine.open(model, home=home, remote=url)
    prompt = engine.tokenize(
        engine.chat_prompt(None, [Chunk(text) for text in passages], "Who mended a fence?")
    )

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
    """Measure each way so often, and print a line a way."""
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
    engine.close()  # behind what waits to be shared
    options = f"timeout_s={TIMEOUT_S:g}&retry_s=600"
    for _ in range(limit):
        for line, how in LINES.items():
            with proxy_to(redis.port, **how) as proxy:
                url = f"{redis.url(proxy.port)}?{options}"
                yield line, list(measured(model, home, url, passages, keys))
        yield "dead", list(measured(model, home, f"{redis.url(proxy.port)}?{options}", passages, keys))


if __name__ == "__main__":
    run(main, __doc__)
