"""The bundled embedder as LlamaIndex's embed_model."""

import asyncio
import copy
import pickle

import numpy as np
import pytest
from llama_helpers import STORIES, story_nodes
from llama_index.core import VectorStoreIndex

from ragblend.integrations.embeddings import Embedder
from ragblend.integrations.llama_index import RAGBlendEmbedding


@pytest.fixture(scope="module")
def embedding():
    made = RAGBlendEmbedding()
    assert made.to_dict()["model_name"] == "all-MiniLM-L6-v2"
    return made


def test_it_can_be_copied_and_pickled_before_and_after_use(embedding):
    for made in (RAGBlendEmbedding(), embedding):
        for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert same(other.get_query_embedding("The harbour."), made.get_query_embedding("The harbour."))


def same(one, other):
    """But for the last bits (of bfloat16, where that is used), which depend on the batch size."""
    return np.dot(one, other) > 0.999


def test_vectors_are_the_embedders_own_and_normalised(embedding):
    short, long = "The harbour.", " ".join(STORIES)
    batch = embedding.get_text_embedding_batch([short, long])
    own = Embedder().embed_question(short)
    assert same(batch[0], own) and same(embedding.get_query_embedding(short), own)
    assert not same(batch[1], own)
    assert [len(vector) for vector in batch] == [384, 384]
    assert np.allclose(np.linalg.norm(batch, axis=1), 1)


def test_async_methods_give_the_same_vectors(embedding):
    async def all_of_them():
        texts = await embedding.aget_text_embedding_batch(STORIES)
        return [
            await embedding.aget_query_embedding(STORIES[0]),
            await embedding.aget_text_embedding(STORIES[0]),
            texts[0],
        ]

    rows = asyncio.run(all_of_them())
    assert all(same(row, embedding.get_text_embedding(STORIES[0])) for row in rows)


def test_the_nearest_node_answers_the_question(embedding):
    retriever = VectorStoreIndex(story_nodes(), embed_model=embedding).as_retriever(similarity_top_k=1)
    assert retriever.retrieve("Who gave the controller handle to the museum?")[0].node.node_id == "node-1"
