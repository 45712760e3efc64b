"""What LangChain says to a model, as a call of it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragblend.integrations import calls
from ragblend.integrations.backend import Backend, Turn
from ragblend.integrations.langchain.documents import passages_of
from ragblend.integrations.langchain.parameters import DECODING, SYNONYMS, Parameters
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.prompt import Prompt

TOOLS = ("tools", "tool_choice", "functions", "function_call")
FRAMEWORKS_OWN = ("stream",)  # LangChain's own switches, which it hands on to the model


log = logging.getLogger("ragblend")
_said: set[Backend] = set()


@dataclass(frozen=True)
class Call(calls.Call):
    """Of LangChain: it says once a model and home that nothing can be reused."""

    @property
    def model_name(self) -> str:
        return self.backend.engine.model_name

    def chat_prompt(self, turns: Sequence[Turn], named: Sequence[Passage] = ()) -> "Prompt":
        return self._noted(self.backend.chat_prompt(turns, (*self.named, *named)))

    def text_prompt(self, text: str) -> "Prompt":
        return self._noted(self.backend.text_prompt(text, self.named))

    def _noted(self, prompt: "Prompt") -> "Prompt":
        if not prompt.chunks and self.backend not in _said:
            _said.add(self.backend)
            log.warning(
                "no known document stands in this prompt, so it is read in full, as by any other model. Documents "
                "become known through a retriever, encode_documents(), content blocks with ids, or passages=."
            )
        return prompt


def settle(parameters: Parameters, stop: Sequence[str] | None, arguments: Mapping[str, Any]) -> Call:
    """The call's own arguments go over the parameters. Raises UsageError for tools."""
    given = calls.one_name_each(arguments, SYNONYMS)
    if refused := [name for name in TOOLS if given.get(name)]:
        raise UsageError(f"{', '.join(refused)}: this model calls no tools; leave them out")
    given = {name: value for name, value in given.items() if name not in (*TOOLS, *FRAMEWORKS_OWN)}
    if stop is not None:
        given["stop"] = stop
    passages = passages_of(given.pop("passages", None) or ())
    backend = parameters.backend(given.pop("model", None))
    fields = {name: getattr(parameters, name) for name in (*DECODING, "method", "ratio", "timeout")}
    return Call.of(backend, passages, fields, parameters.model_kwargs, given)
