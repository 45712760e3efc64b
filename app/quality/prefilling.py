"""The engine as both benches use it: chunks stored for a while, prefills against our own clock, and where it runs."""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ragblend.app.extras import check_installed
from ragblend.app.quality.records import run_digest
from ragblend.app.quality.variants import Variant
from ragblend.kvstore.errors import RagBlendError

if TYPE_CHECKING:
    from ragblend.engine.config import Report
    from ragblend.engine.engine import Engine
    from ragblend.engine.prompts.segments import Prompt
    from ragblend.engine.results import Prefilled
    from ragblend.engine.selection import Policy
    from ragblend.kvstore.keys import ChunkKey


class BenchError(RagBlendError):
    """The run would have measured something else than it says."""


@dataclass(frozen=True)
class Timed:
    """A prompt that was read, what that took the engine, and the milliseconds to its first token on our clock."""

    prefilled: "Prefilled"
    report: "Report"
    ttft_ms: float


@contextmanager
def stored(engine: "Engine", texts: Sequence[str], keep: bool = False) -> "Iterator[tuple[ChunkKey, ...]]":
    """The texts' KV is in the store inside the block, under these keys; what is new is taken out again after it.

    75 questions of 10 passages are 10 GB with SmolLM2: left in, they would push the user's own documents out. What was
    there and is packed by another codec than the engine's is encoded anew, and stays so: a key does not name the codec.
    Raises BenchError for a model whose KV may not be fused: there would be nothing to compare.
    """
    keys: list[ChunkKey] = []
    new: list[ChunkKey] = []
    try:
        for text in texts:  # one by one, so that an interrupt leaves nothing whose key is not known
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


def _codec(engine: "Engine", key: "ChunkKey", text: str) -> str | None:
    """The name of what packs a text's stored KV; None if it is damaged."""
    from ragblend.engine.prompts.segments import Chunk

    (chunk,) = engine.tokenize(engine.chat_prompt(None, [Chunk(text)], "")).chunks
    assert chunk.token_ids is not None, "the prompt was tokenized"
    reader = engine.store.open_chunk(key, chunk.token_ids)
    if reader is None:
        return None
    with reader:
        return reader.codec.name


def model_digest(engine: "Engine") -> str:
    """The key that one word is stored under: it is made of weights, tokenizer, dtype, RoPE and encoding prefix."""
    with stored(engine, ["digest"]) as (key,):
        return key.digest


def timed_prefill(
    engine: "Engine", prompt: "Prompt", variant: Variant, policy: "Policy | None" = None
) -> Timed:
    """Read the prompt and say the first token, against our own clock. policy: in place of the variant's method's own.

    Raises BenchError if something else was measured than was asked for: a passage that the store does not have is
    computed exactly, and a model that cannot be fused is served by full prefill, so either would look perfect.
    """
    started = perf_counter()
    arguments = variant.arguments if policy is None else variant.arguments | {"method": policy}
    prefilled = engine.prefill(prompt, **arguments)
    report = engine.decode(prefilled, max_new_tokens=1, temperature=0.0).report
    ttft_ms = 1000 * (perf_counter() - started)
    if report.method != variant.method and report.warning is None:
        raise BenchError(
            f"the method {variant.method!r} is called {report.method!r} by the engine; write it so in --methods"
        )
    if report.method != variant.method:
        raise BenchError(
            f"{variant} was served by {report.method} prefill: {report.warning}; choose another --model"
        )
    if variant.method != "full" and report.misses:
        passages = report.hits + report.misses
        raise BenchError(
            f"{variant} found {report.hits} of {passages} passages in the store, and would compute the others exactly; "
            "the store's budget is too small for one question, or another process is evicting"
        )
    return Timed(prefilled, report, ttft_ms)


def continued(engine: "Engine", before: Timed | None, prompt: "Prompt") -> Timed | None:
    """Full prefill of a prompt that begins as the one before it, from that one's KV, which it overwrites.

    None where there is none, or where the two differ before the last chunk's end: then all must be read.
    """
    if before is None or before.prefilled.cache is None or not prompt.places:
        return None
    stop, ids = prompt.places[-1][1], prompt.token_ids
    if before.prefilled.prompt.token_ids[:stop] != ids[:stop]:
        return None
    import torch

    from ragblend.engine.cache import Append

    model, cache = engine.runtime.loaded.model, before.prefilled.cache
    cache.prompt_tokens, cache.step = stop, Append()
    cache.truncate()
    with torch.inference_mode():
        rows = torch.tensor([ids[stop:]], device=model.device)
        logits = model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()
    cache.prompt_tokens = len(ids)
    tokens = replace(before.report.tokens, prompt=len(ids), fresh=len(ids))
    report = replace(before.report, tokens=tokens)
    prefilled = replace(before.prefilled, prompt=prompt, logits=logits, report=report)
    return replace(before, prefilled=prefilled, report=report)


def check_extra() -> None:
    """Raise UsageError if a package of the extra `bench` is missing: now, and not after an hour of measuring."""
    check_installed("The benches", ("jinja2", "matplotlib", "rouge_score", "scipy"), "bench")


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


def computed_by(settings: dict[str, Any], more_code: tuple[Path, ...] = ()) -> str:
    """The name of a run of the engine (`run_digest`): settings, and this processor, its threads, torch and the code."""
    import torch

    import ragblend.engine
    import ragblend.kvstore

    code = tuple(Path(package.__path__[0]) for package in (ragblend.engine, ragblend.kvstore))
    where = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    return run_digest(settings | where, (*code, *more_code))


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name; what the platform module knows where there is no /proc."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
