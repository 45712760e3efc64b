"""Where a bench's questions come from: a file, the user's own documents, or the samples."""

from dataclasses import dataclass
from pathlib import Path

from ragblend.app.bench.data import Loaded, choose, load, without_repeats
from ragblend.kvstore.errors import UsageError

ALL_DOCUMENTS = "all"


@dataclass(frozen=True)
class Source:
    """What `--data`, `--docs` and their companions say; at most one of the two.

    home, collection: where the documents of `--docs` were ingested; docs: a folder or file of them, or `all`.
    """

    data: Path | None = None
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
        if self.data is not None:
            return self.data.name
        return "samples" if self.docs is None else f"documents: {self.docs}"


def read(source: Source) -> Loaded:
    """The questions to measure, each once: records are kept under what a question says, its passages included.

    Raises UsageError.
    """
    if source.data is not None and source.docs is not None:
        raise UsageError("--data and --docs name different questions; give one of them")
    choose([], source.limit, source.seed, source.passages)  # refuses what makes no sense before it reads
    found = _found(source)
    # Questions from documents have as many passages as asked for by now, and all of them that they need.
    passages = None if source.docs is not None else source.passages
    once = without_repeats(choose(found.questions, passages=passages))
    return Loaded(choose(once.questions, source.limit, source.seed), (*found.skipped, *once.skipped))


def _found(source: Source) -> Loaded:
    if source.data is not None:
        return load(source.data, source.skip)
    if source.docs is not None:
        from ragblend.app.bench.docs_questions import make_questions

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
