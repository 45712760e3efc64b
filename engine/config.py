"""Configuration, decode options and reports of the engine: frozen, checked on construction; the home folder."""

import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ragblend.engine.controller import Decision
from ragblend.engine.decoding.grammar import Grammar
from ragblend.engine.trace import Trace
from ragblend.kvstore.errors import SettingsError, StoreError, UsageError, did_you_mean
from ragblend.kvstore.places import Place
from ragblend.kvstore.policy import eviction_policy_named

HOME_VARIABLE = "RAGBLEND_HOME"
SETTINGS_NAME = "settings.toml"  # in the home
VLLM_URL = "http://127.0.0.1:8000"  # the default of `vllm serve`
# The defaults; their measurements are in docs/methods.md.
DEFAULT_METHOD = "probe-shift"
DEFAULT_RATIO = 0.25
LOAD_MODES = ("auto", "all")  # load stored KV where that is faster than computing it, or always
FUSE_MODES = ("auto", "all")  # fuse kinds of models that were measured, or all that pass the self-test


@dataclass(frozen=True)
class EngineConfig:
    """How one engine is opened.

    model: `default`, a hub id, a local folder or a `.gguf` file; device: `cpu`, `cuda`, `mps` or None for the best
    available; dtype: a name or None for one that is fast on the device; collection: a namespace of node ids, and the
    salt of its chunk keys; store, memory and device budgets: bytes of KV on the disk, in host memory and on the device
    (None: a share of the free space, see `kvstore.store` and `device.default_budgets`; on the disk first the home's
    setting); store_policy: the eviction policy of every tier (None: the store's); kv_codec: encoding of new KV, a
    key of `kvstore.codec.CODECS` (None: raw); remote: URL of a store shared between machines, see docs/vllm.md; url: of
    the vLLM server that has the model (None: it is loaded here); load: `auto` computes passages whose KV would take
    longer to load, `all` loads all that is stored (None: unchanged, at first `auto`); fuse: `all` fuses every model
    that passes the self-test, `auto` none of a kind whose answers were never measured (None: `auto`).
    """

    model: str = "default"
    device: str | None = None
    dtype: str | None = None
    collection: str = "default"
    store_budget_bytes: int | None = None
    memory_budget_bytes: int | None = None
    device_budget_bytes: int | None = None
    store_policy: str | None = None
    kv_codec: str | None = None
    remote: str | None = None
    url: str | None = None
    load: str | None = None
    fuse: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise UsageError("no model was named; pass `default`, a hub id, a folder or a .gguf file")
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise UsageError(f"dtype {self.dtype!r} is unknown; pass float32, bfloat16 or float16")
        if self.store_budget_bytes is not None and self.store_budget_bytes <= 0:
            raise UsageError(f"the store's budget must be above 0 bytes, not {self.store_budget_bytes}")
        if min(self.memory_budget_bytes or 0, self.device_budget_bytes or 0) < 0:
            raise UsageError("the budgets of memory and device must not be below 0 bytes")
        if self.store_policy is not None:
            eviction_policy_named(self.store_policy)
        if self.kv_codec is not None:
            from ragblend.kvstore.codec import codec_named  # imported here because it imports torch

            codec_named(self.kv_codec)
        if self.remote is not None:
            Place.of(self.remote)
        for name, value, known in (("load", self.load, LOAD_MODES), ("fuse", self.fuse, FUSE_MODES)):
            if value not in (None, *known):
                raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}")


