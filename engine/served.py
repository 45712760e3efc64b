"""An engine whose model a vLLM server has: prompts are tokenized here, read and answered there, and streamed back.

The home is the server's, or a copy of its passages' names: KV is encoded and stored by the server (its connector is
`integrations/vllm`), and found, counted and deleted here where both have one home. What a request cannot have from a
server (logits, `keep_tokens`) is refused by name. A server without the connector answers too, and fuses nothing.
"""

import hashlib
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ragblend.engine.completions import POLL_S, SILENCE_S, Completions, Stopped
from ragblend.engine.config import (
    DEFAULT_METHOD,
    DEFAULT_RATIO,
    DecodeOptions,
    EngineConfig,
    Report,
    Timings,
    TokenCounts,
)
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.decoding.loop import AnswerTimer, OnText, figures_not_in_prompt
from ragblend.engine.decoding.text import TextStream, decode_text
from ragblend.engine.engine import Engine
from ragblend.engine.model.checkpoints import DEFAULT, find_model
from ragblend.engine.model.gate import TEXT, GateVerdict
from ragblend.engine.nodes import Leave, Nodes, Progress, TokenIds
from ragblend.engine.prefill import Request
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.results import Missing, Prefilled, Result, TokenLogprob
from ragblend.engine.runtime import Runtime, log
from ragblend.engine.scheduling.speculation import Speculation
from ragblend.engine.selection import Policy
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.errors import Cancelled, ModelServerError, UnsupportedModelError, UsageError
from ragblend.kvstore.keys import ChunkKey, ModelFingerprint, pack_tokens
from ragblend.kvstore.memory import MemoryTier

INTRODUCTION_S = 30.0  # of silence while a server is asked what it is: a token, which may stand behind others
# vLLM takes what a checkpoint's generation config says of these unless the request says otherwise.
UNKNOWN = "the answer is whole, but which of its passages were reused is unknown and counted as none"
_PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class About:
    """A server. name: of its model, in requests; window: in tokens; fingerprint: of its KV; method, ratio: how it reads
    prompts of which nothing else is said; refusal: why it fuses nothing, None if it does.
    """

    name: str
    window: int
    fingerprint: ModelFingerprint | None = None
    method: str = ""
    ratio: float = 0.0
    refusal: str | None = None


