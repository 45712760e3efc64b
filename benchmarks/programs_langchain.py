"""Programs from LangChain's documentation, with the same calls in the same order.

Each names the repository and file that it follows. Only the model and the documents are ours.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, dynamic_prompt
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import LLMChainExtractor
from langchain_classic.storage import InMemoryStore
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

from benchmarks.reused_tokens import Ask, Program
from ragblend.integrations.langchain import ChatRAGBlend

QUESTION_FIRST = ChatPromptTemplate.from_template(
    "You answer questions from what was found in the archive, in three sentences at most. What is not in it you do "
    "not know.\nQuestion: {question} \nContext: {context} \nAnswer:"
)
FROM_CONTEXT = ChatPromptTemplate.from_template(
    "Answer from this context alone:\n{context}\n\nQuestion: {question}\n"
)


class LangChainRetrieved(BaseCallbackHandler):
    """Records retrieved texts. `texts` are those of retrievers, or of the vector store if no retriever ran."""

    by_retrievers: list[str]
    by_store: list[str]

    def __init__(self) -> None:
        self.forget()

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        self.by_retrievers += [document.page_content for document in documents]

    def forget(self) -> None:
        self.by_retrievers, self.by_store = [], []

    @property
    def texts(self) -> list[str]:
        return self.by_retrievers or self.by_store


class Store(InMemoryVectorStore):
    """LangChain's in-memory store, with recorded searches."""

    found: LangChainRetrieved

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        documents = super().similarity_search(query, k, **kwargs)
        self.found.by_store += [document.page_content for document in documents]
        return documents


@dataclass
class LangChainDocuments:
    """Documents, their embeddings, and how they are split; sizes in characters."""

    documents: Sequence[Document]
    embeddings: Embeddings
    chunk: int = 1000
    overlap: int = 200
    child: int = 400
    found: LangChainRetrieved = field(default_factory=LangChainRetrieved)

    @contextmanager
    def finding(self) -> Iterator[LangChainRetrieved]:
        """Record what is retrieved within the block."""
        self.found.forget()
        yield self.found

    def empty_store(self) -> Store:
        store = Store(self.embeddings)
        store.found = self.found
        return store

    def store(self) -> Store:
        store = self.empty_store()
        splitter = RecursiveCharacterTextSplitter(
            chunk_size=self.chunk, chunk_overlap=self.overlap, add_start_index=True
        )
        store.add_documents(splitter.split_documents(self.documents))
        return store

    @property
    def config(self) -> Any:
        return {"callbacks": [self.found]}


