"""Settings: `settings.toml` in the home, then `RAGBLEND_*` in the environment, then the command line.

Where none of them names a method, what `ragblend tune` chose for the model comes before the default.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ragblend.app.tuned import choice_for, tuned_file
from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.engine.controller import USD_PER_GB_MONTH
from ragblend.kvstore.errors import SettingsError
from ragblend.kvstore.policy import DEFAULT_POLICY, POLICIES

PREFIX = "RAGBLEND_"
NOT_SETTINGS = {"HOME"}  # RAGBLEND_HOME says where the settings are, so it cannot be one of them


KV_CODECS = ("raw", "int8")  # `kvstore.codec.CODECS`, whose module needs torch


@dataclass(frozen=True)
class Settings:
    """What a user may choose. `None` means that the engine decides (device, dtype) or has a default (system).

    chunk_tokens is in tokens of the *model*, because its KV is what is stored and fused. chunk_overlap is 0:
    text that is in two chunks would be encoded and stored twice, and would appear twice in the fused prompt.
    store_budget_bytes bounds the KV on the disk (None: a quarter of what is free there), memory_budget_bytes and
    device_budget_bytes the copies of what is used, in host memory and on an accelerator (None: a quarter and a tenth of
    what is free before an accelerator, 0 on the CPU); store_policy says what each of them evicts by. kv_codec `int8`
    halves the bytes of what is stored from then on, at a small loss. What a GB costs a month on each tier says which
    one is the cheapest that adds no delay (`controller` in the answer's JSON).
    ratio may be `auto`: what loading hides on this device, 0.15 at least (`ragblend doctor --profile` measures it).
    repetition_penalty: of the answer's own tokens; at temperature 0 small models go round in circles without one.
    keep_tokens: so many tokens of the passages are kept by each head once the first token is out, for long answers in
    little memory (`ask` and `chat`; None: all).
    """

    model: str = "default"
    device: str | None = None
    dtype: str | None = None
    collection: str = "default"
    method: str = DEFAULT_METHOD
    ratio: float | str = DEFAULT_RATIO
    top_k: int = 6
    chunk_tokens: int = 512
    chunk_overlap: int = 0
    store_budget_bytes: int | None = None
    memory_budget_bytes: int | None = None
    device_budget_bytes: int | None = None
    store_policy: str = DEFAULT_POLICY
    kv_codec: str = "raw"
    device_usd_per_gb_month: float = USD_PER_GB_MONTH["device"]
    memory_usd_per_gb_month: float = USD_PER_GB_MONTH["memory"]
    disk_usd_per_gb_month: float = USD_PER_GB_MONTH["disk"]
    max_new_tokens: int = 256
    keep_tokens: int | None = None
    temperature: float = 0.0
    repetition_penalty: float = 1.1
    system: str | None = None

    def __post_init__(self) -> None:
        _require(
            bool(self.model), "model", self.model, "a model: default, a hub id, a folder or a .gguf file"
        )
        _require(bool(COLLECTION.fullmatch(self.collection)), "collection", self.collection, COLLECTION_RULE)
        fits = self.ratio == "auto" if isinstance(self.ratio, str) else 0 <= self.ratio <= 1
        _require(fits, "ratio", self.ratio, "a share between 0 and 1, such as 0.15, or auto")
        _require(1 <= self.top_k <= 1000, "top_k", self.top_k, "a number of passages from 1 to 1000")
        _require(16 <= self.chunk_tokens <= 8192, "chunk_tokens", self.chunk_tokens, "16 to 8192 tokens")
        _require(
            0 <= self.chunk_overlap < self.chunk_tokens,
            "chunk_overlap",
            self.chunk_overlap,
            f"fewer tokens than chunk_tokens ({self.chunk_tokens})",
        )
        for key, least in (("store", 1), ("memory", 0), ("device", 0)):
            name = f"{key}_budget_bytes"
            budget = getattr(self, name)
            _require(budget is None or budget >= least, name, budget, f"{least} bytes or more")
        for name, price in self.usd_per_gb_month.items():
            _require(price >= 0, f"{name}_usd_per_gb_month", price, "a price of 0 USD or more")
        _require(
            self.store_policy in POLICIES, "store_policy", self.store_policy, f"one of {', '.join(POLICIES)}"
        )
        _require(self.kv_codec in KV_CODECS, "kv_codec", self.kv_codec, f"one of {', '.join(KV_CODECS)}")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(
            self.keep_tokens is None or self.keep_tokens >= 1, "keep_tokens", self.keep_tokens, "at least 1"
        )
        _require(0 <= self.temperature <= 10, "temperature", self.temperature, "a number from 0 to 10")
        _require(
            0 < self.repetition_penalty <= 10,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0 and at most 10 (1 is off)",
        )

    @property
    def answering(self) -> dict[str, Any]:
        """What the engine is told of how to read a prompt and to answer it, whoever asks."""
        names = ("method", "ratio", "max_new_tokens", "temperature", "repetition_penalty")
        return {name: getattr(self, name) for name in names}

    @property
    def usd_per_gb_month(self) -> dict[str, float]:
        """What a GB costs for a month, by tier."""
        return {name: getattr(self, f"{name}_usd_per_gb_month") for name in USD_PER_GB_MONTH}

    @classmethod
    def load(
        cls,
        path: Path,
        environment: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> "Settings":
        """Merge the file, the environment and what the caller gives (None = not given). Raises SettingsError."""
        values = _from_file(path)
        values |= _from_environment(os.environ if environment is None else environment)
        given = {key: value for key, value in (overrides or {}).items() if value is not None}
        model = given.get("model") or values.get("model") or cls.model
        return cls(**(_tuned(path, str(model), values.keys() | given.keys()) | values)).changed(given)

    def changed(self, overrides: Mapping[str, Any]) -> "Settings":
        """These settings with others instead (None = leave it). Raises SettingsError."""
        given = {key: value for key, value in overrides.items() if value is not None}
        return replace(self, **_checked(given, "what was asked for"))


COLLECTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")
COLLECTION_RULE = "a name of at most 62 letters, digits, dots, hyphens and underscores"
TYPES: dict[str, type] = {
    field.name: next(kind for kind in (int, float, str) if kind.__name__ in str(field.type))
    for field in fields(Settings)
}


WORDS = {"ratio": ("auto",)}  # what a setting that is a number may be instead


def _tuned(path: Path, model: str, given: Set[str]) -> dict[str, Any]:
    """What was chosen for the model, unless a method is given: a ratio belongs to the method it was measured with."""
    if "method" in given:
        return {}
    choice = choice_for(tuned_file(path), model)
    if choice is None:
        return {}
    return {"method": choice.method} | ({} if choice.ratio is None else {"ratio": choice.ratio})


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return _checked(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(
            f"Reading the settings in {path}: {error}. Correct the file or remove it."
        ) from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {key.removeprefix(PREFIX): text for key, text in environment.items() if key.startswith(PREFIX)}
    texts = {key.lower(): text for key, text in found.items() if key not in NOT_SETTINGS}
    source = f"the environment ({PREFIX}*)"
    _refuse_unknown(texts, source)
    return _checked({key: _parsed(key, text, source) for key, text in texts.items()}, source)


def _parsed(key: str, text: str, source: str) -> Any:
    try:
        return text if text in WORDS.get(key, ()) else TYPES[key](text)
    except ValueError as error:
        raise SettingsError(_wrong_type(key, text, source)) from error


def _checked(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    _refuse_unknown(values, source)
    return {key: _typed(key, value, source) for key, value in values.items()}


def _typed(key: str, value: Any, source: str) -> Any:
    kind = TYPES[key]
    if value in WORDS.get(key, ()):
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise SettingsError(_wrong_type(key, value, source))
    return value


def _refuse_unknown(values: Mapping[str, Any], source: str) -> None:
    for key in values:
        if key not in TYPES:
            nearest = difflib.get_close_matches(key, TYPES, n=1, cutoff=0.0)[0]
            raise SettingsError(
                f"Reading the settings in {source}: unknown key {key!r}. The nearest setting is {nearest!r}; "
                f"known settings are {', '.join(TYPES)}."
            )


def _wrong_type(key: str, value: object, source: str) -> str:
    kinds = {int: "a whole number", float: "a number", str: "a text in quotes"}
    return f"Reading the settings in {source}: {key} is {value!r}, but must be {kinds[TYPES[key]]}."


def _require(holds: bool, key: str, value: object, expected: str) -> None:
    if not holds:
        raise SettingsError(f"The setting {key} is {value!r}, but must be {expected}.")
