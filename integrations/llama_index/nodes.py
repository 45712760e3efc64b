"""Turns LlamaIndex's nodes into passages: a node's text exactly as it is in the prompts that LlamaIndex makes."""

from collections.abc import Iterable, Iterator
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import UsageError

Nodes = Iterable[BaseNode | NodeWithScore]
Named = Passage | str | BaseNode | NodeWithScore
# Separates a node's id and the name of an alternative text. Not just `#`, because a node's id may be `page#part`.
ALTERNATIVE_MARK = "#ragblend:"


def passage_of(node: BaseNode | NodeWithScore) -> Passage:
    """The text of a node in prompts (metadata and text), stripped as every packer strips it."""
    bare = node.node if isinstance(node, NodeWithScore) else node
    return Passage(bare.get_content(MetadataMode.LLM).strip(), bare.node_id)


def passages_of(nodes: Nodes) -> list[Passage]:
    """The nodes' passages, in order; nodes without text (images) are left out."""
    return [passage for node in nodes if (passage := passage_of(node)).text]


def alternative_passages_of(nodes: Nodes) -> list[Passage]:
    """Other texts of nodes that may be in prompts, stripped: the node's text without metadata, as `node.get_content()`
    returns it, and metadata that contains this text and may replace it (the window around a sentence).
    """
    bare = (node.node if isinstance(node, NodeWithScore) else node for node in nodes)
    return [passage for node in bare for passage in _alternatives(node)]


def _alternatives(node: BaseNode) -> Iterator[Passage]:
    text = node.get_content(MetadataMode.NONE).strip()
    metadata = {name: value.strip() for name, value in node.metadata.items() if isinstance(value, str)}
    seen = {"", passage_of(node).text}
    for name, alternative in {"text": text, **metadata}.items():
        if text in alternative and alternative not in seen:
            seen.add(alternative)
            yield Passage(alternative, f"{node.node_id}{ALTERNATIVE_MARK}{name}")


def named_passages(passages: Iterable[Named] | Named | None, nodes: Nodes | None) -> tuple[Passage, ...]:
    """The passages that a caller named for one request: passages, texts or nodes, one or several. Raises UsageError."""
    items = (*_as_items(passages), *_as_items(nodes))
    return tuple(passage for item in items if (passage := _named(item)).text)


def _as_items(items: Any) -> Iterable[Any]:
    if items is None:
        return ()
    return items if isinstance(items, Iterable) and not isinstance(items, Named) else (items,)


def _named(item: Any) -> Passage:
    if isinstance(item, Passage):
        return item
    if isinstance(item, str):
        return Passage(item.strip())
    if isinstance(item, BaseNode | NodeWithScore):
        return passage_of(item)
    raise UsageError(f"passages= and nodes= take texts, passages and nodes, not {type(item).__name__}")
