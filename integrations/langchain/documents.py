"""Turns LangChain's documents into passages: the text as it is in prompts, and an id."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from langchain_core.documents import Document

from ragblend.integrations.langchain.errors import langchain_errors
from ragblend.integrations.parameters import ModelParameters
from ragblend.integrations.passages import Passage, utf8
from ragblend.kvstore.errors import UsageError

DocumentLike = Document | Mapping[str, Any] | str


def passages_of(documents: Iterable[DocumentLike] | DocumentLike) -> list[Passage]:
    """A passage for every document that has text, in order; accepts a single document too.

    Raises UsageError for other objects.
    """
    several = [documents] if isinstance(documents, str | Document | Mapping) else documents
    found = (_passage_of(document) for document in several)
    return [passage for passage in found if passage is not None]


def _passage_of(document: DocumentLike) -> Passage | None:
    if isinstance(document, str):
        return stripped_passage(document, None)
    if isinstance(document, Document):
        return stripped_passage(document.page_content, document.id)
    if is_stored_document(document):
        return stripped_passage(document["page_content"], document.get("id"))
    raise UsageError(
        f"a passage is a Document, a text, or a mapping with `page_content`, not {type(document).__name__}"
    )


def is_stored_document(item: Any) -> bool:
    """Whether this is a document as a mapping, as stores and traces keep it."""
    return isinstance(item, Mapping) and isinstance(item.get("page_content"), str)


def stripped_passage(text: str, node_id: str | None) -> Passage | None:
    """The text as a passage, stripped as prompt templates strip, so that all prompts agree; None if empty."""
    stripped = text.strip()
    return Passage(stripped, node_id or content_id(stripped)) if stripped else None


def content_id(text: str) -> str:
    """An id for a document that has none, the same in every process."""
    return f"sha256-{sha256(utf8(text)).hexdigest()[:32]}"


def encode_documents(
    documents: Iterable[DocumentLike] | DocumentLike, llm: ModelParameters, *, show_progress: bool = True
) -> int:
    """Store the documents' KV for this model, and register them to be found in its prompts; stored KV is skipped.

    Pass the documents as they will be retrieved, after splitting. A progress bar is drawn on stderr. Returns the number
    of passages. If it is interrupted, finished ones stay.
    """
    with langchain_errors():
        return llm.backend.encode(passages_of(documents), show_progress)
