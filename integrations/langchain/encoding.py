"""Read documents before they are asked about."""

from collections.abc import Iterable

from ragblend.integrations.langchain.documents import DocumentLike, passages_of
from ragblend.integrations.langchain.errors import framework_errors
from ragblend.integrations.langchain.parameters import Parameters


def encode_documents(
    documents: Iterable[DocumentLike], llm: Parameters, *, show_progress: bool = True
) -> int:
    """Store the documents' KV for this model, and have them found in its prompts; what is stored is skipped.

    Give it the documents as they are retrieved: after splitting. The bar is drawn on stderr. Returns how many there
    were. May be interrupted: what is done stays.
    """
    passages = passages_of(documents)
    with framework_errors():
        if not show_progress:
            llm.backend().remember(passages, encode=True)
            return len(passages)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("Reading documents", total=len(passages))
            llm.backend().remember(
                passages,
                encode=True,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    return len(passages)