@dataclass(frozen=True)
class DecodeOptions:
    """Options of decoding an answer; temperature 0 is greedy.

    min_p: drop tokens less likely than this share of the best one's probability (arXiv 2407.01082); 0 is off.
    repetition_penalty: factor that makes the answer's own tokens less likely (CTRL, arXiv 1909.05858), but not the
    prompt's; 1 is off. presence_penalty, frequency_penalty: subtracted from the scores of the answer's own tokens, once
    and for each time (OpenAI's definition); 0 is off. logit_bias: added to these token ids' scores. one_sentence: end
    after the first sentence, or line. keep_tokens: passage tokens that each key head keeps after the first token
    (`eviction.py`); None: all. grammar: constrains the answer (`grammar.py`). logprobs: how many of the most likely
    tokens' log-probabilities to return besides each token's own; None: neither.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop: tuple[str, ...] = ()
    one_sentence: bool = False
    seed: int | None = None
    keep_tokens: int | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.grammar, Grammar | None):
            raise UsageError(
                f"grammar must be a Grammar, as json_grammar() makes it, not {self.grammar!r:.80}"
            )
        for name, declared in self.__dataclass_fields__.items():
            value, kind = getattr(self, name), Real if isinstance(declared.default, float) else Integral
            if name in ("stop", "grammar", "logit_bias") or value is declared.default is None:
                continue
            if not isinstance(value, kind) or not math.isfinite(value):
                raise UsageError(f"{name} must be a {'' if kind is Real else 'whole '}number, not {value!r}")
        for name, is_valid, wanted in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "from -2 to 2"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "from -2 to 2"),
            (
                "keep_tokens",
                self.keep_tokens is None or self.keep_tokens >= 1,
                "at least 1, or None to keep all",
            ),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "from 0 to 20, or None for none"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a number of 64 bits"),
        ):
            if not is_valid:
                raise UsageError(f"{name} must be {wanted}, not {getattr(self, name)}")
        object.__setattr__(self, "logit_bias", _token_biases(self.logit_bias))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Iterable) or not all(isinstance(text, str) for text in stop):
            raise UsageError(f"stop must be a text or several, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(text for text in stop if text))

    @classmethod
    def of(cls, options: dict[str, Any]) -> "DecodeOptions":
        """Options by name. Raises UsageError for a name that does not exist, with the nearest one that does."""
        for name in options:
            if name not in (names := cls.__dataclass_fields__):
                message = f"the option {name!r} is unknown; there are {', '.join(names)}"
                raise UsageError(message + did_you_mean(name, names))
        return cls(**options)


def _token_biases(biases: object) -> dict[int, float]:
    """Biases by token id; JSON has ids as text. Raises UsageError."""
    try:
        found = {int(token): bias + 0.0 for token, bias in biases.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, OverflowError):
        found = {-1: 0.0}  # not valid: raises below
    if not all(token >= 0 and abs(bias) <= 100 for token, bias in found.items()):
        raise UsageError(f"logit_bias must have token ids with numbers from -100 to 100, not {biases!r:.80}")
    return found


@dataclass(frozen=True)
class TokenCounts:
    """How the prompt's tokens were served; reused + recomputed + fresh + missing + not_loaded = prompt.

    recomputed: stored tokens that were computed through the last layer; not_loaded: of stored passages that were
    computed as a whole, because loading them would have taken longer.
    """

    prompt: int = 0
    reused: int = 0
    recomputed: int = 0
    fresh: int = 0
    missing: int = 0
    not_loaded: int = 0
    generated: int = 0


@dataclass(frozen=True)
class Timings:
    """Times in milliseconds. load_ms: of the reading threads; stall_ms: in which computing waited for them; move_ms: of
    rotating keys; select_ms: of choosing rows; probe_ms: of the probe's layers, waits included.
    """

    load_ms: float = 0.0
    stall_ms: float = 0.0
    move_ms: float = 0.0
    select_ms: float = 0.0
    prefill_ms: float = 0.0
    first_token_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    tokens_per_s: float = 0.0
    probe_ms: float = 0.0


@dataclass(frozen=True)
class Report:
    """What one request did.

    ratio: share of the chunk tokens with stored KV that was recomputed, averaged over layers, selection included; None
    for methods without a ratio. recomputed_fraction: the same as a share of all stored tokens, a session's included.
    decision: the loading controller's ratio and predictions; trace: times of every step. Both None if nothing was
    fused. probe_rows: rows of the probe; computed_fraction: all rows computed, probes included, averaged over layers,
    as a share of the prompt (full prefill is 1). served: a letter for each token of the prompt: `r`eused, re`c`omputed,
    `f`resh, `m`issing, `n`ot loaded. evicted_tokens: how many each key head lost after the first token.
    unsupported_figures: figures of the answer that are not in the prompt, if it has chunks (`figures.py`).
    read_again_at: after how many tokens of the answer the prompt was prefilled in full, for an uncertain figure.
    """

    method: str
    ratio: float | None
    tokens: TokenCounts = field(default_factory=TokenCounts)
    recomputed_fraction: float = 0.0
    timings: Timings = field(default_factory=Timings)
    hits: int = 0
    misses: int = 0
    warning: str | None = None
    decision: Decision | None = None
    trace: Trace | None = None
    probe_rows: int = 0
    computed_fraction: float = 1.0
    served: str = ""
    evicted_tokens: int = 0
    unsupported_figures: tuple[str, ...] = ()
    read_again_at: int | None = None


def server_url(backend: str | None, url: str | None) -> str | None:
    """The url of the vLLM server that has the model, without `/v1`; None if it is loaded here. Raises UsageError."""
    if backend not in (None, "vllm"):
        raise UsageError(f"the backend {backend!r} is unknown; pass `vllm`, or none to load the model here")
    if backend is None and url is None:
        return None
    found = str(url or VLLM_URL).rstrip("/").removesuffix("/v1")
    if not is_server_url(found):
        shown = "a url with a password" if "@" in found else repr(url)
        raise UsageError(f"{shown} is no address of a vLLM server; it looks like {VLLM_URL}")
    return found


def is_server_url(url: str) -> bool:
    """Whether it is an http or https URL with a host, and without a password, which messages would show."""
    with suppress(ValueError):  # an invalid port
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0 and not parts.query
        return parts.scheme in ("http", "https") and has_host and "@" not in parts.netloc
    return False


def resolve_home(home: str | Path | None) -> Path:
    """The folder given, or RAGBLEND_HOME, or the user's data folder; created if absent (0700). Raises StoreError."""
    folder = Path(os.path.realpath(os.path.expanduser(default_home() if home is None else home)))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(
            f"the home folder {folder} cannot be made: {error.strerror}; pass another with --home or {HOME_VARIABLE}"
        ) from error
    return folder


def read_settings(path: Path) -> dict[str, Any]:
    """The values in a settings file, unchecked; empty if there is none. Raises SettingsError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"Reading the settings in {path}: {error}. Correct the file or remove it."
        ) from error


def store_budget_of(home: Path) -> int | None:
    """`store_budget_bytes` in the home's settings, for every process that opens its store. Raises SettingsError."""
    path = home / SETTINGS_NAME
    budget: object = read_settings(path).get("store_budget_bytes")
    if budget is None or (type(budget) is int and budget >= 1):
        return budget
    raise SettingsError(
        f"Reading the settings in {path}: store_budget_bytes is {budget!r}, but must be a whole number, at least 1."
    )


def default_home() -> str:
    """RAGBLEND_HOME, or else the user's data folder."""
    from platformdirs import user_data_dir

    return os.environ.get(HOME_VARIABLE) or user_data_dir("ragblend", appauthor=False)