class ServedRuntime(Runtime):
    """The parts of an engine whose model is elsewhere: tokenizer, store and nodes are here. No weights are read."""

    def __init__(self, config: EngineConfig, home: Path) -> None:
        super().__init__(config, home)
        assert config.url is not None
        self.server, self._asking = Completions(config.url), threading.Lock()
        self._about: About | None = None

    def _tiers(self) -> list[MemoryTier]:
        return []  # no KV is read here; and asking a device what is free takes some hundred MB of it

    @property
    def about(self) -> About:
        """As `introduced` has it."""
        return self.introduced()

    def introduced(self, stopped: Stopped | None = None) -> About:
        """What the server is: asked once, at the first need, by one while others wait.

        Whoever needs only what is here does not wait for it. Raises ModelServerError where another model is served, or
        nothing answers, and Cancelled when stopped() says so.
        """
        while (known := self._about) is None:
            if stopped is not None and stopped():
                raise Cancelled("the request was cancelled before it was known what the server is")
            if self._asking.acquire(timeout=POLL_S):
                try:
                    self._about = self._about or self._asked(stopped)
                finally:
                    self._asking.release()
        return known

    def _asked(self, stopped: Stopped | None) -> About:
        try:
            found = self._introduction(stopped)
        except (KeyError, TypeError, AttributeError) as error:  # JSON of another kind
            raise ModelServerError(
                f"what answers at {self.server.url} is no vLLM that is known here ({type(error).__name__}: {error})"
            ) from error
        if found.refusal is not None:
            log.warning("prompts are computed by vLLM alone: %s", found.refusal)
        return found

    def _introduction(self, stopped: Stopped | None) -> About:
        card = self._card(self.server.get("/v1/models", stopped))
        self._check_tokenizer(card["id"], stopped)
        found = About(str(card["id"]), int(card["max_model_len"]))
        told = self.report_of(found.name, "", stopped, silence_s=INTRODUCTION_S)
        if told is None:
            none = f"the vLLM at {self.server.url} has no connector of RAGBlend, or one that cannot begin (see its log)"
            return replace(found, refusal=none)
        model = told["model"] | {"geometry": Geometry(**told["model"]["geometry"])}
        how = {name: told[name] for name in ("method", "ratio", "refusal")}
        return replace(found, fingerprint=ModelFingerprint(**model), **how)

    def report_of(
        self,
        name: str,
        label: str,
        stopped: Stopped | None = None,
        session: str | None = None,
        silence_s: float = SILENCE_S,
    ) -> dict[str, Any] | None:
        """What the connector says of itself, and of the request with that label; None where there is no connector."""
        body = {"model": name, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"report": label}}
        said = self.server.post("/v1/completions", body, stopped, session, silence_s)
        found: dict[str, Any] | None = (said.get("kv_transfer_params") or {}).get("ragblend")
        return found

    def forget_server(self) -> None:
        """Ask it anew what it is, the next time: another may be there. Whoever asks just now is not waited for."""
        self._about = None

    def close(self) -> None:
        super().close()
        self.forget_server()

    @property
    def gate(self) -> GateVerdict:
        return GateVerdict(self.about.refusal is None, reason=self.about.refusal)

    @property
    def fingerprint(self) -> ModelFingerprint:
        if self.about.fingerprint is None:
            raise UnsupportedModelError(f"no KV can be stored: {self.about.refusal}")
        return self.about.fingerprint

    @property
    def model_name(self) -> str:
        return self.about.name

    @property
    def context_window(self) -> int:
        return self.about.window

    @property
    def needs_conversion(self) -> bool:
        return False

    @property
    def profile(self) -> DeviceProfile | None:
        return None

    def refusal(self, tokens: int) -> str | None:
        return self.about.refusal

    def _card(self, cards: Any) -> dict[str, Any]:
        """That of the model that was asked for."""
        wanted, served = self.config.model, [dict(card) for card in cards["data"] if "max_model_len" in card]
        for card in served:
            if wanted == card["id"] or _is_named(wanted, str(card.get("root"))):
                return card
        names = " and ".join(f"{card['id']} ({card.get('root')})" for card in served)
        raise ModelServerError(
            f"the server at {self.server.url} has {names or 'no model'}, and {wanted} was asked for; name the one that "
            "it has (--model, model=...), or start it with the other"
        )

    def _check_tokenizer(self, name: str, stopped: Stopped | None) -> None:
        body = {"model": name, "prompt": TEXT, "add_special_tokens": False}
        said = self.server.post("/tokenize", body, stopped, silence_s=INTRODUCTION_S)
        if said["tokens"] != self.tokenizing.literal_ids(TEXT):
            raise ModelServerError(
                f"the tokenizer of {name} at {self.server.url} is another than that of {self.config.model} here: token "
                "ids would mean something else there"
            )


def _is_named(wanted: str, root: str) -> bool:
    """Whether a served checkpoint is the one that was asked for, as far as names tell; a GGUF is served converted."""
    served = Path(root).name
    if wanted == DEFAULT or wanted.endswith(".gguf"):
        return served.startswith(f"{find_model(wanted).stem}-")
    return root == wanted or served == Path(wanted).name


