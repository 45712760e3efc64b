"""A stuff chain whose documents reach the model by id: LangChain's own, with content blocks instead of text."""

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelLike
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from ragblend.integrations.backend import placeholders, split_at_placeholders
from ragblend.integrations.langchain.documents import content_id

DOCUMENTS_KEY = "context"
DEFAULT_DOCUMENT_PROMPT = PromptTemplate.from_template("{page_content}")
DEFAULT_DOCUMENT_SEPARATOR = "\n\n"
Block = dict[str, Any]


def create_ragblend_stuff_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_separator: str = DEFAULT_DOCUMENT_SEPARATOR,
    document_variable_name: str = DOCUMENTS_KEY,
) -> Runnable[dict[str, Any], Any]:
    """`create_stuff_documents_chain` for a `ChatRAGBlend`: same arguments, same text, documents as blocks with ids.

    The documents need not be registered. prompt: must have the variable `context` (or document_variable_name), for
    which the input has a list of documents; else raises ValueError.
    """
    if document_variable_name not in prompt.input_variables:
        raise ValueError(
            f"Prompt must accept {document_variable_name} as an input variable. "
            f"Received prompt with input variables: {prompt.input_variables}"
        )
    template = document_prompt or DEFAULT_DOCUMENT_PROMPT

    def fill(inputs: dict[str, Any], config: RunnableConfig) -> PromptValue:
        """Render the template with placeholders, and replace these by blocks."""
        documents = inputs[document_variable_name]
        marked = document_separator.join(placeholders(len(documents)))
        texts = [format_document(document, template) for document in documents]
        return _with_blocks(
            prompt.invoke({**inputs, document_variable_name: marked}, config), documents, texts
        )

    filled = RunnableLambda(fill, name="format_inputs")
    return (filled | llm | (output_parser or StrOutputParser())).with_config(run_name="stuff_documents_chain")


def _with_blocks(value: PromptValue, documents: Sequence[Document], texts: Sequence[str]) -> PromptValue:
    document_blocks = [_document_blocks(*pair) for pair in zip(documents, texts, strict=True)]
    return ChatPromptValue(
        messages=[_message_with(message, document_blocks) for message in value.to_messages()]
    )


def _document_blocks(document: Document, text: str) -> list[Block]:
    """A formatted document as blocks: its content with an id, and text around that (a title, a source) without."""
    content = document.page_content.strip()
    before, found, after = text.partition(content) if content else (text, "", "")
    block = {"type": "text", "text": found, "id": document.id or content_id(content)}
    return [part for part in (_text(before), block, _text(after)) if part["text"]]


def _message_with(message: BaseMessage, document_blocks: Sequence[list[Block]]) -> BaseMessage:
    parts = message.content if isinstance(message.content, list) else [message.content]
    if all(len(split_at_placeholders(_text_of(part), document_blocks)) == 1 for part in parts):
        return message
    content = [block for part in parts for block in _split(part, document_blocks)]
    return message.model_copy(update={"content": content})


def _split(part: str | Block, document_blocks: Sequence[list[Block]]) -> Iterator[Block]:
    """The part with every placeholder replaced by its document's blocks."""
    if isinstance(part, dict) and not _text_of(part):
        yield part  # an image, say: left to the model
    for piece in split_at_placeholders(_text_of(part), document_blocks):
        if isinstance(piece, list):
            yield from piece
        elif piece:
            yield _text(piece)


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


def _text_of(part: str | Block) -> str:
    return part if isinstance(part, str) else str(part.get("text", ""))
