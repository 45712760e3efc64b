"""Place: the URL of a shared store.

It holds no secrets, because it may occur in files and logs. It is parsed whenever settings are read, so nothing heavy
is imported here.
"""

import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from ragblend.kvstore.errors import UsageError, did_you_mean

SALT_VARIABLE = "RAGBLEND_REMOTE_SALT"
SECRETS = (SALT_VARIABLE, "REDIS_PASSWORD", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
SCHEMES = ("redis", "rediss", "s3", "file")
_OPTIONS = {"timeout_s": "2", "retry_s": "30", "ttl_s": str(30 * 24 * 3600), "namespace": "ragblend"}
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")


@dataclass(frozen=True)
class Place:
    """The place of a shared store.

    where: host and port, or the bucket; timeout_s: how long a prompt waits for it at most; retry_s: pause after a
    failure; ttl_s: lifetime of a value; namespace: prefix of the names of values.
    """

    scheme: str
    where: str
    path: str
    timeout_s: float
    retry_s: float
    ttl_s: int
    namespace: str

    @classmethod
    def of(cls, url: str) -> "Place":
        """Parse a URL. Raises UsageError, whose message repeats nothing that could be a password."""
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises ValueError for an invalid one
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise UsageError("the shared store's URL cannot be read") from None
        if parts.scheme not in SCHEMES:
            raise UsageError(
                f"the shared store's URL must begin with {', '.join(f'{s}://' for s in SCHEMES)}"
            )
        if "@" in parts.netloc:
            raise UsageError(
                "the shared store's URL must hold no user and no password: set REDIS_USERNAME and REDIS_PASSWORD, or "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in the environment"
            )
        for name, _ in pairs:
            if name not in _OPTIONS:
                known = f"there are {', '.join(_OPTIONS)}{did_you_mean(name, _OPTIONS)}"
                raise UsageError(f"the shared store's URL has no option {name!r:.40}; {known}")
        options = _OPTIONS | dict(pairs)
        is_folder = parts.scheme == "file"
        if is_folder == bool(parts.netloc) or (is_folder and parts.path in ("", "/")):
            raise UsageError(
                "the shared store's URL must name a host, bucket or folder, as in redis://host:6379/0, "
                "s3://bucket/prefix, file:///mnt/share"
            )
        try:
            timeout_s, retry_s = float(options["timeout_s"]), float(options["retry_s"])
            ttl_s, namespace = int(options["ttl_s"]), options["namespace"]
            if not (0 < timeout_s < 3600 and retry_s > 0 and ttl_s > 0 and _NAMESPACE.fullmatch(namespace)):
                raise ValueError
        except ValueError:
            raise UsageError(
                "the shared store's URL: timeout_s and retry_s must be seconds, ttl_s whole seconds, all above 0, and "
                "namespace letters, digits, dots, hyphens and underscores"
            ) from None
        return cls(parts.scheme, parts.netloc, unquote(parts.path), timeout_s, retry_s, ttl_s, namespace)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.where}{self.path}"


def safe_message(error: BaseException) -> str:
    """An error's message in one line, without the secrets that the environment holds."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    for secret in filter(None, map(os.environ.get, SECRETS)):
        text = text.replace(secret, "***")
    return text[:200].removesuffix(":")
