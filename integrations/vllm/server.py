"""A vLLM server's properties, and the runtime of an engine that uses it: tokenizer, store and nodes are local.

The home is the server's, or has the same registered passages. The server encodes and stores KV (by `connector.py`); if
both use one home, it is found, counted and deleted here. A server without the connector answers, too, but fuses
nothing.
"""

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragblend.engine.config import EngineConfig
from ragblend.engine.decoding.uncertainty import LIKELY_TOKENS
from ragblend.engine.model.checkpoints import DEFAULT, find_model
from ragblend.engine.model.gate import GATE_TEXT, GateVerdict
from ragblend.engine.runtime_base import RuntimeBase, log
from ragblend.engine.scheduling.queue import POLL_S, Cancel
from ragblend.integrations.vllm.completions import CONNECT_S, SILENCE_S, Completions
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.errors import Cancelled, ModelServerError, UnsupportedModelError, UsageError
from ragblend.kvstore.fingerprint import ModelFingerprint

QUERY_TIMEOUT_S = 120.0  # for a query of the server's properties: one token; the first one takes up to 30 s


@dataclass(frozen=True)
class ServerInfo:
    """The properties of a server.

    name: of the model, in requests; window: in tokens; fingerprint: of its KV; method, ratio: its defaults for prompts;
    refusal: why it fuses nothing, None if it does; has_logprobs: whether it returns enough of them to check figures.
    """

    name: str
    window: int
    fingerprint: ModelFingerprint | None = None
    method: str = ""
    ratio: float = 0.0
    refusal: str | None = None
    has_logprobs: bool = False


class ServerRuntime(RuntimeBase):
    """The local parts of an engine on a vLLM server. Reads no weights, and uses no memory for KV."""

    def __init__(self, config: EngineConfig, home: Path) -> None:
        super().__init__(config, home)
        assert config.url is not None
        self.server, self._query_lock = Completions(config.url), threading.Lock()
        self._info: ServerInfo | None = None

    @property
    def info(self) -> ServerInfo:
        return self.ensure_connected()

    def ensure_connected(self, cancel: Cancel | None = None) -> ServerInfo:
        """The server's properties, queried on first use by one thread while others wait.

        Raises ModelServerError if another model is served or nothing answers, and Cancelled.
        """
        while (known := self._info) is None:
            if cancel is not None and cancel.is_set():
                raise Cancelled("the request was cancelled while the server was being queried")
            if self._query_lock.acquire(timeout=POLL_S):
                try:
                    self._info = self._info or self._query_server(cancel)
                finally:
                    self._query_lock.release()
        return known

    def _query_server(self, cancel: Cancel | None) -> ServerInfo:
        try:
            found = self._query_properties(cancel)
        except (KeyError, TypeError, AttributeError) as error:  # JSON of another kind
            raise ModelServerError(
                f"the server at {self.server.url} is not a vLLM of a known version ({type(error).__name__}: {error})"
            ) from error
        if found.refusal is not None:
            log.warning("prompts are computed by vLLM alone: %s", found.refusal)
        return found

    def _query_properties(self, cancel: Cancel | None) -> ServerInfo:
        card = self._card(self.server.fetch("/v1/models", None, cancel, silence_s=CONNECT_S))
        self._check_tokenizer(card["id"], cancel)
        found = ServerInfo(str(card["id"]), int(card["max_model_len"]))
        report = self.report_of(found.name, "", cancel, silence_s=QUERY_TIMEOUT_S)
        if report is None:
            refusal = f"the vLLM at {self.server.url} has no connector of RAGBlend, or it could not start (see its log)"
            return replace(found, refusal=refusal)
        model = report["model"] | {"geometry": Geometry(**report["model"]["geometry"])}
        properties = {name: report[name] for name in ("method", "ratio", "refusal")}
        has_logprobs = self._has_logprobs(found.name, cancel)
        return replace(found, fingerprint=ModelFingerprint(**model), has_logprobs=has_logprobs, **properties)

    def _has_logprobs(self, name: str, cancel: Cancel | None) -> bool:
        """Whether the server's limit (`--max-logprobs`) allows as many as checking figures takes."""
        body = {"model": name, "prompt": [0], "max_tokens": 1, "logprobs": LIKELY_TOKENS}
        try:
            self.server.fetch("/v1/completions", body, cancel, silence_s=QUERY_TIMEOUT_S)
        except UsageError as error:
            log.warning("figures in answers are not checked against their passages: %s", error)
            return False
        return True

    def report_of(
        self,
        name: str,
        label: str,
        cancel: Cancel | None = None,
        session: str | None = None,
        silence_s: float = SILENCE_S,
    ) -> dict[str, Any] | None:
        """The connector's report on itself and on the request with that label; None if there is no connector."""
        body = {"model": name, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"report": label}}
        answer = self.server.fetch("/v1/completions", body, cancel, session, silence_s)
        found: dict[str, Any] | None = (answer.get("kv_transfer_params") or {}).get("ragblend")
        return found

    def forget_server(self) -> None:
        """Query the server again on the next use, because it may have been replaced. Running requests continue."""
        self._info = None

    def close(self) -> None:
        super().close()
        self.forget_server()

    @property
    def gate(self) -> GateVerdict:
        return GateVerdict(self.info.refusal is None, reason=self.info.refusal)

    @property
    def fingerprint(self) -> ModelFingerprint:
        if self.info.fingerprint is None:
            raise UnsupportedModelError(f"no KV can be stored: {self.info.refusal}")
        return self.info.fingerprint

    @property
    def model_name(self) -> str:
        return self.info.name

    @property
    def context_window(self) -> int:
        return self.info.window

    @property
    def needs_conversion(self) -> bool:
        return False

    def refusal(self, tokens: int) -> str | None:
        return self.info.refusal

    def _card(self, cards: Any) -> dict[str, Any]:
        """The server's description of the configured model."""
        wanted, served = self.config.model, [dict(card) for card in cards["data"] if "max_model_len" in card]
        for card in served:
            if wanted == card["id"] or _is_named(wanted, str(card.get("root"))):
                return card
        names = " and ".join(f"{card['id']} ({card.get('root')})" for card in served)
        raise ModelServerError(
            f"the server at {self.server.url} has {names or 'no model'}, and {wanted} was asked for; name the one that "
            f"it has (--model, model=...), or start it with {wanted}"
        )

    def _check_tokenizer(self, name: str, cancel: Cancel | None) -> None:
        body = {"model": name, "prompt": GATE_TEXT, "add_special_tokens": False}
        answer = self.server.fetch("/tokenize", body, cancel, silence_s=QUERY_TIMEOUT_S)
        if answer["tokens"] != self.tokenizing.literal_ids(GATE_TEXT):
            raise ModelServerError(
                f"the tokenizer of {name} at {self.server.url} differs from that of {self.config.model} here, so token "
                "ids would mean something else there"
            )


def _is_named(wanted: str, root: str) -> bool:
    """Whether a served checkpoint is the wanted one, judged by names; a GGUF is served converted."""
    served = Path(root).name
    if wanted == DEFAULT or wanted.endswith(".gguf"):
        return served.startswith(f"{find_model(wanted).stem}-")
    return root == wanted or served == Path(wanted).name
