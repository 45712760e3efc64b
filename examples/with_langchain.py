"""A LangChain retrieval chain that reuses its documents' KV: only the chat model is RAGBlend's.

python examples/with_langchain.py            # the bundled SmolLM2; or a hub id, a folder, a .gguf file
"""

import sys
from importlib.resources import files

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from ragblend.integrations.langchain import ChatRAGBlend, RAGBlendEmbeddings


def joined(found: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in found)


def main() -> None:
    log = files("ragblend.app.samples").joinpath("documents/keepers-log-1962.md").read_text(encoding="utf-8")
    documents = [Document(entry.strip(), id=f"log {day}") for day, entry in enumerate(log.split("\n## ")[1:])]
    store = InMemoryVectorStore.from_documents(documents, RAGBlendEmbeddings())
    retriever = store.as_retriever(search_kwargs={"k": 2})

    model = sys.argv[1] if len(sys.argv) > 1 else "default"
    chat = ChatRAGBlend(model=model, max_tokens=16)  # the only change

    prompt = ChatPromptTemplate.from_template("Context:\n\n{context}\n\nAnswer in one sentence: {question}")
    chain = {"context": retriever | joined, "question": RunnablePassthrough()} | prompt | chat
    for question in ("Who mended the north cistern?", "What caused the leak in the north cistern?"):
        answer = chain.invoke(question)
        kv = answer.response_metadata["kv"]
        print(
            f"{answer.text}\n  documents reused: {kv['hits']}, missing: {kv['misses']}; {kv['ttft_ms']:.0f} ms"
        )
        chat.backend.engine.finish_background()  # missing documents are stored after the answer
    chat.backend.engine.close()


if __name__ == "__main__":
    main()
