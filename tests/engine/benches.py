"""A model with its engine beside what transformers alone says, and prompts with chunks in them."""

import random
import threading
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import tiny_models
import torch

from ragblend import Chunk, Engine, Literal, Prompt
from ragblend.engine.model.device import TransferStream
from ragblend.engine.selection import Policy
from ragblend.engine.selection.shift import LayerChange

PREFIX = "Passages: read them all.\n\n"
SUFFIX = "\n\nQuestion: who kept the ledgers, and where were they?"
WORDS = " ".join(tiny_models.CORPUS).split()


# Of each way to choose rows one method: none, narrowed in later layers, by attention, and by a probe with a shift.
ALWAYS = ("reuse", "cacheblend-gradual", "a3", "probe-shift")


def pairs(methods, always=ALWAYS, kinds=tiny_models.SUPPORTED):
    """(kind of model, method): all methods on two kinds, and on every other kind two of `always`, in turn."""
    return [
        (kind, method)
        for number, kind in enumerate(kinds)
        for method in sorted(methods)
        if kind in ("llama", "gemma3") or method in (*always, *always)[number % len(always) :][:2]
    ]


def in_turn(*cases):
    """(kind of model, *case): every supported kind once, with the cases in turn."""
    return [(kind, *case) for kind, case in zip(tiny_models.SUPPORTED, cycle(cases), strict=False)]


def make_text(seed: int, words: int = 24) -> str:
    """A passage of that many words, about three tokens each; the same seed gives the same."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def watch_lock(monkeypatch, runtime, on_locked) -> None:
    """Call on_locked each time the lock of store and node index is about to be taken."""
    lock = runtime.store_lock

    class Watched:
        def __enter__(self):
            on_locked()
            return lock.__enter__()

        def __exit__(self, *error):
            return lock.__exit__(*error)

    monkeypatch.setattr(runtime, "store_lock", Watched())


def make_prompt(texts: list[str], suffix: str = SUFFIX, prefix: str = PREFIX) -> Prompt:
    """Prefix, the texts as chunks with separators, suffix."""
    segments: list[Any] = [Literal(prefix)] if prefix else []
    for number, text in enumerate(texts):
        segments += [Literal("\n\n"), Chunk(text)] if number else [Chunk(text)]
    return Prompt([*segments, Literal(suffix)] if suffix else segments)


@dataclass
class Bench:
    """One model: its folder, an engine on it, and what transformers alone says."""

    name: str
    folder: Path
    engine: Engine

    @cached_property
    def reference(self) -> Any:
        return tiny_models.load_reference(self.folder)

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """(T, vocab) of the prompt, by transformers alone."""
        return tiny_models.reference_logits(self.reference, self.engine.tokenize(prompt).token_ids)

    def kv(self, token_ids: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return tiny_models.reference_kv(self.reference, token_ids)

    def assert_exact(self, cache: Any, prompt: Prompt, start: int, stop: int) -> None:
        """The cache's KV of rows start..stop is the model's own, in every layer."""
        for layer, whole in enumerate(self.kv(prompt.token_ids)):
            for name, found, expected in zip(
                ("keys", "values"), cache.span(layer, start, stop), whole, strict=True
            ):
                assert largest_error(found, expected[:, start:stop]) < 1e-4, f"{name} of layer {layer}"

    def answer(self, prompt: Prompt, tokens: int) -> list[int]:
        """Greedy ids by transformers' own `generate`."""
        ids = torch.tensor([self.engine.tokenize(prompt).token_ids])
        with torch.inference_mode():
            out = self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=1,
            )
        return out[0, ids.shape[1] :].tolist()


def chat(bench: Bench, texts: list[str], question: str = "who kept the ledgers?") -> Prompt:
    """A chat prompt over these passages, tokenized: its first chunk stands right behind its encoding prefix."""
    return bench.engine.tokenize(bench.engine.chat_prompt(None, [Chunk(text) for text in texts], question))


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in standard deviations of what was expected where that is above 1."""
    spread = max(1.0, float(expected.float().std()))
    return float((found.float() - expected.float()).abs().max()) / spread


def reference_pair(
    folder: Path, token_ids: Any, dtype: torch.dtype, attention: str
) -> tuple[torch.Tensor, Any]:
    """Logits (T, vocab) and the KV of every layer, through transformers alone."""
    model = tiny_models.load_reference(folder, dtype, attention)
    return tiny_models.reference_logits(model, token_ids), tiny_models.reference_kv(model, token_ids)


def assert_grammar_changes_nothing(engine, prompts, grammar):
    """Answers that are text are the same tokens with the grammar as without; some of them have to be."""
    free = [engine.generate(prompt, max_new_tokens=4) for prompt in prompts]
    readable = [each for each in free if len(each.text) > 4 and each.text.isascii()]
    assert readable, "every answer holds bytes that are no text, which no grammar allows"
    for each in readable:
        assert engine.generate(each.prompt, max_new_tokens=4, grammar=grammar).token_ids == each.token_ids


def of_stored(keys, values, run, *changes, layer=0):
    """A layer's change for `KernelShift`, over stored keys and values that are not rotated."""
    return LayerChange(layer, run, *changes, stored=lambda at: (keys[:, at], values[:, at]), unrotated=None)


class EveryThird(Policy):
    """Scattered rows that depend on nothing but the plan, and whose predecessors are stored."""

    def rows(self, plan, probed=None):
        chosen = plan.always.clone()
        chosen[::3] = True
        return chosen.nonzero().squeeze(1)


class EmptyIsNaN:
    """torch, whose `empty` is full of NaN: reading what nobody wrote becomes visible."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **kwargs).fill_(float("nan"))


class Clock:
    """Stands in for the module `time` of the scheduler. reads: how often it was asked."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now


class Unread:
    """A reader that is only asked where its chunk began."""

    def __init__(self, start: int = 10) -> None:
        self.start = start


class StagedTransfers(TransferStream):
    """As on CUDA: reads land in memory of their own, are delivered by the computing thread, and awaited by ticket."""

    staged = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls: list[str] = []
        self.arrived: list[object] = []
        self.delivered: list[object] = []
        self.threads: set[int] = set()

    def begin(self):
        self.calls.append("begin")

    def staging(self, like):
        return torch.full(like.shape, torch.nan if like.is_floating_point() else 255, dtype=like.dtype)

    def deliver(self, copies):
        self.threads.add(threading.get_ident())
        copies()
        self.delivered.append(ticket := object())
        self.calls.append("deliver")
        return ticket

    def wait_for(self, ticket):
        self.arrived.append(ticket)

    def pace(self):
        self.calls.append("pace")

    def finish(self):
        self.calls.append("finish")
