"""Documents that LangChain's retrievers return become known to the models of this process.

That is what makes one changed line enough: the documents of a stock chain reach the model as text inside a prompt, and
text is found there only if it is known. LangChain lets a callback handler see every run (`register_configure_hook`,
which its own tracers use); this one looks at the documents that retrievers return. What a model wrote in their place
(a compressor's extract) is left out: it is another text each time. It remembers hashes of answers for that.
"""

from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult
from langchain_core.tracers.context import register_configure_hook

from ragblend.integrations.langchain.documents import digest_id, passages_of
from ragblend.integrations.parameters import Learners

_REMEMBERED = 1000  # answers: more than any compressor asks for at once


class RetrievedDocuments(BaseCallbackHandler):
    """Registers what retrievers return: hashes and ids, no text."""

    ignore_chat_model = ignore_chain = ignore_agent = ignore_custom_event = True  # beginnings, of no interest

    def __init__(self) -> None:
        self._answers: deque[str] = deque(maxlen=_REMEMBERED)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self._answers.extend(digest_id(said.text.strip()) for each in response.generations for said in each)

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        written = set(self._answers)
        LEARNERS.learn([found for found in passages_of(documents) if digest_id(found.text) not in written])


_handler = RetrievedDocuments()
# In every context, also those that were made before: what hooks find in the variable is this default.
_everywhere: ContextVar[RetrievedDocuments | None] = ContextVar("ragblend_retrieved", default=_handler)
# A hook sees every run by itself, so what a run begins need not inherit it.
LEARNERS = Learners(lambda: register_configure_hook(_everywhere, inheritable=False))
