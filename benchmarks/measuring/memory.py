"""Peak memory of one answer beyond the model's weights, measured in a process of its own.

In this process the allocator reuses freed memory, so a later run would seem to need none. The child process loads the
model, warms up on a short prompt (which also pages in the weights), resets the kernel's high-water mark, and answers
once. On CUDA torch's own counter is read instead.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ragblend.kvstore.errors import RagBlendError
from ragblend.measuring.variants import Variant

if TYPE_CHECKING:
    from ragblend.engine.prompts.segments import Prompt

ANSWER_TOKENS, TIMEOUT_S = 4, 600
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_bytes(engine: dict[str, Any], prompt: "Prompt", variant: Variant) -> int | None:
    """Peak memory above the baseline, in bytes; None if the system does not report it. Raises RagBlendError.

    engine: the keyword arguments of `Engine.open`; prompt: tokenized.
    """
    from ragblend.engine.prompts.segments import Chunk

    pairs = zip(prompt.segments, prompt.segment_ids, strict=True)
    segments = [(isinstance(segment, Chunk), list(ids)) for segment, ids in pairs]
    job = json.dumps({"engine": engine, "segments": segments, "arguments": variant.arguments})
    command = [sys.executable, "-m", "ragblend.measuring.memory"]
    done = subprocess.run(command, input=job, text=True, capture_output=True, timeout=TIMEOUT_S)
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        answer: dict[str, Any] = {"error": f"the child process failed: {last_line}"}
    else:
        answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise RagBlendError(f"Measuring the peak memory of {variant.method}: {answer['error']}")
    return cast("int | None", answer["peak_bytes"])


def main() -> None:
    """Read a job from stdin, print `{"peak_bytes": ...}` or `{"error": ...}`."""
    try:
        answer: dict[str, Any] = {"peak_bytes": _measure(**json.load(sys.stdin))}
    except RagBlendError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


def _measure(engine: dict[str, Any], segments: list[Any], arguments: dict[str, Any]) -> int | None:
    from ragblend.engine.engine import Engine
    from ragblend.engine.prompts.segments import Chunk, Literal, Prompt

    opened = Engine.open(**engine)
    try:
        hello = opened.chat_prompt(None, [], "Say hello.")
        opened.generate(hello, method="full", max_new_tokens=ANSWER_TOKENS)
        kinds = {True: Chunk, False: Literal}
        prompt = Prompt([kinds[is_chunk](token_ids=tuple(ids)) for is_chunk, ids in segments])
        baseline = _begin_peak(opened.device)
        misses = opened.generate(prompt, max_new_tokens=ANSWER_TOKENS, **arguments).report.misses
        if misses:
            raise RagBlendError(
                f"{misses} chunks were not in the store, so the peak would be a different one"
            )
        return None if baseline is None else _peak_bytes(opened.device) - baseline
    finally:
        opened.close()  # if the engine still worked in the background, the process would abort at its end


def _begin_peak(device: str) -> int | None:
    """Reset the peak, and return the bytes in use now; None if the system does not report them."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        _CLEAR.write_text("5")  # "reset the peak resident set size" (proc_pid_clear_refs(5))
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _peak_bytes(device: str) -> int:
    """The peak since it was reset: of tensors on a GPU, or of resident memory as Linux counts it."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = _STATUS.read_text().splitlines()
    found = next(line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(found.split()[1])


if __name__ == "__main__":
    main()
