"""LlamaIndex's starter example, reusing the nodes' KV: only the LLM is RAGBlend's.

python examples/with_llama_index.py            # the bundled SmolLM2; or a hub id, a folder, a .gguf file
"""

import sys
from pathlib import Path

from llama_index.core import SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter

from ragblend.app.samples import documents_folder
from ragblend.integrations.llama_index import RAGBlendEmbedding, RAGBlendLLM


def main() -> None:
    # Without folders: whole paths would make the cuts, and the retrieval, depend on where this is installed.
    reader = SimpleDirectoryReader(
        documents_folder(), required_exts=[".md"], file_metadata=lambda path: {"file_name": Path(path).name},
        exclude_hidden=False,  # the package may be in .venv, which LlamaIndex would take for a hidden folder
    )  # fmt: skip
    splitter = SentenceSplitter(chunk_size=256, chunk_overlap=0)
    index = VectorStoreIndex.from_documents(
        reader.load_data(), embed_model=RAGBlendEmbedding(), transformations=[splitter]
    )

    model = sys.argv[1] if len(sys.argv) > 1 else "default"
    llm = RAGBlendLLM(model=model, max_new_tokens=16)  # the only change

    query_engine = index.as_query_engine(llm=llm)
    for question in ("Who found the clapper of the bell?", "Where did the clapper of the bell fall?"):
        answer = query_engine.query(question)
        kv = llm.last_stats["kv"]
        print(f"{answer}\n  nodes reused: {kv['hits']}, missing: {kv['misses']}; {kv['ttft_ms']:.0f} ms")
        llm.backend.engine.finish_background()  # missing nodes are stored after the answer
    llm.backend.engine.close()


if __name__ == "__main__":
    main()
