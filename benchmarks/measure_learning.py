"""Measures what learning passages from prompts costs, and which are found later: figures of docs/frameworks.md.

    python -m benchmarks.measure_learning --home /tmp/learning

10,000 different prompts of 2,000 tokens, a tenth of them with passages that occur in four prompts each, with other
neighbours and questions; each prompt is also run without learning, and the difference in processor time is the cost.
Then LlamaIndex's citation engine, the program whose passages are learnt in most pieces.
"""

import json
import random
import resource
import statistics
import time
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.common import Home, run
from benchmarks.filler import Notes
from benchmarks.measure_programs import QUESTIONS, llama_index, made
from ragblend.engine.prompts.segments import Prompt
from ragblend.integrations.backend import Backend, ChatTurn
from ragblend.integrations.passages import LEARNED_PREFIX, PassageRegistry

TIMES, TOGETHER = 4, 4  # prompts that hold a passage, passages of such a prompt
PARAGRAPHS, LONG = 17, 4  # of a prompt of 2,000 tokens, a passage having three; sentences of one


class Prompts:
    """The prompts. turns: the passages of each, made of paragraphs that are otherwise never repeated."""

    def __init__(self, count: int) -> None:
        self.draw = random.Random(0)
        self.notes = Notes(self.draw)
        self.passages = [self.paragraphs(3) for _ in range(count // 10 * TOGETHER // TIMES)]
        self.turns: list[list[str]] = [[] for _ in range(count - count // 10)]
        for _ in range(TIMES):
            self.draw.shuffle(self.passages)
            self.turns += batched(self.passages)
        self.draw.shuffle(self.turns)

    def paragraphs(self, count: int) -> str:
        return "\n\n".join(self.notes.passage(LONG) for _ in range(count))

    def text(self, passages: list[str]) -> str:
        parts = [*passages, *(self.paragraphs(1) for _ in range(PARAGRAPHS - 3 * len(passages)))]
        self.draw.shuffle(parts)
        return "\n\n".join([*parts, self.notes.question()])


def batched(passages: list[str]) -> list[list[str]]:
    return [passages[at : at + TOGETHER] for at in range(0, len(passages), TOGETHER)]


def main(home: Home, prompts: int = 10_000) -> None:
    """Measure, and print two objects."""
    print(json.dumps(many(str(home), prompts), indent=1), flush=True)
    print(json.dumps(citations(str(home)), indent=1))


def many(home: str, count: int) -> dict[str, Any]:
    """Time and memory for so many prompts, and how many repeated passages were found."""
    name = str(time.time_ns())
    learning, plain, other = (Backend(home=home, collection=f"{name} {kind}") for kind in range(3))
    prompts, process = Prompts(count), psutil.Process()
    for backend in (learning, plain, other):
        asked(backend, "Warm.", True)
    seen, found, tokens = dict.fromkeys(prompts.passages, 0), 0, list[int]()
    spent: dict[bool, list[float]] = {True: [], False: []}
    before = process.memory_info().rss
    for passages in prompts.turns:
        text = prompts.text(passages)
        for backend, learns in ((plain, False), (learning, True)):
            begun = time.process_time()
            prompt = asked(backend, text, learns)
            spent[learns].append(1e3 * (time.process_time() - begun))
        tokens.append(len(prompt.token_ids))
        known = "\n\n".join(chunk.text or "" for chunk in prompt.chunks)
        for passage in passages:
            seen[passage] += 1
            found += seen[passage] == TIMES and all(part in known for part in passage.split("\n\n"))
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    elsewhere = [asked(other, prompts.text(passages), True).chunks for passages in batched(prompts.passages)]
    return {
        "prompts": count,
        "tokens of a prompt": round(statistics.mean(tokens)),
        "ms a prompt": round(statistics.mean(spent[True]) - statistics.mean(spent[False]), 2),
        "MB": round((peak - before) / 1e6, 1),
        "came back three times": sum(times == TIMES for times in seen.values()),
        "of those found": found,
        "found in another collection": sum(map(len, elsewhere)),
    }


def asked(backend: Backend, text: str, learns: bool) -> Prompt:
    return backend.chat_prompt([ChatTurn("user", (text,))], learn=learns)


def citations(home: str) -> dict[str, Any]:
    """The background work of the citation engine after its second question."""
    framework = llama_index()
    [program] = [each for each in framework.programs if each.name == "citations"]
    ask, engine = made(framework, program, home, {})
    for question in QUESTIONS[:2]:
        before = engine.store.stats().bytes
        ask(question)
        begun = time.perf_counter()
        engine.finish_background()
    learnt = PassageRegistry.open(engine.home, engine.config.collection).named(LEARNED_PREFIX)
    spent, stored = time.perf_counter() - begun, engine.store.stats().bytes - before
    return {
        "learnt chunks": len(learnt),
        "encoded in s": round(spent, 1),
        "MB stored": round(stored / 1e6, 1),
    }


if __name__ == "__main__":
    run(main, __doc__)