class ServedNodes(Nodes):
    """Encoded by the server, into the store."""

    _runtime: ServedRuntime

    def encode(
        self,
        passages: Sequence[TokenIds],
        keys: Sequence[ChunkKey | None],
        prefix: TokenIds,
        progress: Progress | None = None,
        node_ids: Sequence[str] | None = None,
    ) -> tuple[int, int]:
        if prefix != self._runtime.canonical_prefix:
            raise UsageError("a server encodes behind the canonical prefix alone; leave `prefix` out")
        return super().encode(passages, keys, prefix, progress, node_ids)

    def _encode_now(self, encoder: object, passage: TokenIds, key: ChunkKey, name: str | None) -> int:
        return self._encoded(passage, key, name)

    def encode_missing(self, node_ids: Sequence[str], leave: Leave) -> Iterator[int]:
        for node_id in node_ids:
            self._runtime.introduced(leave)
            asked = self._to_encode(node_id, self._runtime.canonical_prefix)
            if asked is not None and asked.room_bytes < asked.nbytes:
                return
            yield 0 if asked is None else self._encoded(asked.passage, asked.key, node_id, leave)

    def encode_later(self, chunk: Chunk, due: float) -> None:
        runtime = self._runtime

        def hurried() -> bool:
            return runtime.chores.hurried

        with suppress(Cancelled):  # whoever ends the process does not wait for a server
            runtime.introduced(hurried)
            key = self._key_of(chunk.encoded_ids, runtime.canonical_prefix)
            if key is not None and not self._is_stored(key) and self._claim_named(chunk, key):
                self._encoded(chunk.encoded_ids, key, chunk.node_id, hurried)

    def _encoded(
        self, passage: TokenIds, key: ChunkKey, node_id: str | None, leave: Leave | None = None
    ) -> int:
        """Have the server store it; its tokens, 0 where it did not. Of a node that was deleted meanwhile none stays."""
        runtime, prefix = self._runtime, self._runtime.canonical_prefix
        wish = {
            "spans": [[len(prefix), len(prefix) + len(passage)]],
            "encode": True,
            "method": "reuse",
            "collection": self._collection,
        }
        body = {
            "model": runtime.about.name,
            "prompt": [*prefix, *passage, passage[-1]],  # the last token is in no passage: vLLM computes it
            "max_tokens": 2,  # an answer of one carries no report
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(),  # or vLLM might have all of it, and hand nothing over
            "kv_transfer_params": wish,
        }
        answer = runtime.server.post("/v1/completions", body, leave, _first_of([passage]))
        report = (answer.get("kv_transfer_params") or {}).get("ragblend") or {}
        if "error" in report or report.get("missing_tokens") != 0:
            log.warning(
                "vLLM did not encode a passage of %d tokens: its log says why, or it has `encode_missing` off",
                len(passage),
            )
            return 0
        if node_id is not None:
            with runtime.use.turn(), runtime.nodes.holding(self._scope, node_id, key) as held:
                if not held:
                    runtime.store.delete([key])
                    return 0
        return len(passage)


class VllmEngine(Engine):
    """The same to whoever asks; requests wait at the server, which answers many at once."""

    runtime: ServedRuntime

    def __init__(self, config: EngineConfig, runtime: ServedRuntime) -> None:
        super().__init__(config, runtime)
        self._nodes = ServedNodes(runtime, config.collection)

    @property
    def device(self) -> str:
        return f"vLLM at {self.runtime.server.url}"

    @property
    def dtype(self) -> str:
        known = self.runtime.about.fingerprint
        return "the server's" if known is None else known.geometry.dtype

    @property
    def token_bytes(self) -> int:
        geometry = self.runtime.fingerprint.geometry
        return geometry.layers * self.runtime.codec.layer_nbytes(geometry, 1)

    @property
    def measures_answers(self) -> bool:
        return False

    def missing(self, node_ids: Sequence[str]) -> Missing:
        if self.runtime.about.refusal is not None:
            return Missing(tuple(node_ids), 0, 0, 0)
        return super().missing(node_ids)

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        """The server reads for itself."""

    def prefill(
        self,
        prompt: Prompt,
        method: str | Policy = DEFAULT_METHOD,
        ratio: float | str = DEFAULT_RATIO,
        seed: int = 0,
        cancel: threading.Event | None = None,
    ) -> Prefilled:
        """How the prompt is read, and how long that takes: of logits and cache there are none."""
        request = self._request(prompt, method, ratio, seed, cancel=cancel)
        report = self._answer(request, DecodeOptions(max_new_tokens=1), None, cancel).report
        return Prefilled(request.prompt, torch.empty(0), None, report)

    def decode(self, prefilled: Prefilled, **options: Any) -> Result:
        self._refuse("answering a prompt that was read before")

    def continue_logits(self, prefilled: Prefilled, token_ids: Sequence[int]) -> Tensor:
        self._refuse("comparing logits")

    def profile(self, progress: Progress | None = None) -> DeviceProfile:
        self._refuse("measuring the device")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedModelError(f"{what} cannot be had from {self.device}; load the model here for that")

    # --- inside

    def _meet(self, cancel: threading.Event | None, deadline: float) -> None:
        self.runtime.introduced(_stopped(cancel, deadline))

    def _answer(
        self,
        request: Request,
        options: DecodeOptions,
        on_text: OnText | None,
        cancel: threading.Event | None,
        client: str = "",
        deadline: float = math.inf,
        speculation: Speculation | None = None,
    ) -> Result:
        """client, speculation and session say nothing here: vLLM schedules, and its prefix cache has conversations."""
        runtime, stopped = self.runtime, (cancel or threading.Event()).is_set
        if _stopped(cancel, deadline)():
            raise Cancelled("the answer was cancelled before it began")
        try:
            self._meet(cancel, deadline)  # it was forgotten, where another request failed meanwhile
            result = _Answer(runtime, request, options, on_text).whole(stopped)
        except ModelServerError:
            runtime.forget_server()
            raise
        if result.report.misses:
            for chunk in request.prompt.chunks:
                if chunk.token_ids:
                    ServedNodes(runtime, chunk.collection or request.collection).add_chore(chunk)
        return result


