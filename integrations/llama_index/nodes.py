"""From LlamaIndex's nodes to passages: a node's text exactly as it stands in the prompts that LlamaIndex makes."""

from collections.abc import Iterable, Iterator
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import UsageError

Nodes = Iterable[BaseNode | NodeWithScore]
FORM = "#ragblend:"  # between a node's id and the name of another form of it; `page#part` may be a node


def passage_of(node: BaseNode | NodeWithScore) -> Passage:
    """A node's passage: what the model is shown of it (metadata and text), stripped as every packer strips it."""
    bare = node.node if isinstance(node, NodeWithScore) else node
    return Passage(bare.get_content(MetadataMode.LLM).strip(), bare.node_id)


def passages_of(nodes: Nodes) -> list[Passage]:
    """The nodes' passages, in order; nodes without text (images) are left out."""
    return [passage for node in nodes if (passage := passage_of(node)).text]


def further_passages_of(nodes: Nodes) -> list[Passage]:
    """What else of nodes comes to stand in prompts, stripped: their text without metadata, as `node.get_content()` has
    it, and metadata that holds all of it, which takes its place (the window around a sentence).
    """
    bare = (node.node if isinstance(node, NodeWithScore) else node for node in nodes)
    return [passage for node in bare for passage in _further(node)]


def _further(node: BaseNode) -> Iterator[Passage]:
    text = node.get_content(MetadataMode.NONE).strip()
    held = {name: value.strip() for name, value in node.metadata.items() if isinstance(value, str)}
    known = {"", passage_of(node).text}
    for name, form in {"text": text, **held}.items():
        if text in form and form not in known:
            known.add(form)
            yield Passage(form, f"{node.node_id}{FORM}{name}")


Named = Passage | str | BaseNode | NodeWithScore


def named_passages(passages: Iterable[Named] | Named | None, nodes: Nodes | None) -> tuple[Passage, ...]:
    """What a caller named for one request: passages, bare texts and nodes, several or one. Raises UsageError."""
    return tuple(
        passage for item in (*_several(passages), *_several(nodes)) if (passage := _named(item)).text
    )


def _several(items: Any) -> Iterable[Any]:
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
    raise UsageError(f"passages= and nodes= name texts, passages and nodes, not {type(item).__name__}")
