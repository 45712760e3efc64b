"""Tensor parallelism: several workers share one model, each with some heads of every layer.

The first worker leads. It alone has the store, the plan, the KV of the whole prompt and the attention of all heads; it
broadcasts each operation on the model's modules to the others, which run it on their shards. So every decision is made
once, and workers cannot disagree because of different stores or clocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Operation = dict[str, Any]  # its name, and its arguments: tensors or plain data


class LeaderAborted(Exception):
    """Raised in the other workers: the first one has aborted the operation."""


class WorkersOutOfSync(BaseException):
    """The first worker has failed in an operation that the other workers still run, and cannot receive the next one.

    Not an Exception, because continuing after it would deadlock the workers.
    """


class TensorParallelGroup:
    """The group as seen by one worker. group: vLLM's, of all workers that share the model; None for a single one."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size: int = 1 if group is None else group.world_size
        self.rank: int = 0 if group is None else group.rank_in_group
        self._has_aborted = False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, name: str, **arguments: Any) -> None:
        """Called by the first worker: lets the other workers run this operation."""
        if self.size > 1:
            self._send({"name": name, **arguments})

    @contextmanager
    def operation(self, name: str, **arguments: Any) -> Iterator[None]:
        """Broadcast an operation around the first worker's own share of it.

        Raises WorkersOutOfSync if its share fails while the other workers continue.
        """
        self.broadcast(name, **arguments)
        self._has_aborted = False
        try:
            yield
        except Exception as error:
            if self.size > 1 and not self._has_aborted:
                raise WorkersOutOfSync(f"the first worker failed in its share of {name!r}") from error
            raise

    def _send(self, operation: Operation) -> None:
        self._group.broadcast_tensor_dict(
            {
                name: each.contiguous() if isinstance(each, Tensor) else each
                for name, each in operation.items()
            }
        )

    def receive(self) -> Operation:
        """Called by the other workers: waits, perhaps for a long time, for the first one's next operation."""
        operation: Operation = self._group.broadcast_tensor_dict()
        return operation

    def agree(self, refusal: str | None) -> str | None:
        """Called by all workers together: the first refusal of any of them."""
        if self.size == 1:
            return refusal
        refusals: list[str | None] = [None] * self.size
        torch.distributed.all_gather_object(refusals, refusal, group=self._group.cpu_group)
        return next(filter(None, refusals), None)

    def gather_and_scatter(self, flat: Tensor, compute: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Gather each worker's flat (R, n) at the first one as (R, workers, n), and scatter the result of `compute`,
        (R, workers * m), as (R, m) each.

        compute: None in the other workers, which raise LeaderAborted if it raises in the first one.
        """
        gathered = self._group.gather(flat.contiguous(), dim=-1)
        if compute is None:
            received = self.receive()
        else:
            try:
                received = {"out": compute(gathered.view(len(flat), self.size, flat.shape[1]))}
            except BaseException:
                self._send({})
                self._has_aborted = True
                raise
            self._send(received)
        if "out" not in received:
            raise LeaderAborted
        out: Tensor = received["out"].chunk(self.size, dim=-1)[self.rank]
        return out

    def own_heads(self, count: int, held: int) -> slice:
        """The `held` of all `count` key heads that this worker has.

        If there are more workers than heads, several workers have the same one.
        """
        first = self.rank * count // self.size
        return slice(first, first + held)

    def share_layers(
        self, layers: Callable[[int], tuple[Tensor, Tensor]] | None
    ) -> Callable[[int], tuple[Tensor, Tensor]]:
        """KV by layer, broadcast by the first worker; all workers must call it for the same layers in the same order.

        layers: None in the other workers.
        """
        if self.size == 1 and layers is not None:
            return layers

        def shared(layer: int) -> tuple[Tensor, Tensor]:
            if layers is None:
                received = self.receive()
            else:
                received = dict(zip(("keys", "values"), layers(layer), strict=True))
                self._send(received)
            return received["keys"], received["values"]

        return shared


def tensor_parallel_group(vllm_config: Any) -> TensorParallelGroup:
    """This worker's group; vLLM must have created its parallel groups."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return TensorParallelGroup()
    from vllm.distributed.parallel_state import get_tp_group

    return TensorParallelGroup(get_tp_group())