def _stopped(cancel: threading.Event | None, deadline: float) -> Stopped:
    """Whether a request is to be given up that has not begun."""
    return lambda: (cancel is not None and cancel.is_set()) or time.monotonic() >= deadline


class _Answer:
    """One completion on its way."""

    def __init__(
        self, runtime: ServedRuntime, request: Request, options: DecodeOptions, on_text: OnText | None
    ) -> None:
        self._runtime, self._request, self._options, self._on_text = runtime, request, options, on_text
        self._label, self._clock = secrets.token_hex(), AnswerTimer(time.perf_counter())
        self._session = _session_of(request.prompt) or self._label
        self._text = TextStream(runtime.tokenizing.tokenizer, options.stop, options.one_sentence)
        self._ids, self._likely, self._ended = list[int](), list[TokenLogprob](), False

    def whole(self, stopped: Stopped) -> Result:
        """Until it ends, or its text has (a stop string, a sentence): closing the stream stops the server."""
        options, ids = self._options, self._ids
        with closing(self._runtime.server.stream(self._body(), stopped, self._session)) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    self._take(choice)
                if self._text.stopped:
                    break
        if piece := self._text.finish():
            self._say(piece)
        text = decode_text(self._runtime.tokenizing.tokenizer, ids, options.stop, options.one_sentence)
        told = tuple(self._likely[: len(ids) - self._ended]) if options.logprobs is not None else None
        stops = self._text.stopped or self._ended
        prompt = self._request.prompt
        unsupported = figures_not_in_prompt(text, prompt, self._runtime.tokenizing.tokenizer)
        report = replace(self._report(stopped), unsupported_figures=unsupported)
        return Result(text, tuple(ids), report, prompt, stops, told)

    def _report(self, stopped: Stopped) -> Report:
        """With what the connector noted."""
        told = self._told(stopped)
        report = self._clock.report(_report(self._request, told), len(self._ids))
        timings = report.timings
        read_ms = timings.prefill_ms or timings.ttft_ms
        return replace(report, timings=replace(timings, prefill_ms=read_ms))

    def _told(self, stopped: Stopped) -> dict[str, Any]:
        """Streams do not carry it, so it is asked for; a server that fails then takes back no answer."""
        runtime = self._runtime
        try:
            about = runtime.introduced(stopped)
            if about.fingerprint is None:
                return {"warning": about.refusal}
            told = runtime.report_of(about.name, self._label, stopped, self._session)
            report: dict[str, Any] | None = (told or {}).get("report")
            return {"warning": f"{UNKNOWN}: the server knows no such answer"} if report is None else report
        except (ModelServerError, UsageError) as error:
            runtime.forget_server()
            return {"warning": f"{UNKNOWN}: {error}"}

    def _take(self, choice: dict[str, Any]) -> None:
        found = choice.get("token_ids")
        if found is None:
            raise ModelServerError(
                f"the server at {self._runtime.server.url} gives no token ids; it must be a vLLM of 0.10.2 or newer"
            )
        logprobs = choice.get("logprobs")
        for number, token_id in enumerate(found):
            self._clock.tick()
            self._ids.append(token_id)
            if logprobs is not None:
                self._likely.append(_likely(token_id, logprobs, number, self._options.logprobs))
            if piece := self._text.feed(token_id):
                self._say(piece)
            if self._text.stopped:
                return
        self._ended = choice.get("finish_reason") == "stop"

    def _say(self, piece: str) -> None:
        if self._on_text is not None:
            self._on_text(piece)

    def _body(self) -> dict[str, Any]:
        options, ids = self._options, self._request.prompt.token_ids
        if options.keep_tokens is not None or options.repetition_penalty != 1:
            name = "keep_tokens" if options.keep_tokens is not None else "repetition_penalty"
            why = {
                "keep_tokens": "its cache is its own",
                "repetition_penalty": "its penalty counts the passages' words",
            }
            raise UsageError(f"{name} cannot be had from vLLM: {why[name]}; leave it out")
        room = self._runtime.context_window - len(ids)
        body: dict[str, Any] = _PLAIN | {
            "model": self._runtime.about.name,
            "prompt": list(ids),
            "max_tokens": min(options.max_new_tokens, room),
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "seed": options.seed,
            "return_token_ids": True,
        }
        if options.logprobs is not None:
            body |= {"logprobs": options.logprobs, "return_tokens_as_token_ids": True}
        if options.grammar is not None:
            # A directive that only llguidance knows: xgrammar, tried first, would let blanks go on without end.
            body["structured_outputs"] = {"grammar": f"%llguidance {{}}\n{options.grammar.text}"}
        if self._runtime.about.fingerprint is not None:
            body["kv_transfer_params"] = self._wish()
        return body

    def _wish(self) -> dict[str, Any]:
        """Where the passages are, whose, and what of it is not what the server would do anyway.

        Passages of one collection: of those of several, the one with most tokens; others are read in full.
        """
        request, about = self._request, self._runtime.about
        prompt, policy = request.prompt, request.policy
        ratio = DEFAULT_RATIO if request.ratio is None else request.ratio
        places = [
            (chunk.collection or request.collection, list(place))
            for chunk, place in zip(prompt.chunks, prompt.places, strict=True)
            if chunk.token_ids
        ]
        sizes = Counter[str]()
        for collection, (start, stop) in places:
            sizes[collection] += stop - start
        wish: dict[str, Any] = {"label": self._label, "encode": False}
        if policy.name == "full" or not places:
            return wish | {"off": True}
        ((mine, _),) = sizes.most_common(1)
        wish |= {"collection": mine, "spans": [place for collection, place in places if collection == mine]}
        if (policy.name, ratio) != (
            about.method,
            about.ratio,
        ):  # whoever names one gets it where nothing is saved
            wish |= {"method": policy.name, "ratio": ratio}
        return wish


