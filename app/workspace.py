"""One home, opened: its settings, library, vector index, embedder and engine, each made when first needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.home import Home, make_private
from ragblend.app.library import Library
from ragblend.app.lock import Hold, writer_lock
from ragblend.app.settings import Settings

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine
    from ragblend.integrations.chroma import VectorIndex
    from ragblend.integrations.embeddings import Embedder
    from ragblend.integrations.passages import PassageRegistry
    from ragblend.kvstore.store import KVStore


@dataclass(frozen=True)
class Workspace:
    """What ingest, questions and the command line work on. Close it, or use it as a context manager."""

    home: Home
    settings: Settings

    @classmethod
    def open(cls, home: Path | str | None = None, **overrides: Any) -> "Workspace":
        """Find the home, make it if need be, read its settings. Raises LibraryError, SettingsError."""
        found = Home.resolve(home).create()
        return cls(found, Settings.load(found.settings, overrides=overrides))

    @cached_property
    def library(self) -> Library:
        return Library.open(self.home.library)

    @cached_property
    def index(self) -> "VectorIndex":
        from ragblend.integrations.chroma import VectorIndex

        return VectorIndex(self.home.chroma, self.settings.collection)

    @cached_property
    def embedder(self) -> "Embedder":
        from ragblend.integrations.embeddings import MiniLMEmbedder

        return MiniLMEmbedder()

    @cached_property
    def engine(self) -> "Engine":
        from ragblend.engine.engine import Engine

        settings = self.settings
        return Engine.open(
            model=settings.model,
            home=self.home.root,
            device=settings.device,
            dtype=settings.dtype,
            collection=settings.collection,
            store_budget_bytes=settings.store_budget_bytes,
            memory_budget_bytes=settings.memory_budget_bytes,
            device_budget_bytes=settings.device_budget_bytes,
            store_policy=settings.store_policy,
            kv_codec=settings.kv_codec,
            usd_per_gb_month=settings.usd_per_gb_month,
        )

    @cached_property
    def store(self) -> "KVStore":
        """The KV store alone, for upkeep that needs no model."""
        from ragblend.kvstore.store import KVStore

        settings = self.settings
        return KVStore.open(self.home.kv, settings.store_budget_bytes, policy=settings.store_policy)

    @cached_property
    def known_passages(self) -> "PassageRegistry":
        """What is found again in prompts that a framework builds over this home."""
        from ragblend.integrations.passages import PassageRegistry

        return PassageRegistry.open(self.home.root, self.settings.collection)

    @contextmanager
    def writing(self) -> Iterator[Hold]:
        """Be the one writer of this home. Raises StoreLockedError, naming who is."""
        with writer_lock(self.home.lock) as hold:
            try:
                yield hold
            finally:
                if self.home.chroma.exists():
                    make_private(self.home.chroma)  # Chroma makes its files readable for all

    def close(self) -> None:
        """Let go of the files. The engine stays: it is shared in a process."""
        for name in ("library", "index", "store", "known_passages"):
            if name in self.__dict__:
                self.__dict__[name].close()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
