"""What scheduler and worker tell each other: orders of a step, and what became of them. Plain data: it is pickled."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ragblend.integrations.vllm.finder import Ids
from ragblend.integrations.vllm.planning import Plan


@dataclass
class Verdict(KVConnectorHandshakeMetadata):
    """A worker's, before the first request. refusal: why it fuses nothing; None if it does."""

    refusal: str | None


@dataclass
class Order:
    """Fuse this prompt, and write positions start..stop into blocks (block ids by KV cache group)."""

    request_id: str
    token_ids: list[int]
    plan: Plan
    blocks: tuple[list[int], ...]
    start: int
    stop: int


@dataclass
class Orders(KVConnectorMetadata):
    """Of one step. encode: a passage without KV, its collection and node id, for when there is nothing else to do."""

    prompts: list[Order] = field(default_factory=list)
    encode: tuple[Ids, str, str] | None = None


@dataclass
class Fused(KVConnectorWorkerMetadata):
    """What a step made of its orders, by request id; told: the same by label, as requests may have ended in that step;
    refusal: why nothing is to be fused from now on.
    """

    prompts: dict[str, dict[str, Any]] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    refusal: str | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Fused":
        assert isinstance(other, Fused)
        told = self.told | other.told
        return Fused(self.prompts | other.prompts, told, self.refusal or other.refusal)
