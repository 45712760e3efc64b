"""RAGBlend inside an unpatched vLLM server: `RAGBlendConnector`, for `--kv-transfer-config`."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "RAGBlendConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ragblend.integrations.vllm.connector import RAGBlendConnector

    return RAGBlendConnector
