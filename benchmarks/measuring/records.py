"""The files of a run: a journal with a line per (question, method, ratio), so that a run can be resumed, and results.

The journal's name is a digest of everything that its numbers depend on, except question, method and ratio, which each
record contains. So more questions, methods or ratios extend a journal, and another model, dtype, device, prompt or
*engine code* starts a new one: a policy under development must never be credited with old numbers.
"""

import dataclasses
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.files import replace_durably

Row = dict[str, Any]
CACHE_LABELS = {"warm": "warm disk", "cold": "cold disk", "memory": "KV in memory"}  # by `cache` of a row
Key = tuple[str, str, float | None]


@dataclass(frozen=True)
class Record:
    """One method on one question. kl in nats; times in ms.

    full_ttft_ms: full prefill's time, from the same run. It and the `ttft_ms` of `full` are None if the previous
    question has the same passages: their full prefill is not repeated, and its time is in that question's records.
    """

    question: str
    method: str
    ratio: float | None
    kl: float
    top1: float
    exact_match: bool
    gold_match: bool
    f1: float
    rouge_l: float
    recomputed_fraction: float
    ttft_ms: float | None
    full_ttft_ms: float | None
    prompt_tokens: int
    answer: str
    generated_tokens: int | None = None
    found: float | None = None  # share of the required strings in the answer; None if none are known
    # The cost of selection: its time, the rows of probes, and all computed rows as a share of full prefill's.
    select_ms: float | None = None
    probe_rows: int | None = None
    computed_fraction: float | None = None
    # About the figures that full prefill's answer has right; None if there are none. figures_other: the answer lacks
    # them, and has a figure of another passage; figure_kl: KL at the figures' tokens.
    figures_kept: bool | None = None
    figures_other: bool | None = None
    figure_kl: float | None = None
    first_kl: float | None = None  # KL before the answer's first token
    rouge_l_to_full: float | None = None  # ROUGE-L of this answer against full prefill's
    read_again: bool | None = None  # whether the prompt was prefilled in full because a figure was uncertain

    @property
    def key(self) -> Key:
        return (self.question, self.method, self.ratio)


class Journal:
    """An append-only file of records; each is on disk before the next one is measured."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        if fresh:
            path.unlink(missing_ok=True)
        self.records = _read(path)
        self.resumed = len(self.records)

    def __contains__(self, key: Key) -> bool:
        return key in self.records

    def add(self, record: Record) -> None:
        """Append one record, whose key must be new."""
        assert record.key not in self.records, record.key
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(dataclasses.asdict(record), ensure_ascii=True)
        with self.path.open("a", encoding="utf-8") as file:
            # The leading newline ends a line that a killed run left incomplete, so that only that record is lost.
            file.write(f"\n{line}\n")
            file.flush()
            os.fsync(file.fileno())
        self.records[record.key] = record


def _read(path: Path) -> dict[Key, Record]:
    """The records by key, the first of each key; incomplete lines are skipped."""
    records: dict[Key, Record] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with suppress(json.JSONDecodeError, TypeError):
            record = Record(**json.loads(line))
            records.setdefault(record.key, record)
    return records


def run_digest(settings: dict[str, Any], code: tuple[Path, ...]) -> str:
    """A digest of a run's settings and source files, as 12 hex digits."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, ensure_ascii=True).encode())
    for folder in code:
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def make_folder(folder: Path) -> Path:
    """Create the output folder if needed, and check that it is writable. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output: the folder {folder} cannot be created ({error.strerror}); name another"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output: the folder {folder} is not writable; name another")
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, replacing the file atomically."""
    replace_durably(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
