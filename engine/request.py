"""A request to the engine, the keys of its chunks, and its claim for the scheduler."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from ragblend.engine.config import DEFAULT_RATIO
from ragblend.engine.model.device import free_bytes
from ragblend.engine.nodes import TokenIds
from ragblend.engine.prompts.paths import path_of
from ragblend.engine.prompts.segments import Chunk, Prompt
from ragblend.engine.prompts.session import Session
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.order import Claim
from ragblend.engine.selection import Policy
from ragblend.kvstore.keys import ChunkKey


@dataclass(frozen=True)
class Request:
    """A tokenized prompt with its policy, ratio and collection.

    ratio: None if the controller chooses, at least DEFAULT_RATIO; client: clients share the device's time fairly;
    deadline: by `time.monotonic`; after it the request does not begin.
    """

    prompt: Prompt
    policy: Policy
    ratio: float | None
    collection: str
    seed: int = 0
    room_tokens: int = 256
    session: Session | None = None
    client: str = ""
    deadline: float = math.inf

    @property
    def used_session(self) -> Session | None:
        """The session whose context is used: only policies that fuse use one."""
        return None if self.policy.name == "full" or self.policy.exact else self.session

    def collection_of(self, chunk: Chunk) -> str:
        return chunk.collection or self.collection


def keys_of(runtime: Runtime, request: Request) -> Iterator[tuple[Chunk, TokenIds, ChunkKey]]:
    """The keys of every chunk's KV, with the prefixes that it may have been encoded after."""
    for chunk in request.prompt.chunks:
        for prefix in {request.prompt.prefix_ids, runtime.canonical_prefix} if chunk.token_ids else ():
            yield chunk, prefix, runtime.key_of(prefix, chunk.encoded_ids, request.collection_of(chunk))


def claim_of(runtime: Runtime, request: Request) -> Claim:
    """The scheduler's view of the request: cached tokens, tokens to compute, and memory.

    Before the model is loaded, all of them are unknown.
    """
    client, deadline = request.client, request.deadline
    if not runtime.is_ready:
        return Claim(True, client, deadline=deadline)
    if runtime.queue.order.budget_bytes is None:
        runtime.queue.order.budget_bytes = free_bytes(runtime.device) // 2
    prompt, cached, held_tokens, fused_tokens = request.prompt, dict[str, int](), 0, 0
    if (session := request.used_session) and (held_tokens := session.common_tokens(prompt.token_ids)):
        cached[f"session {id(session)}"] = held_tokens
    with runtime.store_lock:
        path = (
            path_of(runtime, prompt, request.collection)
            if request.policy.uses_tree and not held_tokens
            else []
        )
        nodes = list(takewhile(runtime.store.contains, (node.key for node, _ in path)))
        cached |= {node.key.digest: len(node.token_ids) for node, _ in path[: len(nodes)]}
        exact_tokens = sum(cached.values())
        later_chunks = zip(prompt.chunks[len(nodes) :], prompt.places[len(nodes) :], strict=True)
        for chunk, (_, stop) in () if request.policy.exact else later_chunks:
            ids, salt = chunk.encoded_ids, request.collection_of(chunk)
            keys = [runtime.key_of(each, ids, salt) for each in {prompt.prefix_ids, runtime.canonical_prefix}]
            if stop > held_tokens and (key := next(filter(runtime.store.contains, keys), None)):
                cached[key.digest] = len(ids)
                fused_tokens += len(chunk.token_ids or ())  # once for each occurrence in the prompt
    ratio = DEFAULT_RATIO if request.ratio is None else request.ratio
    share = ratio if request.policy.fixed_ratio is None else request.policy.fixed_ratio
    tokens = len(prompt.token_ids)
    nbytes = (tokens + request.room_tokens) * runtime.fingerprint.geometry.token_bytes
    new_tokens = max(1, round(tokens - exact_tokens - (1 - share) * fused_tokens))
    return Claim(True, client, cached, new_tokens, nbytes, deadline)
