"""From LangChain's documents to passages: the text as it stands in prompts, and an id."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from langchain_core.documents import Document

from ragblend.integrations.langchain.errors import framework_errors
from ragblend.integrations.parameters import Parameters
from ragblend.integrations.passages import Passage
from ragblend.integrations.resolve import Piece
from ragblend.kvstore.errors import UsageError

DocumentLike = Document | Mapping[str, Any] | str


def passages_of(documents: Iterable[DocumentLike] | DocumentLike) -> list[Passage]:
    """A passage for every document with text in it, in order; one document alone is taken as well."""
    several = [documents] if isinstance(documents, str | Document | Mapping) else documents
    found = (passage_of(document) for document in several)
    return [passage for passage in found if passage is not None]


def passage_of(document: DocumentLike) -> Passage | None:
    """The document's passage, None for one without text. Raises UsageError for what is no document."""
    if isinstance(document, str):
        return passage(document, None)
    if isinstance(document, Document):
        return passage(document.page_content, document.id)
    if isinstance(document, Mapping) and isinstance(document.get("page_content"), str):  # one that was stored
        return passage(document["page_content"], document.get("id"))
    raise UsageError(
        f"a passage is a Document, a text, or a mapping with `page_content`, not {type(document).__name__}"
    )


def passage(text: str, node_id: str | None) -> Passage | None:
    """Stripped, because prompt templates strip: the chunk is then the same wherever it stands."""
    stripped = text.strip()
    return Passage(stripped, node_id or digest_id(stripped)) if stripped else None


def pieces_of(text: str, node_id: str | None) -> list[Piece]:
    """A text that is a passage as a whole; the white space around it stays text."""
    found = passage(text, node_id)
    if found is None:
        return [text] if text else []
    before, _, after = text.partition(found.text)
    return [piece for piece in (before, found, after) if piece]


def digest_id(text: str) -> str:
    """An id for a document that has none, the same in every process."""
    return f"sha256-{sha256(text.encode()).hexdigest()[:32]}"


def encode_documents(
    documents: Iterable[DocumentLike] | DocumentLike, llm: Parameters, *, show_progress: bool = True
) -> int:
    """Store the documents' KV for this model, and have them found in its prompts; what is stored is skipped.

    Give it the documents as they are retrieved: after splitting. The bar is drawn on stderr. Returns how many there
    were. May be interrupted: what is done stays.
    """
    with framework_errors():
        return llm.backend.encode(passages_of(documents), show_progress)
