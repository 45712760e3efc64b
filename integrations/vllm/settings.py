"""The connector's settings (`kv_connector_extra_config`) and a request's options (`kv_transfer_params`)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.engine.selection import Policy, policy_named
from ragblend.kvstore.errors import UsageError, did_you_mean
from ragblend.kvstore.places import Place

LABEL, REPORT = (
    "label",
    "report",
)  # a request's label, and the label whose report a later one requests
LONGEST_LABEL, LONGEST_METHOD = 64, 200
MOST_SPANS = 256


@dataclass(frozen=True)
class ConnectorSettings:
    """The connector's settings.

    home: folder of the store (None: RAGBLEND_HOME, or the user's data folder); method, ratio: defaults of requests;
    collection: the default one; collections: others that requests may choose; step_tokens: prompt tokens fused in one
    step, at least one prompt; minimum_tokens: with fewer stored tokens vLLM computes a prompt itself; encode_missing:
    whether passages without stored KV are encoded, when idle or on request; remote: the shared store's URL.
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
                expected = "true or false" if kind is bool else "a text"
                raise UsageError(f"{name} must be {expected}, not {found!r}")
        for name in ("step_tokens", "minimum_tokens"):
            found = getattr(self, name)
            if not isinstance(found, int) or found < 1:
                raise UsageError(f"{name} must be a whole number above 0, not {found!r}")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """From `kv_connector_extra_config`. Raises UsageError."""
        _refuse_unknown(extra, [each.name for each in fields(cls)], "kv_connector_extra_config")
        collections = extra.get("collections", ())
        is_list = isinstance(collections, list | tuple)
        if not is_list or not all(isinstance(name, str) for name in collections):
            raise UsageError(f"collections must be a list of names, not {collections!r}")
        return cls(**{**extra, "collections": tuple(collections)})


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request. spans: (start, stop) token positions of passages; None: find them.

    off: vLLM alone; asked: the request chose its method, and is fused even if that saves nothing. encode: encode its
    passages without KV first (True), never (False), or by the server's setting (None). label: name under which its
    report is kept for a later request with that `report`, because streams carry none.
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

    @classmethod
    def of(cls, settings: ConnectorSettings, given: object, tokens: int) -> "RequestOptions":
        """From a request's `kv_transfer_params`, for a prompt of so many tokens. Raises UsageError."""
        if given is None:
            return cls(settings.method, settings.ratio, settings.collection)
        if not isinstance(given, Mapping):
            raise UsageError(f"kv_transfer_params must be a JSON object, not {given!r:.80}")
        names = ["method", "ratio", "collection", "spans", "off", "encode", LABEL, REPORT]
        _refuse_unknown(given, names, "kv_transfer_params")
        collection = given.get("collection", settings.collection)
        if collection not in (settings.collection, *settings.collections):
            raise UsageError(f"the collection {collection!r:.80} is none that this server was started with")
        method, ratio, off = _method(settings, given)
        encode = given.get("encode")
        if not isinstance(encode, bool | None):
            raise UsageError(f"encode must be true or false, not {encode!r:.80}")
        if not settings.encode_missing:  # the server's operator decides about storing
            encode = False
        for name in (LABEL, REPORT):
            if name in given and label_of(given, name) is None:
                raise UsageError(
                    f"{name} must be a text of at most {LONGEST_LABEL} characters, not {given[name]!r:.80}"
                )
        spans, asked = _spans(given.get("spans"), tokens), "method" in given
        return cls(method, ratio, collection, spans, off, asked, encode, label_of(given, LABEL))


def _method(settings: ConnectorSettings, given: Mapping[str, Any]) -> tuple[str, float, bool]:
    """A request's method, ratio and `off`, checked."""
    method, ratio = given.get("method", settings.method), given.get("ratio", settings.ratio)
    if not isinstance(method, str) or len(method) > LONGEST_METHOD:
        raise UsageError(f"method must be a name of at most {LONGEST_METHOD} characters, not {method!r:.80}")
    off = given.get("off", False)
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not isinstance(off, bool):
        raise UsageError(f"ratio must be a number and off true or false, not {ratio!r:.80} and {off!r:.80}")
    return method, policy_named(method).check_ratio(ratio), off


def label_of(given: object, name: str) -> str | None:
    """The label in `kv_transfer_params` under LABEL or REPORT; None for a missing or an invalid one."""
    found = given.get(name) if isinstance(given, Mapping) else None
    return found if isinstance(found, str) and len(found) <= LONGEST_LABEL else None


def _spans(given: object, tokens: int) -> tuple[tuple[int, int], ...] | None:
    if given is None:
        return None
    if not isinstance(given, list | tuple) or not all(_is_pair(each) for each in given):
        raise UsageError(f"spans must be a list of [start, stop] pairs of token positions, not {given!r:.80}")
    if len(given) > MOST_SPANS:
        raise UsageError(
            f"there are {len(given)} spans; a prompt may have {MOST_SPANS}, as other requests wait for each"
        )
    found = tuple((int(start), int(stop)) for start, stop in given)
    edges = [0, *(edge for span in found for edge in span), tokens]
    if sorted(edges) != edges or any(start == stop for start, stop in found):
        raise UsageError(
            f"spans must be ascending, disjoint, and within the prompt's {tokens} tokens, not {given!r:.80}"
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
