"""What a server may be told in `kv_connector_extra_config`, and a request in `kv_transfer_params`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.engine.selection import Policy, policy_named
from ragblend.kvstore.errors import UsageError, did_you_mean
from ragblend.kvstore.places import Place

LABEL, REPORT = "label", "report"  # a request's name for itself, and whose report a later one wants
LONGEST_LABEL, LONGEST_METHOD = 64, 200
MOST_SPANS = 256


@dataclass(frozen=True)
class Settings:
    """How an instance of vLLM fuses.

    home: where the store is (None: RAGBLEND_HOME, or the user's data folder); method, ratio: how prompts are read
    unless a request says otherwise; collection: whose passages are used, and collections: those that requests may name
    beside it; step_tokens: prompt tokens fused in one step, at least one prompt; minimum_tokens: stored tokens below
    which a prompt is vLLM's own; encode_missing: whether passages that came without stored KV are encoded, when idle or
    when a request says so.
    """

    home: str | None = None
    method: str = DEFAULT_METHOD
    ratio: float = DEFAULT_RATIO
    collection: str = "default"
    collections: tuple[str, ...] = ()
    step_tokens: int = 8192
    minimum_tokens: int = 64
    encode_missing: bool = True
    remote: str | None = None

    def __post_init__(self) -> None:
        policy_named(self.method).check_ratio(self.ratio)
        if self.remote is not None:
            Place.of(self.remote)
        for name, kind in (("home", str | None), ("collection", str), ("encode_missing", bool)):
            if not isinstance(found := getattr(self, name), kind):
                wanted = "true or false" if kind is bool else "a text"
                raise UsageError(f"{name} must be {wanted}, not {found!r}")
        for name in ("step_tokens", "minimum_tokens"):
            found = getattr(self, name)
            if not isinstance(found, int) or found < 1:
                raise UsageError(f"{name} must be a whole number above 0, not {found!r}")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "Settings":
        """From `kv_connector_extra_config`. Raises UsageError."""
        _refuse_unknown(extra, [each.name for each in fields(cls)], "kv_connector_extra_config")
        collections = extra.get("collections", ())
        is_list = isinstance(collections, list | tuple)
        if not is_list or not all(isinstance(name, str) for name in collections):
            raise UsageError(f"collections must be a list of names, not {collections!r}")
        return cls(**{**extra, "collections": tuple(collections)})


@dataclass(frozen=True)
class Wish:
    """How one request wants to be read. spans: (start, stop) token positions of passages; None: they are looked for.

    off: by vLLM alone; asked: it named its method, and is fused even where that saves nothing. encode: its passages
    without KV are encoded before it is read (True), never (False), or as the server was told (None). label: under which
    its report is kept for a request for that, `report`: streams carry none.
    """

    method: str
    ratio: float
    collection: str
    spans: tuple[tuple[int, int], ...] | None = None
    off: bool = False
    asked: bool = False
    encode: bool | None = None
    label: str | None = None

    @property
    def policy(self) -> Policy:
        return policy_named(self.method)


def wish_of(settings: Settings, given: object, tokens: int) -> Wish:
    """From a request's `kv_transfer_params` for a prompt of so many tokens. Raises UsageError, naming what is wrong."""
    usual = Wish(settings.method, settings.ratio, settings.collection)
    if given is None:
        return usual
    if not isinstance(given, Mapping):
        raise UsageError(f"kv_transfer_params must be a JSON object, not {given!r:.80}")
    names = ["method", "ratio", "collection", "spans", "off", "encode", LABEL, REPORT]
    _refuse_unknown(given, names, "kv_transfer_params")
    method, collection = given.get("method", usual.method), given.get("collection", usual.collection)
    if collection not in (settings.collection, *settings.collections):
        raise UsageError(f"the collection {collection!r:.80} is none that this server was started with")
    if not isinstance(method, str) or len(method) > LONGEST_METHOD:
        raise UsageError(f"method must be a name of at most {LONGEST_METHOD} characters, not {method!r:.80}")
    ratio, off = given.get("ratio", usual.ratio), given.get("off", False)
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not isinstance(off, bool):
        raise UsageError(f"ratio must be a number and off true or false, not {ratio!r:.80} and {off!r:.80}")
    ratio, encode = policy_named(method).check_ratio(ratio), given.get("encode")
    if not isinstance(encode, bool | None):
        raise UsageError(f"encode must be true or false, not {encode!r:.80}")
    if not settings.encode_missing:  # whoever runs the server has the last word on what is stored
        encode = False
    for name in (LABEL, REPORT):
        if name in given and label_of(given, name) is None:
            raise UsageError(
                f"{name} must be a text of at most {LONGEST_LABEL} characters, not {given[name]!r:.80}"
            )
    spans, asked = _spans(given.get("spans"), tokens), "method" in given
    return Wish(method, ratio, collection, spans, off, asked, encode, label_of(given, LABEL))


def label_of(given: object, name: str) -> str | None:
    """What `kv_transfer_params` say under LABEL or REPORT; None for what is no label."""
    found = given.get(name) if isinstance(given, Mapping) else None
    return found if isinstance(found, str) and len(found) <= LONGEST_LABEL else None


def _spans(given: object, tokens: int) -> tuple[tuple[int, int], ...] | None:
    if given is None:
        return None
    if not isinstance(given, list | tuple) or not all(_is_pair(each) for each in given):
        raise UsageError(f"spans must be a list of [start, stop] pairs of token positions, not {given!r:.80}")
    if len(given) > MOST_SPANS:
        raise UsageError(
            f"spans are {len(given)}; a prompt may have {MOST_SPANS}, others' requests wait for each"
        )
    found = tuple((int(start), int(stop)) for start, stop in given)
    edges = [0, *(edge for span in found for edge in span), tokens]
    if sorted(edges) != edges or any(start == stop for start, stop in found):
        raise UsageError(
            f"spans must be ascending, apart, and within the prompt's {tokens} tokens, not {given!r:.80}"
        )
    return found


def _is_pair(each: object) -> bool:
    whole = isinstance(each, list | tuple) and len(each) == 2
    return whole and all(isinstance(edge, int) and not isinstance(edge, bool) for edge in each)  # type: ignore[attr-defined]


def _refuse_unknown(given: Mapping[str, Any], names: list[str], where: str) -> None:
    for name in given:
        if name not in names:
            raise UsageError(
                f"{where} has no {name!r:.80}; there are {', '.join(names)}{did_you_mean(str(name), names)}"
            )
