"""Models on their own homes, documents in a real Chroma, and a watcher of the model's calls."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="the langchain extra is not installed")
pytest.importorskip("langchain_chroma", reason="the langchain extra is not installed")


from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from watching import Watcher

from ragblend.integrations.langchain import ChatRAGBlend

SHORT = {"max_tokens": 8}
TEXTS = {
    "tides": (
        "The tide table of Harrow Sound is kept by the widow Marsh. High water comes twice a day, and the causeway is "
        "closed for two hours before and after it. Nobody has been lost on the causeway since the bell was hung in "
        "1911, although two carters had to be fetched from the beacon by boat."
    ),
    "bell": (
        "The bell at the causeway is rung by hand. It was cast in Lowestoft from the bronze of a ship's propeller, and "
        "it weighs forty stone. The ringer is paid in herring, one barrel a month, and may keep a goat on the green "
        "below the chapel, which the parish council has tried twice to forbid."
    ),
    "lamp": (
        "The lamp in the chapel burns seal oil, which the bishop sends every autumn in a blue jar. When the jar is "
        "empty the lamp is trimmed with tallow, and the fishermen say that it then smells of Sunday dinner as far out "
        "as the second buoy. The sexton lights it an hour before dusk."
    ),
}


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return [Document(text, id=name, metadata={"source": f"{name}.md"}) for name, text in TEXTS.items()]


def options_of(folder, home) -> dict[str, Any]:
    return {"model": str(folder), "home": str(home), "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="session")
def tiny_options(tiny_folder, tmp_path_factory) -> dict[str, Any]:
    """The arguments that open a tiny model on a home of the session."""
    return options_of(tiny_folder, tmp_path_factory.mktemp("tiny-home"))


@pytest.fixture
def tiny(tiny_options) -> ChatRAGBlend:
    return ChatRAGBlend(**tiny_options, **SHORT)


@pytest.fixture(scope="session")
def caller_options(caller_folder, tmp_path_factory) -> dict[str, Any]:
    """The same for a model with tools."""
    return options_of(caller_folder, tmp_path_factory.mktemp("caller-home"))


@pytest.fixture
def make_tiny(place) -> Callable[..., ChatRAGBlend]:
    """Makes tiny models on an empty home, for tests that count what is registered or stored."""
    return lambda **changes: ChatRAGBlend(**place | SHORT | changes)


@pytest.fixture(scope="session")
def store(documents, tmp_path_factory) -> Chroma:
    """The documents in a Chroma on disk, under their own ids."""
    return Chroma.from_documents(
        documents,
        DeterministicFakeEmbedding(size=16),
        ids=[document.id for document in documents],
        persist_directory=str(tmp_path_factory.mktemp("chroma")),
    )


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()
