"""LangChain's own suites for integrations, unmodified (`langchain-tests`).

What they skip, and why: tool calling and structured output (`bind_tools` is not declared: no tool-calling format is
decoded, and a small local model would not keep to one), JSON mode, images, audio, PDF (the models read text), reading
parameters from the environment (there are no credentials), VCR recordings (there is no HTTP to record).
"""

from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="langchain-tests (the dev extra) is not installed")

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from ragblend.integrations.langchain import ChatRAGBlend, RAGBlendRetriever, encode_documents

pytestmark = [
    pytest.mark.filterwarnings("ignore:The function `load` is in beta"),
    pytest.mark.filterwarnings("ignore:.*is in beta. It is actively being worked on"),
]


@pytest.fixture(autouse=True)
def listed_by_langchain(monkeypatch):
    """`load(allowed_objects="all")`, which the suite uses, takes classes of LangChain's own repository only: those in
    a table of langchain-core. Others are loaded by naming them; here ours is entered as if LangChain listed it."""
    module = import_module("langchain_core.load.load")  # the package's own `load` is a function
    path = tuple(ChatRAGBlend.lc_id())
    monkeypatch.setitem(module.ALL_SERIALIZABLE_MAPPINGS, path, path)
    monkeypatch.setattr(module, "_default_class_paths_cache", {})


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRAGBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "default", "collection": "notes", "ratio": 0.2}


class TestIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _opened(self, tiny_options, documents, other_folder) -> None:
        self.options, self.documents, self.other_folder = tiny_options, documents, other_folder

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRAGBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.options, "max_tokens": 8}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        """Shorter answers than the suite's 100 tokens; the rest is its own."""
        return {**super().standard_chat_model_params, "max_tokens": 8}

    @property
    def model_override_value(self) -> str | None:
        return str(self.other_folder)

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatRAGBlend(**self.chat_model_params)
        encode_documents(self.documents, model, show_progress=False)
        notes = "\n\n".join(document.page_content for document in self.documents)
        asked = [HumanMessage(f"{notes}\n\nWho keeps the tide table?")]
        if not stream:
            return model.invoke(asked)
        chunks = list(model.stream(asked))
        return sum(chunks[1:], chunks[0])


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _opened(self, tiny, store) -> None:
        self.tiny, self.store = tiny, store

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return RAGBlendRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"vectorstore": self.store, "llm": self.tiny}

    @property
    def retriever_query_example(self) -> str:
        return "Who rings the bell?"


class TestRetrieverAroundAnother(TestRetriever):
    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": self.store.as_retriever(), "llm": self.tiny}
