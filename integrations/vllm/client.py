"""Client of a vLLM server, as an engine: prompts are tokenized here, and answered by the server, which streams back.

Unsupported operations (logits, `keep_tokens`) raise named errors. It imports neither vLLM nor the connector.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO, DecodeOptions, EngineConfig
from ragblend.engine.interface import NO_PROMPT, EngineInterface
from ragblend.engine.nodes import NodeEncoder, TokenIds
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.request import Request
from ragblend.engine.results import Missing, OnText, Prefilled, Result
from ragblend.engine.runtime_base import log
from ragblend.engine.scheduling.queue import CallbackCancel, Cancel, DeviceQueue
from ragblend.engine.selection import Policy
from ragblend.integrations.vllm.completion import Completion, session_of_passages
from ragblend.integrations.vllm.server import ServerRuntime
from ragblend.kvstore.errors import Cancelled, ModelServerError, UsageError
from ragblend.kvstore.keys import ChunkKey


def cancel_or_deadline(cancel: Cancel | None, deadline: float) -> Cancel:
    """A cancel token that is set once `cancel` is, or the deadline (by `time.monotonic`) has passed."""
    return CallbackCancel(lambda: (cancel is not None and cancel.is_set()) or time.monotonic() >= deadline)


class ServerNodeEncoder(NodeEncoder):
    """Encodes nodes by requests to the server, which stores their KV."""

    _runtime: ServerRuntime

    def _encoder_after(self, prefix: TokenIds) -> Callable[[TokenIds, ChunkKey, str | None], int]:
        if prefix != self._runtime.canonical_prefix:
            raise UsageError("a server encodes only after the canonical prefix; leave `prefix` out")
        return self._encode

    def encode_missing(self, node_ids: Sequence[str], cancel: Cancel | None) -> Iterator[int]:
        for node_id in node_ids:
            self._runtime.ensure_connected(cancel)
            node = self._unencoded(node_id)
            if node is not None and not node.fits:
                return
            yield 0 if node is None else self._encode(node.passage, node.key, node_id, cancel)

    def encode_in_background(self, chunk: Chunk, due: float) -> None:
        runtime = self._runtime
        is_closing = CallbackCancel(lambda: runtime.background.stopping)
        with suppress(Cancelled):  # an exiting process does not wait for a server
            runtime.ensure_connected(is_closing)
            passage, node_id = chunk.encoded_ids, chunk.node_id
            key = self._key_of(passage, runtime.canonical_prefix)
            if key is not None and not self._is_stored(key) and self.claim(node_id, passage, key):
                self._encode(passage, key, node_id, is_closing)

    def _encode(
        self, passage: TokenIds, key: ChunkKey, node_id: str | None, cancel: Cancel | None = None
    ) -> int:
        """Let the server encode a passage; returns the tokens stored, 0 if none.

        If its node was deleted meanwhile, its KV is deleted.
        """
        runtime, prefix = self._runtime, self._runtime.canonical_prefix
        options = {
            "spans": [[len(prefix), len(prefix) + len(passage)]],
            "encode": True,
            "method": "reuse",
            "collection": self._collection,
        }
        body = {
            "model": runtime.info.name,
            "prompt": [*prefix, *passage, passage[-1]],  # vLLM computes the last token
            "max_tokens": 2,  # two, because an answer of one token carries no report
            "ignore_eos": True,
            "kv_transfer_params": options,
        }
        try:
            answer = runtime.server.fetch("/v1/completions", body, cancel, session_of_passages([passage]))
        finally:  # even after an error the server may have stored it
            is_deleted = node_id is not None and self._delete_if_orphaned(node_id, key)
        report = (answer.get("kv_transfer_params") or {}).get("ragblend") or {}
        if "error" in report or report.get("missing_tokens") != 0:
            log.warning(
                "vLLM did not encode a passage of %d tokens: its log says why, or its `encode_missing` is off",
                len(passage),
            )
            return 0
        return 0 if is_deleted else len(passage)

    def _delete_if_orphaned(self, node_id: str, key: ChunkKey) -> bool:
        """Delete KV whose node was deleted while the server computed it, here and in the shared store."""
        runtime = self._runtime
        with runtime.store_lock:
            if runtime.nodes.has(self._scope, node_id, key):
                return False
            runtime.nodes.add_to_outbox(key)
        self._delete_orphaned_kv()
        return True


class VllmEngine(EngineInterface):
    """Encodes chunks and answers prompts on a vLLM server, which answers many at once.

    A request's client and session have no effect: vLLM schedules, and its prefix cache holds conversations.
    """

    runtime_type: ClassVar[type[ServerRuntime]] = ServerRuntime
    runtime: ServerRuntime

    def __init__(self, config: EngineConfig, runtime: ServerRuntime) -> None:
        super().__init__(config, runtime)
        self._nodes = ServerNodeEncoder(runtime, config.collection)

    @property
    def device(self) -> str:
        return f"vLLM at {self.runtime.server.url}"

    @property
    def dtype(self) -> str:
        known = self.runtime.info.fingerprint
        return "the server's" if known is None else known.geometry.dtype

    @property
    def token_bytes(self) -> int:
        return round(self.runtime.codec.token_nbytes(self.runtime.fingerprint.geometry))

    @property
    def queues(self) -> tuple[DeviceQueue, ...]:
        """Empty: the device belongs to the server."""
        return ()

    @property
    def needs_measurement(self) -> bool:
        return False

    def missing(self, node_ids: Sequence[str]) -> Missing:
        if self.runtime.info.refusal is not None:
            return Missing(tuple(node_ids), 0, 0, 0)
        return super().missing(node_ids)

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        """Does nothing: the server reads its own store."""

    def prefill(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        seed: int = 0,
        cancel: Cancel | None = None,
    ) -> Prefilled:
        """The report of the prefill, without logits and cache, which a server does not return."""
        options = DecodeOptions(max_new_tokens=1, seed=seed)
        request = self._request(prompt, method, ratio, options, cancel=cancel)
        request = replace(
            request, policy=replace(request.policy, sure=0.0)
        )  # no answer, so no figures to check
        report = self._answer(request, DecodeOptions(max_new_tokens=1), None, cancel).report
        return Prefilled(request.prompt, torch.empty(0), None, report)

    # --- internals

    def _connect(self, cancel: Cancel | None, deadline: float) -> None:
        self.runtime.ensure_connected(cancel_or_deadline(cancel, deadline))

    def _answer_function(
        self, request: Request, options: DecodeOptions
    ) -> Callable[[OnText | None, Cancel | None], Result]:
        return partial(self._answer, request, options)

    def _answer_last(
        self, requests: Iterator[Request], options: DecodeOptions, on_text: OnText, cancel: Cancel
    ) -> Result:
        found = list(requests)
        if not found:
            raise UsageError(NO_PROMPT)
        return self._answer(found[-1], options, on_text, cancel)

    def _answer(
        self, request: Request, options: DecodeOptions, on_text: OnText | None, cancel: Cancel | None
    ) -> Result:
        runtime, cancel_before_start = self.runtime, cancel_or_deadline(cancel, request.deadline)
        if cancel_before_start.is_set():
            raise Cancelled("the answer was cancelled before it began")
        try:
            runtime.ensure_connected(cancel_before_start)  # again, if another request has failed meanwhile
            result = Completion(runtime, request, options, on_text, cancel or threading.Event()).result()
        except ModelServerError:
            runtime.forget_server()
            raise
        if result.report.misses:
            for chunk in request.prompt.chunks:
                if chunk.token_ids:
                    ServerNodeEncoder(runtime, request.collection_of(chunk)).queue_encoding(chunk)
        return result
