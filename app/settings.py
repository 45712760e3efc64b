"""Settings: `settings.toml` in the home, then `RAGBLEND_*` in the environment, then the command line.

Where none of them names a method, the choice of `ragblend tune` for the model takes precedence over the default.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ragblend.app.tuned import choice_for, tuned_file
from ragblend.engine.config import (
    DEFAULT_METHOD,
    DEFAULT_RATIO,
    FUSE_MODES,
    LOAD_MODES,
    VLLM_URL,
    is_server_url,
    read_settings,
)
from ragblend.kvstore.errors import SettingsError, UsageError
from ragblend.kvstore.files import replace_durably
from ragblend.kvstore.places import SALT_VARIABLE, Place
from ragblend.kvstore.policy import DEFAULT_POLICY, EVICTION_POLICIES, PrefillProfile

PREFIX = "RAGBLEND_"
# RAGBLEND_HOME says where the settings are, so it is not one of them; secrets are never read from the file.
NOT_SETTINGS = {"HOME", SALT_VARIABLE.removeprefix(PREFIX)}


@dataclass(frozen=True)
class AnswerStyle:
    """A model's defaults for answers. note: shown to the user."""

    max_new_tokens: int = 256
    one_sentence: bool = False
    note: str = ""


# By a part of the model's name, in lower case.
ANSWER_STYLES = {
    "smollm2-135m-instruct": AnswerStyle(
        48,
        True,
        "The offline demo model is small (135M parameters): it finds, it does not reason. Its answers end "
        "with their first sentence, because most of what it says after that is invented.",
    )
}
BUNDLED = "smollm2-135m-instruct"  # the model named `default`
SEARCHES = ("hybrid", "vectors")
# What RapidOCR calls the models that recognise text. Its own package has the first: Chinese, Japanese, Latin letters.
OCR_LANGUAGES = {
    "default": "ch", "arabic": "arabic", "cyrillic": "cyrillic", "devanagari": "devanagari", "east-slavic": "eslav",
    "greek": "el", "korean": "korean", "tamil": "ta", "telugu": "te", "thai": "th",
}  # fmt: skip
KV_CODECS = ("raw", "int8", "int4")  # `kvstore.codec.CODECS`, whose module needs torch


