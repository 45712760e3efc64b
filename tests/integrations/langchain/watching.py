"""Records what the models of a chain reported to LangChain's callbacks."""

from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler


@dataclass
class Seen:
    """What came back of one call of a model."""

    text: str = ""
    kv: dict[str, Any] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    error: BaseException | None = None


class Watcher(BaseCallbackHandler):
    """A callback that records a `Seen` for every model call, in the order of their starts."""

    def __init__(self) -> None:
        self.seen: dict[Any, Seen] = {}

    def on_chat_model_start(self, serialized, messages, *, run_id, **kwargs) -> None:
        self.seen[run_id] = Seen()

    def on_llm_start(self, serialized, prompts, *, run_id, **kwargs) -> None:
        self.seen[run_id] = Seen()

    def on_llm_new_token(self, token, *, run_id, **kwargs) -> None:
        self.seen[run_id].tokens.append(token)

    def on_llm_end(self, response, *, run_id, **kwargs) -> None:
        [[generation]] = response.generations
        message = getattr(generation, "message", None)
        metadata = generation.generation_info if message is None else message.response_metadata
        self.seen[run_id].text, self.seen[run_id].kv = generation.text, metadata["kv"]

    def on_llm_error(self, error, *, run_id, **kwargs) -> None:
        self.seen[run_id].error = error

    @property
    def calls(self) -> list[Seen]:
        return list(self.seen.values())
