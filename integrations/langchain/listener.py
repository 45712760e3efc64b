"""Registers the documents that LangChain's retrievers return, so that an application changes only the model.

A standard chain passes documents to the model as text in a prompt, and only registered text is found there. LangChain
can show a callback handler every run (`register_configure_hook`, which its own tracers use); this one registers
retrievers' results. Text that a model wrote instead (a compressor's extract) is left out, because it differs each time;
to recognise it, the handler keeps hashes of answers.
"""

from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult
from langchain_core.tracers.context import register_configure_hook

from ragblend.integrations.langchain.documents import content_id, passages_of
from ragblend.integrations.parameters import LiveModels

_MAX_ANSWERS = 1000  # whose hashes are kept: more than a compressor requests at once


class RetrievedDocuments(BaseCallbackHandler):
    """Registers what retrievers return: hashes and ids, no text."""

    # The events that are not needed.
    ignore_chat_model = ignore_chain = ignore_agent = ignore_custom_event = True

    def __init__(self) -> None:
        self._answers: deque[str] = deque(maxlen=_MAX_ANSWERS)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self._answers.extend(
            content_id(answer.text.strip()) for answers in response.generations for answer in answers
        )

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        answers = set(self._answers)
        LIVE_MODELS.register(
            [passage for passage in passages_of(documents) if content_id(passage.text) not in answers]
        )


_handler = RetrievedDocuments()
# The variable's default applies in every context, existing ones included.
_handler_variable: ContextVar[RetrievedDocuments | None] = ContextVar("ragblend_retrieved", default=_handler)
# A hook sees every run by itself, so child runs need not inherit it.
LIVE_MODELS = LiveModels(lambda: register_configure_hook(_handler_variable, inheritable=False))
