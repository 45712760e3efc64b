"""How long finding the passages in a prompt takes, in one command; and on texts made to be hard.

    python scripts/measure_resolve.py                 # 100,000 passages of about 2,000 characters, 32,000 of prompt

A third of the passages begin with one long header, a third end with one long footer. The prompt holds 12 of them, one
of these twice, and the first half of another. Times are medians; the first search, which reads the file, is told apart.
"""

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from ragblend.engine.prompt import Chunk
from ragblend.integrations.passages import Passage, PassageRegistry
from ragblend.integrations.resolve import resolve

WORDS = [word.strip(".,()`") for word in (__doc__ or "").split()]
HEADER = "file_path: documents/manuals/tramway/" + "operations and maintenance/" * 16 + "\n\n"
FOOTER = "\n\n" + "This page may be copied for use within the company; it is not to be sold. " * 6
ADDED_AT_ONCE = 5000
T = TypeVar("T")


def passages(count: int, length: int, seed: int = 0) -> Iterator[Passage]:
    """Texts of words, all different, with and without the header and the footer."""
    chance = random.Random(seed)
    for number in range(count):
        body = " ".join(chance.choices(WORDS, k=length // 4))[: chance.randint(length * 3 // 4, length)]
        body = f"{number} {body}"
        yield Passage([HEADER + body, body + FOOTER, body][number % 3], f"node-{number}")


def filled(home: Path, texts: Iterator[Passage], keep: set[int]) -> tuple[PassageRegistry, list[Passage]]:
    """A registry of all the texts, and those whose numbers are in `keep`."""
    registry, kept, batch = PassageRegistry.open(home), [], []
    for number, passage in enumerate(texts):
        batch.append(passage)
        if number in keep:
            kept.append(passage)
        if len(batch) == ADDED_AT_ONCE:
            registry.add(batch)
            batch = []
    registry.add(batch)
    return registry, kept


def prompt_of(kept: Sequence[Passage], length: int) -> str:
    """All but the last, the first again, half of the last, and talk up to `length` characters."""
    texts = [*(passage.text for passage in kept[:-1]), kept[0].text, kept[-1].text[: len(kept[-1].text) // 2]]
    talk = " ".join(random.Random(1).choices(WORDS, k=length))
    each = max(2, (length - sum(map(len, texts))) // len(texts))
    return "".join(text + "\n" + talk[i * each : (i + 1) * each - 1] for i, text in enumerate(texts))


def milliseconds(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return (time.perf_counter() - start) * 1000, result


def report(name: str, registry: PassageRegistry, prompt: str, rounds: int) -> None:
    """Print one line: the prompt, what was found in it, the first time and the median of the others."""
    first, segments = milliseconds(lambda: resolve([prompt], registry))
    times = [milliseconds(lambda: resolve([prompt], registry))[0] for _ in range(rounds)]
    median, span = statistics.median(times), f"{min(times):.1f} to {max(times):.1f}"
    chunks = sum(isinstance(segment, Chunk) for segment in segments)
    print(
        f"{name:34} {len(registry):7,} passages, {len(prompt):6,} characters, {chunks:3} chunks: "
        f"first {first:6.1f} ms, then {median:5.1f} ms ({span}, {rounds} rounds)"
    )


def ordinary(home: Path, count: int, length: int, characters: int, rounds: int) -> None:
    """The usual case: many passages, a few of them in the prompt."""
    keep = set(random.Random(2).sample(range(count), 13))
    spent, (registry, kept) = milliseconds(lambda: filled(home, passages(count, length), keep))
    size = sum(file.stat().st_size for file in home.iterdir())
    print(f"registering took {spent / 1000:.1f} s; the file has {size / 1e6:.0f} MB")
    report("words, shared headers and footers", registry, prompt_of(kept, characters), rounds)
    registry.close()


def hard(home: Path, characters: int, rounds: int) -> None:
    """Texts on which a search by trying out takes long."""
    a_to_b = [Passage("a" * n + "b", str(n)) for n in range(16, 10_016)]
    cases = {
        "one letter, every length": ([Passage("a" * n, str(n)) for n in range(16, 10_016)], "a" * characters),
        "one letter, no text that is there": (a_to_b, "a" * characters),
        "one letter, a text every 100": (a_to_b, ("a" * 99 + "b") * (characters // 100)),
        "10,000 share their first 500": (
            list(_sharing(HEADER[:500], "")),
            HEADER[:500] * (characters // 500),
        ),
        "10,000 share their last 500": (
            list(_sharing("", FOOTER[-500:])),
            FOOTER[-500:] * (characters // 500),
        ),
    }
    for number, (name, (texts, prompt)) in enumerate(cases.items()):
        registry, _ = filled(home / str(number), iter(texts), set())
        report(name, registry, prompt, rounds)
        registry.close()


def _sharing(header: str, footer: str) -> Iterator[Passage]:
    return (Passage(header + f"{number} words {number}" + footer, str(number)) for number in range(10_000))


def main() -> None:
    """Measure both, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=2000, help="characters of a passage")
    parser.add_argument("--characters", type=int, default=32_000, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hard(Path(folder), given.characters, given.rounds)
        gc.collect()
        ordinary(Path(folder) / "many", given.passages, given.length, given.characters, given.rounds)


if __name__ == "__main__":
    main()
