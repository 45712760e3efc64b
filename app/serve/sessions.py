"""Keeps the KV of recent conversations whose clients send the whole conversation with every request."""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragblend.engine.prompts.session import Session

MAX_SESSIONS = 4  # of all clients together; 1,000 tokens of SmolLM2 take 45 MB in float32
MIN_COMMON_TOKENS = 64  # fewer common tokens are the chat template, not a conversation


class SessionCache:
    """The most recently used sessions. Each client finds only its own. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: OrderedDict[Session, str] = OrderedDict()  # session -> digest of its client's key

    def session_for(self, key_digest: str, token_ids: tuple[int, ...]) -> "Session":
        """The client's session that has the most tokens in common with the prompt's beginning, or a new one.

        A prompt that differs after the common tokens (the same system prompt, for example) gets a fork of the session.
        The least recently used session is dropped if there are too many. key_digest: used instead of the key's name,
        which another key may have later.
        """
        from ragblend.engine.prompts.session import Session

        with self._lock:
            mine = [
                (each.common_tokens(token_ids), each)
                for each, owner in self._owners.items()
                if owner == key_digest
            ]
            common_tokens, best = max(mine, key=lambda pair: pair[0], default=(0, None))
            if best is None or common_tokens < MIN_COMMON_TOKENS:
                session = Session()
            else:
                session = best if best.is_continued_by(token_ids) else best.fork()
            self._owners[session] = key_digest
            self._owners.move_to_end(session)
            while len(self._owners) > MAX_SESSIONS:
                self._owners.popitem(last=False)
            return session
