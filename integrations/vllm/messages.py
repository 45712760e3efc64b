"""Messages between the connector's scheduler and worker: a step's work, and its reports. They are pickled."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ragblend.integrations.vllm.finder import Ids
from ragblend.integrations.vllm.planning import FusionPlan


@dataclass
class WorkerStatus(KVConnectorHandshakeMetadata):
    """A worker's status before the first request. refusal: why it fuses nothing; None if it does."""

    refusal: str | None


@dataclass
class PromptToFuse:
    """Fuse this prompt, and write positions start..stop into blocks (block ids by KV cache group).

    salt: of its blocks' hashes: the same for equal prompts that are fused by the same method.
    """

    request_id: str
    token_ids: list[int]
    plan: FusionPlan
    salt: str
    blocks: tuple[list[int], ...]
    start: int
    stop: int


@dataclass
class StepWork(KVConnectorMetadata):
    """The work of one step. encode: a passage without KV, its collection, space and node id, for an idle step."""

    prompts: list[PromptToFuse] = field(default_factory=list)
    encode: tuple[Ids, str, str, str] | None = None


@dataclass
class FusionReports(KVConnectorWorkerMetadata):
    """Reports on a step's prompts, by request id, and by label, because requests may have ended in that step."""

    prompts: dict[str, dict[str, Any]] = field(default_factory=dict)
    by_label: dict[str, dict[str, Any]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "FusionReports":
        assert isinstance(other, FusionReports)
        return FusionReports(self.prompts | other.prompts, self.by_label | other.by_label)
