"""RAGBlend under the name by which LlamaIndex's users look for it; see `ragblend.integrations.llama_index`."""

from ragblend.integrations.llama_index import *  # noqa: F403 - all that it gives, and no list beside its own
from ragblend.integrations.llama_index import __all__ as __all__
