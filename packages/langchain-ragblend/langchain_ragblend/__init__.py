"""RAGBlend under the name by which LangChain's users look for it; see `ragblend.integrations.langchain`."""

from ragblend.integrations.langchain import *  # noqa: F403 - all that it gives, and no list beside its own
from ragblend.integrations.langchain import __all__ as __all__