def _session_of(prompt: Prompt) -> str | None:
    """What a router may go by, so that a prompt comes to the server that has its passages warm; None without any.

    MinHash (Broder 1997) of the first passages, those that stand together: of two prompts that share a part s of these
    so many go to one server, and those of a conversation, which keep what they begin with, all do.
    """
    together = list[TokenIds]()
    for segment in prompt.segments:
        if isinstance(segment, Chunk):
            together.append(segment.encoded_ids)
        elif together and segment.text.strip():
            break
    return _first_of(together) if together else None


def _first_of(passages: Sequence[TokenIds]) -> str:
    """The name of the one whose digest is least."""
    return min(hashlib.sha256(pack_tokens(ids)).hexdigest() for ids in passages)[:32]


def _likely(token_id: int, logprobs: dict[str, Any], number: int, count: int | None) -> TokenLogprob:
    """Of one of an event's tokens. vLLM names tokens `token_id:7`, and adds the chosen one to the likely ones."""
    top = ((int(name.rpartition(":")[2]), p) for name, p in logprobs["top_logprobs"][number].items())
    likely = sorted(top, key=lambda each: -each[1])[:count]
    return TokenLogprob(token_id, logprobs["token_logprobs"][number], tuple(likely))


def _report(request: Request, told: dict[str, Any]) -> Report:
    """told: what the connector said. Where it fused nothing, tokens that vLLM had cached count as reused, and a passage
    that begins in them as a hit.
    """
    tokens = len(request.prompt.token_ids)
    if "reused_tokens" not in told:
        cached = int(told.get("cached_tokens", 0))
        hits = sum(start < cached for start, _ in request.prompt.places)
        return Report(
            told.get("method", "full"),
            told.get("ratio"),
            TokenCounts(tokens, reused=cached, fresh=tokens - cached),
            hits=hits,
            misses=int(told.get("misses", 0)),
            warning=told.get("warning") or told.get("error"),
            served="r" * cached + "f" * (tokens - cached),
            computed_fraction=1 - cached / tokens,
        )
    reused, recomputed, missing = (told[f"{name}_tokens"] for name in ("reused", "recomputed", "missing"))
    counts = TokenCounts(tokens, reused, recomputed, tokens - reused - recomputed - missing, missing)
    return Report(
        told["method"],
        told["ratio"],
        counts,
        told["recomputed_fraction"],
        Timings(load_ms=told["load_ms"], stall_ms=told["stall_ms"], prefill_ms=told["fused_ms"]),
        hits=told["hits"],
        misses=told["misses"],
        served="".join(letter * count for letter, count in told["served"]),
        computed_fraction=told["computed_fraction"],
    )
