"""Common LangChain programs, each made of a model and a retriever; only the model is ours."""

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Any

from langchain_classic.agents import AgentExecutor, create_react_agent
from langchain_classic.chains import RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.output_parsers import RegexParser
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool

from ragblend.integrations.langchain import ChatRAGBlend, create_ragblend_stuff_documents_chain

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


def retriever_tool(llm: Any, retriever: Any) -> Any:
    """The chain decides to search, not the model; the result is an ordinary tool message."""
    tool = create_retriever_tool(
        retriever, "search", "Searches the notes.", response_format="content_and_artifact"
    )

    def searched(asked: dict[str, str]) -> list[Any]:
        call = {"name": "search", "args": {"query": asked["input"]}, "id": "1", "type": "tool_call"}
        return [HumanMessage(asked["input"]), AIMessage("", tool_calls=[call]), tool.invoke(call)]

    return RunnablePassthrough() | searched | llm | StrOutputParser()


REACT = PromptTemplate.from_template(
    "You have these tools: {tools} ({tool_names})\n\nQuestion: {input}\nThought: {agent_scratchpad}"
)
SEARCH = ChatGenerationChunk(message=AIMessageChunk("I should look.\nAction: search\nAction Input: the bell"))


class Searching(ChatRAGBlend):
    """Searches first, as a model that follows the ReAct format would."""

    def _stream(self, messages: Any, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        seen = "Observation:" in messages[-1].text
        return super()._stream(messages, *args, **kwargs) if seen else iter([SEARCH])

    async def _astream(self, messages: Any, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        if "Observation:" in messages[-1].text:
            async for chunk in super()._astream(messages, *args, **kwargs):
                yield chunk
        else:
            yield SEARCH


def react_agent(llm: Any, retriever: Any) -> Any:
    model = Searching(
        **{name: getattr(llm, name) for name in ("model", "home", "device", "dtype", "max_tokens")}
    )
    tools = [create_retriever_tool(retriever, "search", "Searches the notes.")]
    agent = create_react_agent(model, tools, REACT)
    return AgentExecutor(agent=agent, tools=tools, max_iterations=2, handle_parsing_errors=True)


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
    "retriever tool, then the model": retriever_tool,
    "classic ReAct agent with a retriever tool": react_agent,
}
