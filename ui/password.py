"""The page's password: an scrypt hash in the home, and a limit on guesses."""

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.files import replace_durably

COST, BLOCK, PARALLEL = 1 << 14, 8, 1  # 16 MiB and about 50 ms per guess
PASSWORD_FILE = "ui-password"
MIN_LENGTH = 10
FREE_ATTEMPTS = 5
LONGEST_WAIT_S, FORGET_AFTER_S = 900.0, 24 * 3600.0


def hash_password(password: str) -> str:
    """The hash and its salt as one line. Raises UsageError for a password that is too short or not UTF-8."""
    try:
        password.encode()
    except UnicodeEncodeError:  # bytes from a pipe
        raise UsageError("The password of the page must be UTF-8 text.") from None
    if len(password) < MIN_LENGTH:
        raise UsageError(f"The password of the page must have at least {MIN_LENGTH} characters.")
    salt = secrets.token_bytes(16)
    return json.dumps({"salt": _base64(salt), "scrypt": _base64(_scrypt(password, salt))})


def matches(password: str, stored_hash: str) -> bool:
    """Whether this is the password that was hashed; False for a hash that cannot be read."""
    try:
        values = json.loads(stored_hash)
        salt, expected = (base64.b64decode(values[name]) for name in ("salt", "scrypt"))
    except (ValueError, KeyError, TypeError):
        return False
    return secrets.compare_digest(_scrypt(password, salt), expected)


def save_password(home: Path, password: str) -> None:
    """Store the hash in the home, readable only by this user. Raises UsageError as `hash_password` does."""
    replace_durably(home / PASSWORD_FILE, hash_password(password))


def read_password(home: Path) -> str | None:
    """The hash stored in the home, or None."""
    try:
        return (home / PASSWORD_FILE).read_text(encoding="utf-8") or None
    except FileNotFoundError:
        return None


class Attempts:
    """Counts wrong guesses per client: five are free, then each doubles the wait, up to a quarter of an hour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._failures: dict[str, tuple[int, float]] = {}  # client -> how many, the time of the last

    def wait_s(self, client: str) -> float:
        """Seconds until this client may guess again."""
        with self._mutex:
            count, last = self._failures.get(client, (0, 0.0))
            if count < FREE_ATTEMPTS:
                return 0.0
            wait = min(LONGEST_WAIT_S, 2.0 ** min(count - FREE_ATTEMPTS + 1, 30))
            return max(0.0, last + wait - self._clock())

    def note_failure(self, client: str) -> None:
        now = self._clock()
        with self._mutex:
            count, _ = self._failures.pop(client, (0, 0.0))
            # Added at the end, so that the first entry is the oldest.
            self._failures[client] = (count + 1, now)
            while now - next(iter(self._failures.values()))[1] > FORGET_AFTER_S:
                del self._failures[next(iter(self._failures))]

    def forget(self, client: str) -> None:
        with self._mutex:
            self._failures.pop(client, None)


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(
        password.encode(errors="surrogatepass"), salt=salt, n=COST, r=BLOCK, p=PARALLEL, dklen=32
    )


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