def joined(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def from_messages(system: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_messages(
        [("system", system), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )


def pipeline_asker(
    retriever: Any, llm: Any, library: LangChainDocuments, prompt: ChatPromptTemplate = FROM_CONTEXT
) -> Ask:
    """Ask a chain of retriever, prompt and model; for retrievers whose documentation ends at `invoke`."""
    chain = (
        {"context": retriever | joined, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()
    )
    return lambda question: chain.invoke(question, library.config)


def as_chain(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    return pipeline_asker(library.store().as_retriever(), llm, library, QUESTION_FIRST)


class GraphState(TypedDict, total=False):
    question: str
    context: list[Document]
    answer: str


def as_graph(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    store = library.store()

    def retrieve(state: GraphState) -> GraphState:
        return {"context": store.similarity_search(state["question"])}

    def generate(state: GraphState) -> GraphState:
        asked = QUESTION_FIRST.invoke({"question": state["question"], "context": joined(state["context"])})
        return {"answer": llm.invoke(asked).text}

    builder: Any = StateGraph(GraphState).add_sequence([retrieve, generate])
    graph = builder.add_edge(START, "retrieve").compile()
    return lambda question: graph.invoke({"question": question}, library.config)["answer"]


def agent_asker(agent: Any, library: LangChainDocuments) -> Ask:
    def ask(question: str) -> str:
        asked = {"messages": [{"role": "user", "content": question}]}
        steps = [*agent.stream(asked, library.config, stream_mode="values")]
        return str(steps[-1]["messages"][-1].text)

    return ask


def as_middleware(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    store = library.store()

    @dynamic_prompt
    def with_context(request: ModelRequest) -> str:
        found = store.similarity_search(request.state["messages"][-1].text)
        return (
            f"You help with questions about the archive. Use this context for your answer:\n\n{joined(found)}"
        )

    return agent_asker(create_agent(llm, tools=[], middleware=[with_context]), library)


class StateWithContext(AgentState):
    context: list[Document]


def as_middleware_with_sources(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    store = library.store()

    class Retrieving(AgentMiddleware[StateWithContext]):
        state_schema = StateWithContext

        def before_model(self, state: Any, runtime: Any = None) -> dict[str, Any]:
            last = state["messages"][-1]
            found = store.similarity_search(last.text)
            content = f"{last.text}\n\nAnswer the question from this context:\n{joined(found)}"
            return {"messages": [last.model_copy(update={"content": content})], "context": found}

    return agent_asker(create_agent(llm, tools=[], middleware=[Retrieving()]), library)


def as_conversation(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    condense = from_messages(
        "There is a conversation, and a last question that may lean on it. Write that question so that it stands by "
        "itself. Do not answer it."
    )
    retriever = create_history_aware_retriever(llm, library.store().as_retriever(), condense)
    answering = create_stuff_documents_chain(
        llm, from_messages("You answer from what was found, in three sentences at most.\n\n{context}")
    )
    chain = create_retrieval_chain(retriever, answering)
    sessions: dict[str, InMemoryChatMessageHistory] = {}
    with_history = RunnableWithMessageHistory(
        chain,
        lambda session_id: sessions.setdefault(session_id, InMemoryChatMessageHistory()),
        input_messages_key="input",
        history_messages_key="chat_history",
        output_messages_key="answer",
    )
    config = library.config | {"configurable": {"session_id": "one"}}
    return lambda question: with_history.invoke({"input": question}, config)["answer"]


def as_parents(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    retriever = ParentDocumentRetriever(
        vectorstore=library.empty_store(),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=library.child, chunk_overlap=0),
        parent_splitter=RecursiveCharacterTextSplitter(chunk_size=2 * library.chunk, chunk_overlap=0),
    )
    retriever.add_documents(list(library.documents))
    return pipeline_asker(retriever, llm, library)


class ByWords(BaseRetriever):
    """Replaces `BM25Retriever`, whose package is not installed: finds the documents that share most words."""

    documents: list[Document]
    k: int = 2

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        words = set(query.lower().split())
        return sorted(self.documents, key=lambda d: -len(words & set(d.page_content.lower().split())))[
            : self.k
        ]


def as_ensemble(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    store = library.store()
    documents = [
        Document(held["text"], id=key, metadata=held["metadata"]) for key, held in store.store.items()
    ]
    retriever = EnsembleRetriever(
        retrievers=[ByWords(documents=documents), store.as_retriever(search_kwargs={"k": 2})],
        weights=[0.5, 0.5],
    )
    return pipeline_asker(retriever, llm, library)


def as_compression(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    retriever = ContextualCompressionRetriever(
        base_compressor=LLMChainExtractor.from_llm(llm), base_retriever=library.store().as_retriever()
    )
    return pipeline_asker(retriever, llm, library)


def as_multi_query(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    return pipeline_asker(
        MultiQueryRetriever.from_llm(retriever=library.store().as_retriever(), llm=llm), llm, library
    )


COPIED_FIELDS = (
    *("model", "home", "collection", "device", "dtype", "method", "max_tokens"),
    *("learn_from_prompts", "register_retrieved"),
)


class ScriptedModel(ChatRAGBlend):
    """Calls the search tool first and grades every document relevant, as a larger model would in that format."""

    @classmethod
    def of(cls, llm: BaseChatModel) -> "ScriptedModel":
        return cls(**{name: getattr(llm, name) for name in COPIED_FIELDS})

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self

    def with_structured_output(self, schema: Any = None, **kwargs: Any) -> Any:
        return self | RunnableLambda(lambda _: schema(binary_score="yes"))

    def _generate(self, messages: list[Any], *args: Any, **kwargs: Any) -> ChatResult:
        if any(message.type == "tool" for message in messages) or "<context>" in messages[-1].text:
            return super()._generate(messages, *args, **kwargs)
        call = {"name": "search", "args": {"query": messages[-1].text}, "id": "1", "type": "tool_call"}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=[call]))])


def as_agent(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    store = library.store()

    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[str, list[Document]]:
        """Searches the archive."""
        found = store.similarity_search(query, k=2)
        return "\n\n".join(f"Source: {each.metadata}\nContent: {each.page_content}" for each in found), found

    system = "You may search the archive of a tramway. Search it where that helps to answer."
    return agent_asker(create_agent(ScriptedModel.of(llm), [search], system_prompt=system), library)


class Graded(BaseModel):
    """Whether a document helps to answer."""

    binary_score: str


IS_RELEVANT = (
    "Does this document help with the question?\n\n<context>\n{context}\n</context>\n"
    "Question: {question}\nSay yes or no."
)
IN_BETTER_WORDS = "Write this question in a better way: {question}"
FROM_DOCUMENT = (
    "Answer from the context in three sentences at most.\nQuestion: {question}\n"
    "<context>\n{context}\n</context>"
)


def as_agentic_graph(llm: BaseChatModel, library: LangChainDocuments) -> Ask:
    retriever, model = library.store().as_retriever(), ScriptedModel.of(llm)

    @tool
    def search(query: str) -> str:
        """Searches the archive."""
        return joined(retriever.invoke(query))

    def asked(words: str, state: MessagesState) -> list[dict[str, str]]:
        question, found = state["messages"][0].text, state["messages"][-1].text
        return [{"role": "user", "content": words.format(question=question, context=found)}]

    def search_or_answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.bind_tools([search]).invoke(state["messages"])]}

    def grade(state: MessagesState) -> Literal["answer", "rewrite"]:
        graded = model.with_structured_output(Graded).invoke(asked(IS_RELEVANT, state))
        return "answer" if graded.binary_score == "yes" else "rewrite"

    def rewrite(state: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(model.invoke(asked(IN_BETTER_WORDS, state)).text)]}

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(asked(FROM_DOCUMENT, state))]}

    builder: Any = StateGraph(MessagesState)
    for node in (search_or_answer, rewrite, answer):
        builder.add_node(node)
    builder.add_node("retrieve", ToolNode([search]))
    builder.add_edge(START, "search_or_answer")
    builder.add_conditional_edges("search_or_answer", tools_condition, {"tools": "retrieve", END: END})
    builder.add_conditional_edges("retrieve", grade)
    builder.add_edge("answer", END)
    builder.add_edge("rewrite", "search_or_answer")
    return agent_asker(builder.compile(), library)


TUTORIAL = "langchain-ai/docs, src/oss/langchain/rag.mdx"
HOW_TO = "langchain-ai/langchain, docs/docs/how_to"
PROGRAMS = [
    Program("RAG tutorial: agent", TUTORIAL, as_agent),
    Program("agentic RAG", "langchain-ai/docs, src/oss/langgraph/agentic-rag.mdx", as_agentic_graph),
    Program("RAG tutorial: chain", "langchain-ai/langchain, docs/docs/tutorials/rag.ipynb (2024)", as_chain),
    Program("RAG tutorial: graph", "langchain-ai/langchain, docs/docs/tutorials/rag.ipynb (2025)", as_graph),
    Program("RAG tutorial: middleware", TUTORIAL, as_middleware),
    Program("RAG tutorial: middleware with source documents", TUTORIAL, as_middleware_with_sources),
    Program(
        "history-aware retriever, chat history", f"{HOW_TO}/qa_chat_history_how_to.ipynb", as_conversation
    ),
    Program("parent documents", f"{HOW_TO}/parent_document_retriever.ipynb", as_parents),
    Program("ensemble", f"{HOW_TO}/ensemble_retriever.ipynb", as_ensemble),
    Program("compression by the model", f"{HOW_TO}/contextual_compression.ipynb", as_compression),
    Program("multi-query", f"{HOW_TO}/MultiQueryRetriever.ipynb", as_multi_query),
]
