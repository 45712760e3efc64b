"""Common LangChain programs, each made of a model and a retriever; only the model is ours."""

from operator import itemgetter
from typing import Any

from langchain_classic.chains import RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.output_parsers import RegexParser
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda

from ragblend.integrations.langchain import create_ragblend_stuff_documents_chain

CHAT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context:\n\n{context}"), ("human", "{input}")]
)
TEXT = PromptTemplate.from_template("Context:\n\n{context}\n\nQuestion: {input}\nAnswer:")
QUESTION = itemgetter("input")


class AnyScore(RegexParser):
    """map_rerank needs a score in every answer, which a small model does not write."""

    def parse(self, text: str) -> dict[str, str]:
        return {"answer": text, "score": str(len(text))}


RERANK = PromptTemplate(
    template="Context:\n---\n{context}\n---\nQuestion: {question}\nHelpful Answer:",
    input_variables=["context", "question"],
    output_parser=AnyScore(regex="", output_keys=["answer", "score"]),
)


def joined(documents: list[Any]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def stuff(create: Any) -> Any:
    return lambda llm, retriever: {"context": QUESTION | retriever, "input": QUESTION} | create(llm, CHAT)


def retrieval_chain(create: Any) -> Any:
    return lambda llm, retriever: create_retrieval_chain(retriever, create(llm, CHAT))


def lcel(llm: Any, retriever: Any, prompt: Any = CHAT) -> Any:
    return {"context": QUESTION | retriever | joined, "input": QUESTION} | prompt | llm | StrOutputParser()


def lcel_text(llm: Any, retriever: Any) -> Any:
    return lcel(llm, retriever, TEXT)


def retrieval_qa(chain_type: str) -> Any:
    def make(llm: Any, retriever: Any) -> Any:
        options = {"chain_type_kwargs": {"prompt": RERANK}} if chain_type == "map_rerank" else {}
        chain = RetrievalQA.from_chain_type(llm, chain_type=chain_type, retriever=retriever, **options)
        return RunnableLambda(lambda asked: {"query": asked["input"]}) | chain

    return make


TEXT_CHAINS = {
    "LCEL": lcel_text,
    **{f"RetrievalQA {kind}": retrieval_qa(kind) for kind in ("stuff", "map_reduce", "map_rerank", "refine")},
}
CHAT_CHAINS = {
    **TEXT_CHAINS,
    "LCEL": lcel,
    "create_stuff_documents_chain": stuff(create_stuff_documents_chain),
    "create_ragblend_stuff_documents_chain": stuff(create_ragblend_stuff_documents_chain),
    "create_retrieval_chain": retrieval_chain(create_stuff_documents_chain),
    "create_retrieval_chain, ours inside": retrieval_chain(create_ragblend_stuff_documents_chain),
}
