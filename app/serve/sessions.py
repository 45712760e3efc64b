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
        self._kept: OrderedDict[Session, str] = OrderedDict()

    def of(self, key_digest: str, token_ids: tuple[int, ...]) -> "Session":
        """The client's session with the longest common beginning, or a new one, which replaces the oldest.

        A prompt that begins like a session (the same system prompt) and then differs gets a fork of it. key_digest:
        not the key's name, which another key may have later.
        """
        from ragblend.engine.prompts.session import Session

        with self._lock:
            mine = [
                (each.common_tokens(token_ids), each)
                for each, owner in self._kept.items()
                if owner == key_digest
            ]
            held, best = max(mine, key=lambda pair: pair[0], default=(0, None))
            if best is None or held < MIN_COMMON_TOKENS:
                session = Session()
            else:
                session = best if best.is_of(token_ids) else best.fork()
            self._kept[session] = key_digest
            self._kept.move_to_end(session)
            while len(self._kept) > MAX_SESSIONS:
                self._kept.popitem(last=False)
            return session
