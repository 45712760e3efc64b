"""The connector's settings (`kv_connector_extra_config`) and a request's options (`kv_transfer_params`)."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.engine.selection import Policy, policy_named
from ragblend.kvstore.errors import UsageError, did_you_mean
from ragblend.kvstore.places import Place

# Names in `kv_transfer_params`: a request's label, and the label whose report a later request wants.
LABEL, REPORT = "label", "report"
LONGEST_LABEL, LONGEST_METHOD = 64, 200
MAX_SPANS = 256


@dataclass(frozen=True)
class ConnectorSettings:
    """The connector's settings.

    home: folder of the store (None: RAGBLEND_HOME, or the user's data folder); method, ratio: defaults of requests;
    collection: the default one; collections: others that requests may choose; step_tokens: limit of prompt tokens fused
    in one step, though one prompt always is; minimum_tokens: with fewer stored tokens vLLM computes a prompt itself;
    encode_missing: whether passages without stored KV are encoded, when idle or on request; shared: collections in
    which all requests use the KV that a request with a `cache_salt` has encoded; encode_seconds: passages that take
    longer to encode, judged by earlier ones, are not encoded when idle, since a new request would wait; store_bytes:
    limit of stored KV on the disk (None: as the home's settings say); warm: how many of the most requested passages
    are read ahead at the start; remote: the shared store's URL.
    """

    home: str | None = None
    method: str = DEFAULT_METHOD
    ratio: float = DEFAULT_RATIO
    collection: str = "default"
    collections: tuple[str, ...] = ()
    step_tokens: int = 8192
    minimum_tokens: int = 64
    encode_missing: bool = True
    shared: tuple[str, ...] = ()
    encode_seconds: float | None = None
    store_bytes: int | None = None
    warm: int = 100
    remote: str | None = None

    def __post_init__(self) -> None:
        policy_named(self.method).check_ratio(self.ratio)
        if self.remote is not None:
            Place.of(self.remote)
        for name, kind in (("home", str | None), ("collection", str), ("encode_missing", bool)):
            if not isinstance(found := getattr(self, name), kind):
                expected = "true or false" if kind is bool else "a string"
                raise UsageError(f"{name} must be {expected}, not {found!r}")
        for name, minimum in (("step_tokens", 1), ("minimum_tokens", 1), ("store_bytes", 1), ("warm", 0)):
            found = getattr(self, name)
            if (type(found) is not int or found < minimum) and (name, found) != ("store_bytes", None):
                raise UsageError(f"{name} must be a whole number, {minimum} or more, not {found!r}")
        limit = self.encode_seconds
        if limit is not None and (type(limit) not in (int, float) or not limit > 0):
            raise UsageError(f"encode_seconds must be a number above 0, not {limit!r}")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """From `kv_connector_extra_config`. Raises UsageError."""
        _refuse_unknown(extra, [each.name for each in fields(cls)], "kv_connector_extra_config")
        lists = dict[str, tuple[str, ...]]()
        for name in ("collections", "shared"):
            found = extra.get(name, ())
            if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
                raise UsageError(f"{name} must be a list of names, not {found!r}")
            lists[name] = tuple(found)
        return cls(**{**extra, **lists})

    def space_of(self, collection: str, salt: str | None) -> str:
        """Where KV is stored that a request with that `cache_salt` encodes: the collection, or a part of it."""
        if salt is None or collection in self.shared:
            return collection
        return f"{collection}\0{hashlib.sha256(salt.encode('utf-8', 'surrogatepass')).hexdigest()}"


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request. spans: (start, stop) token positions of passages; None: find them.

    off: vLLM computes it alone; chose_method: the request names a method, and is fused even if that saves nothing.
    encode: encode its passages without KV first (True), never (False), or by the server's setting (None). label: name
    under which its report is kept for a later request with that `report`, because an answer of one token has none.
    space: where KV that it encodes is stored.
    """

    method: str
    ratio: float
    collection: str
    space: str
    spans: tuple[tuple[int, int], ...] | None = None
    off: bool = False
    chose_method: bool = False
    encode: bool | None = None
    label: str | None = None

    @property
    def policy(self) -> Policy:
        return policy_named(self.method)

    @classmethod
    def of(
        cls, settings: ConnectorSettings, given: object, tokens: int, salt: str | None = None
    ) -> "RequestOptions":
        """From the `kv_transfer_params` and `cache_salt` of a request with this many tokens. Raises UsageError."""
        if given is None:
            space = settings.space_of(settings.collection, salt)
            return cls(settings.method, settings.ratio, settings.collection, space)
        if not isinstance(given, Mapping):
            raise UsageError(f"kv_transfer_params must be a JSON object, not {given!r:.80}")
        names = ["method", "ratio", "collection", "spans", "off", "encode", LABEL, REPORT]
        _refuse_unknown(given, names, "kv_transfer_params")
        collection = given.get("collection", settings.collection)
        if collection not in (settings.collection, *settings.collections):
            raise UsageError(f"this server was started without the collection {collection!r:.80}")
        method, ratio, off = _method(settings, given)
        encode = given.get("encode")
        if not isinstance(encode, bool | None):
            raise UsageError(f"encode must be true or false, not {encode!r:.80}")
        if not settings.encode_missing:  # the server's operator decides about storing
            encode = False
        for name in (LABEL, REPORT):
            if name in given and label_of(given, name, salt) is None:
                raise UsageError(
                    f"{name} must be a string of at most {LONGEST_LABEL} characters, not {given[name]!r:.80}"
                )
        spans, chose_method = _spans(given.get("spans"), tokens), "method" in given
        space, label = settings.space_of(collection, salt), label_of(given, LABEL, salt)
        return cls(method, ratio, collection, space, spans, off, chose_method, encode, label)


def _method(settings: ConnectorSettings, given: Mapping[str, Any]) -> tuple[str, float, bool]:
    """A request's method, ratio and `off`, checked."""
    method, ratio = given.get("method", settings.method), given.get("ratio", settings.ratio)
    if not isinstance(method, str) or len(method) > LONGEST_METHOD:
        raise UsageError(f"method must be a name of at most {LONGEST_METHOD} characters, not {method!r:.80}")
    off = given.get("off", False)
    if not isinstance(off, bool):
        raise UsageError(f"off must be true or false, not {off!r:.80}")
    return method, policy_named(method).check_ratio(ratio), off


def label_of(given: object, name: str, salt: str | None) -> str | None:
    """The label under LABEL or REPORT in `kv_transfer_params`; None if it is missing or invalid.

    It includes the request's `cache_salt`, so that requests with another salt cannot read its report.
    """
    found = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(found, str) or len(found) > LONGEST_LABEL:
        return None
    return found if salt is None else f"{found}\0{salt}"


def _spans(given: object, tokens: int) -> tuple[tuple[int, int], ...] | None:
    if given is None:
        return None
    if not isinstance(given, list | tuple) or not all(_is_pair(each) for each in given):
        raise UsageError(f"spans must be a list of [start, stop] pairs of token positions, not {given!r:.80}")
    if len(given) > MAX_SPANS:
        raise UsageError(
            f"there are {len(given)} spans; a prompt may have {MAX_SPANS}, because other requests wait for each"
        )
    found = tuple((int(start), int(stop)) for start, stop in given)
    edges = [0, *(edge for span in found for edge in span), tokens]
    if sorted(edges) != edges or any(start == stop for start, stop in found):
        raise UsageError(
            f"spans must be ascending, disjoint, and within the prompt's {tokens} tokens, not {given!r:.80}"
        )
    return found


def _is_pair(each: object) -> bool:
    has_two = isinstance(each, list | tuple) and len(each) == 2
    return has_two and all(isinstance(edge, int) and not isinstance(edge, bool) for edge in each)  # type: ignore[attr-defined]


def _refuse_unknown(given: Mapping[str, Any], names: list[str], where: str) -> None:
    for name in given:
        if name not in names:
            raise UsageError(
                f"{where} has no {name!r:.80}; there are {', '.join(names)}{did_you_mean(str(name), names)}"
            )
