"""The stuff chain whose documents reach the model by id: LangChain's own, with content blocks in the place of text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelLike
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, aformat_document, format_document
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from ragblend.integrations.langchain.documents import digest_id

DOCUMENTS_KEY = "context"
DEFAULT_DOCUMENT_PROMPT = PromptTemplate.from_template("{page_content}")
DEFAULT_DOCUMENT_SEPARATOR = "\n\n"
# Stands in the template for a document, until the template has been filled in; nothing that people write.
_MARK = "\x00ragblend document {}\x00"


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

    Nothing need be known about the documents beforehand. prompt: must have the variable `context` (or what
    document_variable_name says), which the input holds as a list of documents. Raises ValueError where it has not.
    """
    if document_variable_name not in prompt.input_variables:
        raise ValueError(
            f"Prompt must accept {document_variable_name} as an input variable. "
            f"Received prompt with input variables: {prompt.input_variables}"
        )
    each = document_prompt or DEFAULT_DOCUMENT_PROMPT
    filling = _Filling(prompt, each, document_separator, document_variable_name)
    fill = RunnableLambda(filling.fill, afunc=filling.afill, name="format_inputs")
    return (fill | llm | (output_parser or StrOutputParser())).with_config(run_name="stuff_documents_chain")


class _Filling:
    """Fills the template in with marks, and puts blocks where the marks came out."""

    def __init__(
        self,
        prompt: BasePromptTemplate[Any],
        document_prompt: BasePromptTemplate[str],
        separator: str,
        name: str,
    ) -> None:
        self._prompt, self._document_prompt, self._separator, self._name = (
            prompt,
            document_prompt,
            separator,
            name,
        )

    def fill(self, inputs: dict[str, Any], config: RunnableConfig) -> PromptValue:
        documents = inputs[self._name]
        texts = [format_document(document, self._document_prompt) for document in documents]
        value = self._prompt.invoke({**inputs, self._name: self._marks(texts)}, config)
        return _with_blocks(value, documents, texts)

    async def afill(self, inputs: dict[str, Any], config: RunnableConfig) -> PromptValue:
        documents = inputs[self._name]
        texts = [await aformat_document(document, self._document_prompt) for document in documents]
        value = await self._prompt.ainvoke({**inputs, self._name: self._marks(texts)}, config)
        return _with_blocks(value, documents, texts)

    def _marks(self, texts: Sequence[str]) -> str:
        return self._separator.join(_MARK.format(number) for number in range(len(texts)))


def _with_blocks(value: PromptValue, documents: Sequence[Document], texts: Sequence[str]) -> PromptValue:
    blocks = {
        _MARK.format(number): _document_blocks(document, text)
        for number, (document, text) in enumerate(zip(documents, texts, strict=True))
    }
    return ChatPromptValue(messages=[_message_with(message, blocks) for message in value.to_messages()])


def _document_blocks(document: Document, text: str) -> list[dict[str, Any]]:
    """A document as its prompt wrote it: what surrounds its own text (a title, a source) is plain text."""
    content = document.page_content.strip()
    before, found, after = text.partition(content) if content else (text, "", "")
    block = {"type": "text", "text": found, "id": document.id or digest_id(content)}
    return [part for part in (_text(before), block, _text(after)) if part["text"]]


def _message_with(message: BaseMessage, blocks: Mapping[str, list[dict[str, Any]]]) -> BaseMessage:
    parts = message.content if isinstance(message.content, list) else [message.content]
    if not any(mark in _text_of(part) for part in parts for mark in blocks):
        return message
    content = [block for part in parts for block in _split(part, blocks)]
    return message.model_copy(update={"content": content})


def _split(
    part: str | dict[str, Any], blocks: Mapping[str, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """The part with every mark replaced by its document's blocks."""
    text = _text_of(part)
    while found := [(text.index(mark), mark) for mark in blocks if mark in text]:
        at, mark = min(found)
        if at:
            yield _text(text[:at])
        yield from blocks[mark]
        text = text[at + len(mark) :]
    if text:
        yield _text(text)
    elif isinstance(part, dict) and not _text_of(part):
        yield part  # an image, or whatever it is: the model says what it thinks of it


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _text_of(part: str | dict[str, Any]) -> str:
    return part if isinstance(part, str) else str(part.get("text", ""))
