"""Conversations of clients that send all of it with every question: what was read of one is found by its tokens."""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragblend.engine.prompts.session import Session

MOST = 4  # kept in memory, of all clients: 45 MB a thousand tokens of SmolLM2, in float32
LEAST_TOKENS = 64  # what fewer have in common is the template, not a conversation


class SessionCache:
    """The contexts of the conversations that went on last. Nobody is lent another client's. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Session, str] = OrderedDict()

    def of(self, whose: str, token_ids: tuple[int, ...]) -> "Session":
        """Their session that holds most of the prompt's beginning, or a new one in the place of the oldest.

        New is also what begins alike (the same system prompt) and goes on otherwise: another conversation, which takes
        that beginning along. whose: the digest of a key, never its name, which somebody else may have next.
        """
        from ragblend.engine.prompts.session import Session

        with self._lock:
            mine = [
                (each.common_tokens(token_ids), each) for each, owner in self._kept.items() if owner == whose
            ]
            held, best = max(mine, key=lambda pair: pair[0], default=(0, None))
            if best is None or held < LEAST_TOKENS:
                session = Session()
            else:
                session = best if best.is_of(token_ids) else best.fork()
            self._kept[session] = whose
            self._kept.move_to_end(session)
            while len(self._kept) > MOST:
                self._kept.popitem(last=False)
            return session
