"""RAGBlend: question answering over your own documents that starts fast.

The public names, imported on first use, so that `import ragblend` costs nothing.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

_HOMES = {
    "Engine": "ragblend.engine.engine",
    "Literal": "ragblend.engine.prompts.segments",
    "Chunk": "ragblend.engine.prompts.segments",
    "Prompt": "ragblend.engine.prompts.segments",
    "RagBlendError": "ragblend.kvstore.errors",
}
__all__ = ["Chunk", "Engine", "Literal", "Prompt", "RagBlendError"]
__version__ = "0.1.0"

if not Path(__file__).with_name("engine").is_dir():
    raise ImportError(
        f"{Path(__file__).parent} has no folder `engine`: in the sources it is a link to ../engine, which this copy "
        "lost. Clone with `git -c core.symlinks=true clone`, unpack where the file system keeps links, or install "
        "the wheel."
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ragblend' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
