"""Statistics of fused prompts, in vLLM's own log lines and its /metrics."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "requests": "Prompts that were fused from stored KV.",
    "failures": "Prompts that could not be fused, and were computed by vLLM.",
    "repeated": "Fused prompts that were repeated while vLLM's prefix cache had their blocks.",
    "tokens_prompt": "Tokens of prompts that were fused.",
    "tokens_reused": "Prompt tokens whose stored KV was used as it is.",
    "tokens_recomputed": "Prompt tokens with stored KV that were recomputed.",
    "tokens_missing": "Prompt tokens of known passages without stored KV.",
    "encoded": "Passages that were encoded in idle steps.",
    "fused_seconds": "Time that fusing took, in seconds.",
    "load_seconds": "Time that loading stored KV took in parallel, in seconds.",
    "write_seconds": "Time that writing KV into vLLM's blocks took, in seconds.",
}


class FusionStats(KVConnectorStats):
    """Sums over the steps since the last report, by the names of COUNTERS."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def add(self, **counts: float) -> None:
        for name, count in counts.items():
            assert name in COUNTERS, name
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> "FusionStats":
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class FusionMetrics(KVConnectorPromMetrics):
    """A Prometheus counter for each of COUNTERS, named `vllm:ragblend_..._total`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        counters = {
            name: self._counter_cls(f"vllm:ragblend_{name}", about, labelnames=self._labelnames)
            for name, about in COUNTERS.items()
        }
        self._counters = {
            (name, engine): counter.labels(*map(str, labels))
            for name, counter in counters.items()
            for engine, labels in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name, engine_idx].inc(count)
