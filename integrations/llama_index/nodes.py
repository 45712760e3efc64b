"""From LlamaIndex's nodes to passages: a node's text exactly as it stands in the prompts that LlamaIndex makes."""

from collections.abc import Iterable, Sequence

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from ragblend.integrations.passages import Passage

Nodes = Iterable[BaseNode | NodeWithScore]


def passage_of(node: BaseNode | NodeWithScore) -> Passage:
    """A node's passage: what the model is shown of it (metadata and text), stripped as every packer strips it."""
    bare = node.node if isinstance(node, NodeWithScore) else node
    return Passage(bare.get_content(MetadataMode.LLM).strip(), bare.node_id)


def passages_of(nodes: Nodes) -> list[Passage]:
    """The nodes' passages, in order; nodes without text (images) are left out."""
    return [passage for node in nodes if (passage := passage_of(node)).text]


def named_passages(passages: Sequence[Passage | str] | None, nodes: Nodes | None) -> tuple[Passage, ...]:
    """What a caller named for one request: passages, bare texts and nodes."""
    texts = [Passage(item) if isinstance(item, str) else item for item in passages or ()]
    return (*texts, *passages_of(nodes or ()))
