"""Tensor parallel: several workers have one model, each some heads of every layer.

The first one leads. It alone has the store, the plan, the KV of the whole prompt and the attention of all heads; what
it has the model's modules do it tells the others, who do the same with their shards of these. So nothing is decided
twice, and no two workers can decide it differently, whatever a store or a clock says to each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Told = dict[str, Any]  # what, and its arguments: tensors or plain data


class Left(Exception):
    """The first worker has left a layer in the midst of it."""


class OutOfStep(BaseException):
    """The first worker has failed in the midst of what the others still do: nothing that it says now would be heard.

    No Exception: whoever goes on after one would have all workers wait for each other.
    """


class Team:
    """As one worker sees it. group: vLLM's, of all workers that share the model with it; None: it is alone."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size: int = 1 if group is None else group.world_size
        self.rank: int = 0 if group is None else group.rank_in_group
        self._have_left = False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tell(self, what: str, **given: Any) -> None:
        """By the first worker: have the others do this, too."""
        if self.size > 1:
            self._send({"what": what, **given})

    @contextmanager
    def doing(self, what: str, **given: Any) -> Iterator[None]:
        """The same around the first worker's own share. Raises OutOfStep where that fails and the others go on."""
        self.tell(what, **given)
        self._have_left = False
        try:
            yield
        except Exception as error:
            if self.size > 1 and not self._have_left:
                raise OutOfStep(f"the first worker failed in its share of {what!r}") from error
            raise

    def _send(self, told: Told) -> None:
        self._group.broadcast_tensor_dict(
            {name: each.contiguous() if isinstance(each, Tensor) else each for name, each in told.items()}
        )

    def hear(self) -> Told:
        """By the others: what the first one tells, who may take long to say more."""
        told: Told = self._group.broadcast_tensor_dict()
        return told

    def agreed(self, refusal: str | None) -> str | None:
        """Told by each at the same moment: why one of them cannot take part, if so."""
        if self.size == 1:
            return refusal
        said: list[str | None] = [None] * self.size
        torch.distributed.all_gather_object(said, refusal, group=self._group.cpu_group)
        return next(filter(None, said), None)

    def together(self, flat: Tensor, compute: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Each worker's flat (R, n) becomes the first one's (R, workers, n); what it computes of it, (R, workers * m),
        becomes each worker's (R, m). compute: given by the first worker; where it raises, the others raise Left.
        """
        whole = self._group.gather(flat.contiguous(), dim=-1)
        if compute is None:
            told = self.hear()
        else:
            try:
                told = {"out": compute(whole.view(len(flat), self.size, flat.shape[1]))}
            except BaseException:
                self._send({})
                self._have_left = True
                raise
            self._send(told)
        if "out" not in told:
            raise Left
        out: Tensor = told["out"].chunk(self.size, dim=-1)[self.rank]
        return out

    def heads(self, count: int, held: int) -> slice:
        """Which of so many key heads this worker has, `held` of them: where there are more workers than heads, several
        workers have one.
        """
        first = self.rank * count // self.size
        return slice(first, first + held)

    def layers(
        self, whole: Callable[[int], tuple[Tensor, Tensor]] | None
    ) -> Callable[[int], tuple[Tensor, Tensor]]:
        """KV by layer, which the first worker has and hands to all; to be called by each for the same layers."""
        if self.size == 1 and whole is not None:
            return whole

        def shared(layer: int) -> tuple[Tensor, Tensor]:
            if whole is None:
                told = self.hear()
            else:
                told = dict(zip(("keys", "values"), whole(layer), strict=True))
                self._send(told)
            return told["keys"], told["values"]

        return shared


def team_of(vllm_config: Any) -> Team:
    """This worker's, with the model's parallel groups there."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return Team()
    from vllm.distributed.parallel_state import get_tp_group

    return Team(get_tp_group())
