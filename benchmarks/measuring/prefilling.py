"""What both benches do with the engine: store chunks temporarily, time prefills, and describe the machine."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ragblend.kvstore.errors import RagBlendError
from ragblend.measuring.records import run_digest
from ragblend.measuring.variants import Variant

if TYPE_CHECKING:
    from ragblend.engine.config import Report
    from ragblend.engine.engine import Engine
    from ragblend.engine.prompts.segments import Prompt
    from ragblend.engine.results import Prefilled
    from ragblend.kvstore.keys import ChunkKey


SETTLING_ANSWERS = 5  # a measurement on a busy machine may have to be repeated


class BenchError(RagBlendError):
    """The run would measure something other than what was asked for."""


@dataclass(frozen=True)
class Timed:
    """A prefilled prompt, the engine's report, and the milliseconds to its first token by the bench's own clock.

    is_compared: the time is that of an earlier prompt, which this one continues, and is in that prompt's records.
    """

    prefilled: "Prefilled"
    report: "Report"
    ttft_ms: float
    is_compared: bool = field(default=False, kw_only=True)


@contextmanager
def temporarily_stored(
    engine: "Engine", texts: Sequence[str], keep: bool = False
) -> "Iterator[tuple[ChunkKey, ...]]":
    """Store the texts' KV for the block; yields their keys. KV that was new is deleted afterwards, unless keep.

    75 questions of 10 passages are 10 GB with SmolLM2, which would evict the user's documents. KV that was stored with
    another codec than the engine's is encoded again, since a key does not name the codec. Raises BenchError for a
    model whose KV cannot be fused.
    """
    keys: list[ChunkKey] = []
    new: list[ChunkKey] = []
    try:
        for text in texts:  # one by one, so that an interruption leaves no stored key that is not in `new`
            report = engine.encode([text])
            (key,) = report.keys
            if key is None:
                reason = engine.gate.reason
                raise BenchError(f"{engine.model_name} cannot be fused ({reason}); choose another --model")
            keys.append(key)
            new += [key] * report.encoded
            if not report.encoded and _codec(engine, key, text) != engine.kv_codec:
                engine.store.delete([key])
                engine.encode([text])
        yield tuple(keys)
    finally:
        if new and not keep:
            engine.store.delete(new)


def prompt_of(engine: "Engine", texts: Iterable[str], question: str) -> "Prompt":
    """The tokenized prompt: the texts as passages, then the question, in the model's chat template."""
    from ragblend.engine.prompts.segments import Chunk

    return engine.tokenize(engine.chat_prompt(None, [Chunk(text) for text in texts], question))


def _codec(engine: "Engine", key: "ChunkKey", text: str) -> str | None:
    """The codec of a text's stored KV; None if it is damaged."""
    (chunk,) = prompt_of(engine, [text], "").chunks
    assert chunk.token_ids is not None, "the prompt was tokenized"
    reader = engine.store.open_chunk(key, chunk.token_ids)
    if reader is None:
        return None
    with reader:
        return reader.codec.name


def model_digest(engine: "Engine") -> str:
    """A digest of weights, tokenizer, dtype, RoPE and encoding prefix: the key of a stored chunk of one word."""
    with temporarily_stored(engine, ["digest"]) as (key,):
        return key.digest


def timed_prefill(engine: "Engine", prompt: "Prompt", variant: Variant) -> Timed:
    """Time a prefill with its first token.

    Raises BenchError if something else was measured than was asked for: passages that are not stored are computed
    exactly, and a model that cannot be fused is served by full prefill, so either would look perfect.
    """
    started = perf_counter()
    prefilled = engine.prefill(prompt, **variant.arguments)
    report = engine.decode(prefilled, max_new_tokens=1, temperature=0.0).report
    ttft_ms = 1000 * (perf_counter() - started)
    if report.method != variant.method and report.warning is None:
        raise BenchError(
            f"the method {variant.method!r} is called {report.method!r} by the engine; use that name in --methods"
        )
    if report.method != variant.method:
        raise BenchError(
            f"{variant} was served by {report.method} prefill: {report.warning}; choose another --model"
        )
    if variant.method != "full" and report.misses:
        passages = report.hits + report.misses
        raise BenchError(
            f"{variant} found only {report.hits} of {passages} passages in the store, and would compute the others "
            "exactly; the store's budget is too small for one question, or another process is evicting"
        )
    return Timed(prefilled, report, ttft_ms)


def continue_prefill(engine: "Engine", previous: Timed | None, prompt: "Prompt") -> Timed | None:
    """Full prefill of a prompt from the KV of the previous one, which has the same passages; overwrites that KV.

    None if there is no previous one, or if the two differ before the end of the last chunk.
    """
    if previous is None or previous.prefilled.cache is None or not prompt.places:
        return None
    stop, ids = prompt.places[-1][1], prompt.token_ids
    if previous.prefilled.prompt.token_ids[:stop] != ids[:stop]:
        return None
    import torch

    from ragblend.engine.cache import Append

    model, cache = engine.runtime.loaded.model, previous.prefilled.cache
    cache.prompt_tokens, cache.step = stop, Append()
    cache.truncate()
    with torch.inference_mode():
        rows = torch.tensor([ids[stop:]], device=model.device)
        logits = model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()
    cache.prompt_tokens = len(ids)
    tokens = replace(previous.report.tokens, prompt=len(ids), fresh=len(ids))
    report = replace(previous.report, tokens=tokens)
    prefilled = replace(previous.prefilled, prompt=prompt, logits=logits, report=report)
    return replace(previous, prefilled=prefilled, report=report)


def environment(engine: "Engine") -> dict[str, Any]:
    """Model, device, processor and versions, as plain JSON values."""
    import torch
    import transformers

    import ragblend

    device = engine.device
    return {
        "model": engine.model_name,
        "dtype": engine.dtype,
        "device": device,
        "gpu": torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else None,
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ragblend": ragblend.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def settings_digest(settings: dict[str, Any]) -> str:
    """A digest of everything that a run's numbers depend on: settings, device, threads, libraries and source code."""
    import torch
    import transformers

    import ragblend.engine
    import ragblend.kvstore
    import ragblend.measuring

    packages = (ragblend.engine, ragblend.kvstore, ragblend.measuring)
    where = {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return run_digest(settings | where, tuple(Path(package.__path__[0]) for package in packages))


def settle_decoding(engine: "Engine") -> str:
    """Choose the decode implementation for the whole run, and return its name.

    Otherwise the first answers could come from another implementation than the last ones, and the engine's measurement
    of implementations would slow down what is timed.
    """
    choice = engine.runtime.decode_selector
    for _ in range(SETTLING_ANSWERS):
        if not choice.needs_measurement:
            break
        engine.generate(prompt_of(engine, [], "Count to ten."), max_new_tokens=2)
        engine.finish_background()
    choice.needs_measurement = False
    return type(choice.current).__name__


def cpu_name() -> str:
    """The processor's model name, or what the platform module knows if there is no /proc."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
