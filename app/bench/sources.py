"""Where a bench's questions come from: a file, a generator, the user's own documents, or the samples."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ragblend.app.bench.data import Loaded, choose, without_repeats
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine

ALL_DOCUMENTS = "all"
Make = Callable[["Engine"], Loaded]


@dataclass(frozen=True)
class Source:
    """What `--data`, `--generate`, `--docs` and their companions say; at most one of the three.

    home, collection: where the documents of `--docs` were ingested; docs: a folder or file of them, or `all`.
    """

    data: Path | None = None
    form: str | None = None
    generate: tuple[str, ...] = ()
    docs: str | None = None
    home: Path | None = None
    collection: str = "default"
    limit: int | None = None
    seed: int | None = None
    passages: int | None = None
    skip: bool = False

    @property
    def name(self) -> str:
        """What to call it in results."""
        if self.generate:
            return "; ".join(self.generate)
        if self.data is not None:
            return self.data.name
        return "samples" if self.docs is None else f"documents: {self.docs}"


def prepare(source: Source) -> Make:
    """Read and check what can be without a model; the function makes the questions, with the model's tokenizer.

    Raises UsageError.
    """
    given = [name for name in ("data", "generate", "docs") if getattr(source, name)]
    if len(given) > 1:
        raise UsageError(f"--{' and --'.join(given)} name different questions; give one of them")
    if source.form is not None and source.data is None:
        raise UsageError("--format says how to read --data, which was not given")
    if source.generate:
        return _generated(source)
    # Questions from documents have as many passages as asked for by now, and all of them that they need.
    chosen = _chosen(_loaded(source), source, None if source.docs is not None else source.passages)
    return lambda engine: chosen


def _chosen(loaded: Loaded, source: Source, passages: int | None = None) -> Loaded:
    """Those to measure, each once: records are kept under what a question says, its passages included."""
    once = without_repeats(choose(loaded.questions, passages=passages))
    return Loaded(choose(once.questions, source.limit, source.seed), (*loaded.skipped, *once.skipped))


def _generated(source: Source) -> Make:
    from ragblend.app.bench.generate import generate, parse_specs

    specs = parse_specs(source.generate)
    choose([], source.limit, source.seed, source.passages)  # refuses what makes no sense
    if source.passages is not None:
        raise UsageError(
            "--passages would cut what is asked about; say tokens=... and chunk=... in --generate"
        )

    def make(engine: "Engine") -> Loaded:
        return _chosen(Loaded(generate(specs, engine.count_tokens)), source)

    return make


def _loaded(source: Source) -> Loaded:
    if source.data is not None:
        from ragblend.app.bench.data_formats import load

        return load(source.data, source.form, source.passages, source.skip)
    if source.docs is not None:
        from ragblend.app.bench.docs_questions import make_questions

        choose([], source.limit, source.seed, source.passages)
        documents = ingested(source)
        return Loaded(make_questions(documents, source.limit, source.passages, source.seed or 0))
    from ragblend.app.bench.samples_data import sample_questions

    return Loaded(sample_questions())


def ingested(source: Source) -> list[list[str]]:
    """The passages of the ingested documents that `docs` names, in order. Raises UsageError if there are none."""
    from ragblend.app.home import Home
    from ragblend.app.library import Library

    assert source.docs is not None
    path = Home.resolve(source.home).library
    below = None if source.docs == ALL_DOCUMENTS else Path(source.docs).expanduser().absolute()
    found: list[list[str]] = []
    if path.exists():
        library = Library.open(path)
        try:
            for document in library.documents(source.collection):
                if below is None or Path(document.path).is_relative_to(below):
                    found.append([passage.text for passage in library.passages_of(document.id)])
        finally:
            library.close()
    found = [texts for texts in found if texts]
    if not found:
        where = f"in the collection {source.collection!r}" if below is None else f"under {below}"
        raise UsageError(
            f"--docs: no ingested document is {where}; `ragblend ingest` it first (`ragblend docs list` shows what "
            f"there is, `--docs {ALL_DOCUMENTS}` takes every document)"
        )
    return found
