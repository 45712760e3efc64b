"""Documents that LangChain's retrievers return become known to the models of this process.

That is what makes one changed line enough: the documents of a stock chain reach the model as text inside a prompt, and
text is found there only if it is known. LangChain lets a callback handler see every run (`register_configure_hook`,
which its own tracers use); this one looks at the documents that retrievers return, and at nothing else. What it hands
on is exact text, compared with the prompt's, so it does not matter which thread or task a retriever ran in.
"""

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

from ragblend.integrations.backend import Backend
from ragblend.integrations.langchain.documents import passages_of
from ragblend.integrations.langchain.parameters import Parameters

_models: WeakValueDictionary[int, Parameters] = WeakValueDictionary()
_lock = threading.Lock()
_registered = False


class RetrievedDocuments(BaseCallbackHandler):
    """Registers what retrievers return with every living model that wants it: hashes and ids, no text."""

    @property
    def ignore_llm(self) -> bool:
        return True

    @property
    def ignore_chat_model(self) -> bool:
        return True

    @property
    def ignore_chain(self) -> bool:
        return True

    @property
    def ignore_agent(self) -> bool:
        return True

    @property
    def ignore_custom_event(self) -> bool:
        return True

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """LangChain logs what goes wrong in here, and goes on."""
        passages = passages_of(documents)
        for backend in _places():
            backend.remember(passages)


_handler = RetrievedDocuments()
# In every context, also those that were made before: what hooks find in the variable is this default.
_everywhere: ContextVar[RetrievedDocuments | None] = ContextVar("ragblend_retrieved", default=_handler)


def listen_for(model: Parameters) -> None:
    """From now on, and as long as the model lives."""
    global _registered
    with _lock:
        if not _registered:
            register_configure_hook(_everywhere, inheritable=False)  # a hook sees every run by itself
            _registered = True
        _models[id(model)] = model


def _places() -> list[Backend]:
    """A backend for every home and collection that a living model has; the registry is one for each."""
    with _lock:
        models = [model for model in _models.values() if model.register_retrieved]
    return list({(model.home, model.collection): model.backend() for model in models}.values())
