"""Loading the model and the embedder while the page, or the server, is already there, and what went wrong with it."""

import logging
import threading

from ragblend.app.services import AppServices
from ragblend.kvstore.errors import RagBlendError

LOG = logging.getLogger(__name__)


class ModelStartup:
    """One loading in the background. problem: what must be told; "" while it is under way or when all is well."""

    def __init__(self) -> None:
        self.problem = ""
        self.is_loading = False

    def begin(self, services: AppServices) -> threading.Thread:
        """Load so that the first question need not wait; a model that is missing is told before anybody asks."""
        self.is_loading = True
        thread = threading.Thread(target=self._load, args=(services,), name="ragblend-startup", daemon=True)
        thread.start()
        return thread

    def _load(self, services: AppServices) -> None:
        try:
            workspaces = services.workspaces
            workspaces.first.engine.count_tokens("one word")  # is there such a model?
            services.conversations.warm_up()
            workspaces.first.engine.prefetch(())
            self.problem = ""
        except RagBlendError as error:
            self.problem = (
                f"{error} Until then questions cannot be answered; the library and the settings work."
            )
        except Exception as error:
            LOG.exception("loading the model failed")
            self.problem = (
                f"Loading the model failed in a way that RAGBlend did not foresee ({type(error).__name__}: {error}). "
                "Choose another model in the settings, or start RAGBlend again; its terminal says where it failed."
            )
        finally:
            self.is_loading = False