@dataclass(frozen=True)
class Settings:
    """The user's settings. `None` means that the engine decides (device, dtype) or has a default (system).

    chunk_tokens is in tokens of the *model*, because its KV is what is stored and fused.
    store_budget_bytes limits the KV on disk (None: a quarter of free space and stored KV together), memory_budget_bytes
    and device_budget_bytes the copies in host memory and on an accelerator (None: with an accelerator a quarter and a
    tenth of the free memory, 0 on the CPU); store_policy is the eviction policy of all tiers; remote is the URL of a
    store that machines share. kv_codec `int8` and `int4` take a half and a third of the bytes for new KV, at a small
    loss. load `auto` computes stored passages that would take longer to load, `all` loads all that is stored.
    fuse `auto` fuses kinds of models whose answers were measured, `all` every model that passes the self-test.
    search `hybrid` finds passages by meaning and by words, `vectors` by meaning alone; reranker: the hub id or the
    folder of a cross-encoder that ranks the best of them (None or "": none).
    ocr_language: of scanned pages (`OCR_LANGUAGES`); `default`: Chinese, Japanese, and languages in Latin letters.
    embedder: `default` (bundled), the hub id or the folder of a model of sentence-transformers (None: each collection
    keeps its own, a new one has the bundled one).
    ratio may be `auto`: as much as this device recomputes while it loads the stored KV, at least 0.25.
    repetition_penalty: of the answer's own tokens; at temperature 0 small models repeat themselves without one.
    max_new_tokens None: the model's default (`ANSWER_STYLES`, else 256).
    keep_tokens: how many passage tokens each head keeps after the first token, for long answers in little memory
    (None: all).
    skip: patterns of file names to leave out when a folder is ingested or watched, separated by commas.
    vllm: the address of a vLLM server that has the model (None: it is loaded here).
    """

    model: str = "default"
    device: str | None = None
    dtype: str | None = None
    collection: str = "default"
    method: str = DEFAULT_METHOD
    ratio: float | str = DEFAULT_RATIO
    top_k: int = 6
    embedder: str | None = None
    search: str = "hybrid"
    reranker: str | None = None
    ocr_language: str = "default"
    chunk_tokens: int = 512
    store_budget_bytes: int | None = None
    memory_budget_bytes: int | None = None
    device_budget_bytes: int | None = None
    store_policy: str = DEFAULT_POLICY
    kv_codec: str = "raw"
    load: str = "auto"
    fuse: str = "auto"
    remote: str | None = None
    max_new_tokens: int | None = None
    keep_tokens: int | None = None
    temperature: float = 0.0
    repetition_penalty: float = 1.1
    system: str | None = None
    skip: str = (
        ".*, ~$*, .~lock.*, *~, *.tmp, *.part, *.crdownload, *.swp, Thumbs.db, desktop.ini, __MACOSX, $RECYCLE.BIN, "
        "System Volume Information"
    )
    vllm: str | None = None

    def __post_init__(self) -> None:
        for name, (holds, expected) in RULES.items():
            if not holds(value := getattr(self, name)):
                raise SettingsError(f"The setting {name} is {value!r}, but must be {expected}.")

    @property
    def answering(self) -> dict[str, Any]:
        """The engine's arguments for prefilling a prompt and generating an answer."""
        arguments: dict[str, Any] = {name: getattr(self, name) for name in ("method", "ratio", "temperature")}
        # vLLM has no penalty of the answer's tokens alone, so it is passed (and refused) only if a user sets it.
        if self.vllm is None or self.repetition_penalty != Settings.repetition_penalty:
            arguments["repetition_penalty"] = self.repetition_penalty
        arguments["max_new_tokens"] = self.answer_tokens
        if self.keep_tokens is not None:
            arguments["keep_tokens"] = self.keep_tokens
        if self.style.one_sentence and self.answer_tokens <= self.style.max_new_tokens:
            arguments["one_sentence"] = True
        return arguments

    @property
    def local_device(self) -> str | None:
        """The device of embedders and rerankers: the engine's, or the CPU if vLLM has the device."""
        return "cpu" if self.vllm else self.device

    @property
    def style(self) -> AnswerStyle:
        name = BUNDLED if self.model == "default" else self.model.casefold()
        return next((style for part, style in ANSWER_STYLES.items() if part in name), AnswerStyle())

    @property
    def answer_tokens(self) -> int:
        """The longest answer in tokens: the setting, else the model's default."""
        return self.style.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens

    @classmethod
    def read(
        cls,
        path: Path,
        environment: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> "Settings":
        """Merge the file, the environment and the overrides (None = not given). Raises SettingsError."""
        values = _checked(read_settings(path), str(path))
        values |= _from_environment(os.environ if environment is None else environment)
        given = {key: value for key, value in (overrides or {}).items() if value is not None}
        model = given.get("model") or values.get("model") or cls.model
        return cls(**(_tuned(path, str(model), values.keys() | given.keys()) | values)).changed(given)

    def changed(self, overrides: Mapping[str, Any]) -> "Settings":
        """A copy with these values replaced (None = leave it). Raises SettingsError."""
        given = {key: value for key, value in overrides.items() if value is not None}
        return replace(self, **_checked(given, "the given values"))


# Settings that are the same for all commands that a process runs.
PROCESS_SETTINGS = (
    "model", "device", "dtype", "store_policy", "kv_codec", "remote", "load", "fuse",
    "store_budget_bytes", "memory_budget_bytes", "device_budget_bytes",
)  # fmt: skip
DEVICE = re.compile(r"(cpu|cuda|mps)(:[0-9]+)?")
DTYPES = ("float32", "bfloat16", "float16")
COLLECTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")
TYPES: dict[str, type] = {
    field.name: next(kind for kind in (int, float, str) if kind.__name__ in str(field.type))
    for field in fields(Settings)
}

Rule = tuple[Callable[[Any], Any], str]  # whether a value is valid, and what is expected, in words
_COUNT: Rule = (lambda count: count is None or count >= 1, "at least 1")
_NOT_NEGATIVE: Rule = (lambda count: count is None or count >= 0, "0 or more")


def _is_place(url: str | None) -> bool:
    """Whether it is a valid store URL. Raises SettingsError itself, without the URL, which may hold a password."""
    try:
        return url is None or bool(Place.of(url))
    except UsageError as error:
        raise SettingsError(f"The setting remote: {error}.") from None


RULES: dict[str, Rule] = {
    "model": (bool, "a model: default, a hub id, a folder or a .gguf file"),
    "device": (lambda name: DEVICE.fullmatch(name or "cpu"), "cpu, cuda or mps (cuda:1 is the second one)"),
    "dtype": (lambda name: name in (None, *DTYPES), f"one of {', '.join(DTYPES)}"),
    "collection": (
        lambda name: isinstance(name, str) and COLLECTION.fullmatch(name),
        "a name of at most 62 letters, digits, dots, hyphens and underscores",
    ),
    "ratio": (
        lambda ratio: ratio == "auto" if isinstance(ratio, str) else 0 <= ratio <= 1,
        "a share between 0 and 1, such as 0.15, or auto",
    ),
    "top_k": (lambda count: 1 <= count <= 1000, "a number of passages from 1 to 1000"),
    "search": (lambda name: name in SEARCHES, f"one of {', '.join(SEARCHES)}"),
    "reranker": (
        lambda name: not name or (name.strip() and name != "default" and not name.lower().endswith(".gguf")),
        "the hub id (owner/name) or the folder of a cross-encoder, or empty for none",
    ),
    "ocr_language": (lambda name: name in OCR_LANGUAGES, f"one of {', '.join(OCR_LANGUAGES)}"),
    "embedder": (
        lambda name: name is None or (name.strip() and not name.lower().endswith(".gguf")),
        "default, or the hub id (owner/name) or the folder of a model of sentence-transformers",
    ),
    "chunk_tokens": (lambda count: 16 <= count <= 8192, "16 to 8192 tokens"),
    "store_budget_bytes": _COUNT,
    "memory_budget_bytes": _NOT_NEGATIVE,
    "device_budget_bytes": _NOT_NEGATIVE,
    "store_policy": (lambda name: name in EVICTION_POLICIES, f"one of {', '.join(EVICTION_POLICIES)}"),
    "kv_codec": (lambda name: name in KV_CODECS, f"one of {', '.join(KV_CODECS)}"),
    "load": (lambda name: name in LOAD_MODES, f"one of {', '.join(LOAD_MODES)}"),
    "fuse": (lambda name: name in FUSE_MODES, f"one of {', '.join(FUSE_MODES)}"),
    "remote": (_is_place, "a URL"),
    "max_new_tokens": _COUNT,
    "keep_tokens": _COUNT,
    "temperature": (lambda value: 0 <= value <= 10, "a number from 0 to 10"),
    "repetition_penalty": (lambda value: 0 < value <= 10, "above 0 and at most 10 (1 is off)"),
    "vllm": (
        lambda url: url is None or is_server_url(url),
        f"the address of a vLLM server, such as {VLLM_URL}",
    ),
}
WORDS = {"ratio": ("auto",)}  # words that a numeric setting accepts


def _tuned(path: Path, model: str, given: Set[str]) -> dict[str, Any]:
    """The choice of `ragblend tune`, unless a method is given: a ratio belongs to the method it was measured with."""
    choice = None if "method" in given else choice_for(tuned_file(path), model)
    if choice is None:
        return {}
    return {"method": choice.method} | ({} if choice.ratio is None else {"ratio": choice.ratio})


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {key.removeprefix(PREFIX): text for key, text in environment.items() if key.startswith(PREFIX)}
    texts = {key.lower(): text for key, text in found.items() if key not in NOT_SETTINGS}
    return _checked(texts, f"the environment ({PREFIX}*)", are_texts=True)


def _checked(values: Mapping[str, Any], source: str, are_texts: bool = False) -> dict[str, Any]:
    """The values, converted to their settings' types. are_texts: all are strings, as in an environment.

    Raises SettingsError, also for an unknown key.
    """
    for key in (each for each in values if each not in TYPES):
        nearest = get_close_matches(key, TYPES, n=1, cutoff=0.0)[0]
        raise SettingsError(
            f"Reading the settings in {source}: unknown key {key!r}. The nearest setting is {nearest!r}; "
            f"known settings are {', '.join(TYPES)}."
        )
    return {key: _typed(key, value, source, are_texts) for key, value in values.items()}


def _typed(key: str, value: Any, source: str, is_text: bool) -> Any:
    kind, typed = TYPES[key], value
    if value in WORDS.get(key, ()):
        return value
    if is_text or (kind is float and type(value) is int):
        with suppress(ValueError):
            typed = kind(value)
    if type(typed) is not kind or (isinstance(typed, float) and not math.isfinite(typed)):
        expected = {int: "a whole number", float: "a number", str: "a text in quotes"}[kind]
        raise SettingsError(f"Reading the settings in {source}: {key} is {value!r}, but must be {expected}.")
    return typed


def save_settings(path: Path, changes: Mapping[str, Any]) -> None:
    """Write changes to the file (None removes a setting); everything else in it, comments too, stays.

    Raises SettingsError before anything is written.
    """
    import tomlkit

    before = Settings.read(path, environment={})
    before.changed(changes)
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8") if path.exists() else "")
        for key, value in changes.items():
            document.pop(key, None) if value is None else document.update({key: value})
        replace_durably(path, tomlkit.dumps(document))
    except OSError as error:
        raise SettingsError(f"Writing the settings to {path}: {error.strerror}. Check the disk.") from error


# Another model needs other KV and, since chunks are counted in its tokens, other passages.
REQUIRES_CHUNKING = ("model", "chunk_tokens", "ocr_language")
REQUIRES_ENCODING = ("dtype",)


@dataclass(frozen=True)
class Cost:
    """The work that a change of settings causes. changed: the settings that differ.

    cuts_again: documents must be parsed, chunked and embedded again; encodes_again: passages must be encoded again;
    embeds_again: passages are embedded again in the background.
    seconds: an estimate from the measured profile; None without one.
    """

    changed: tuple[str, ...]
    cuts_again: bool
    encodes_again: bool
    documents: int
    passages: int
    seconds: float | None
    embeds_again: bool = False


def cost_of(
    before: Settings, after: Settings, documents: int, passages: int, profile: PrefillProfile | None
) -> Cost:
    """The cost of changing settings for a library of that size."""
    changed = tuple(name for name in TYPES if getattr(before, name) != getattr(after, name))
    cuts = any(name in REQUIRES_CHUNKING for name in changed)
    encodes = cuts or any(name in REQUIRES_ENCODING for name in changed)
    # A profile holds for one model on one device.
    same_machine = not {"model", "device", "dtype"} & set(changed)
    seconds = None
    if encodes and profile is not None and same_machine:
        new_passages = passages * before.chunk_tokens / after.chunk_tokens
        seconds = new_passages * profile.ms(0, after.chunk_tokens) / 1e3
    embeds = "embedder" in changed and not cuts
    counts = (documents, passages) if encodes or embeds else (0, 0)
    return Cost(changed, cuts, encodes, *counts, seconds, embeds)
