"""Counted work: products, other numbers written, calls, passes over layers and loads. Seconds differ, these do not.

`make bench-check` runs it alone. Who makes something cheaper writes the new figures down; none becomes dearer silently.
"""

from collections import Counter

import pytest
import torch
from benches import StagedTransfers, chat, make_text
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TEXTS = [make_text(seed, words=120) for seed in range(6)]
SLACK = 1.02  # other versions of transformers write a mask or a table more

# Of 2,000 tokens and more, by a llama of four layers: millions of multiply-adds, millions of numbers written, calls.
RECORDED = {
    "full": (995, 6.85, 207),
    "reuse": (50.6, 2.14, 428),
    "cacheblend": (203.4, 6.93, 747),
    "probe-shift": (176.2, 12.2, 1847),
}
CALLS_ONCE = 6  # of a passage, whatever the number of layers: where it stands, and by how much it is moved


class Work(TorchDispatchMode):
    """Counts what the operators do that are called in this thread; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.written = self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        name = func.overloadpacket.__name__
        self.calls += 1
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if name in ("mm", "bmm"):
            self.products += outputs[0].numel() * args[0].shape[-1]
        elif name in ("addmm", "baddbmm", "linear"):
            self.products += outputs[0].numel() * args[1].shape[-1]
        elif "scaled_dot_product" in name:
            self.products += 2 * outputs[0].numel() * args[1].shape[-2]
        else:
            self.written += sum(each.numel() for each in outputs)
        return out


@pytest.mark.parametrize("method", RECORDED)
def test_a_prefill_makes_no_more_calls_than_recorded(stored, method):
    prompt, ratio = chat(stored, TEXTS), {} if method in ("full", "reuse") else {"ratio": 0.15}
    for _ in range(2):  # the first builds what is kept
        with Work() as work:
            prefilled = stored.engine.prefill(prompt, method=method, **ratio)
    found = work.products / 1e6, work.written / 1e6, work.calls
    for name, now, recorded in zip(("products", "written", "calls"), found, RECORDED[method], strict=True):
        assert now <= SLACK * recorded, f"{name}: {now:.2f}, and {recorded} is what is written down"
    events = Counter((event.part, event.layer, event.chunk) for event in prefilled.report.trace.events)
    loads = [count for (part, *_), count in events.items() if part == "load"]
    layers = prefilled.cache.geometry.layers
    assert sum(loads) == (0 if method == "full" else layers * len(TEXTS))
    passes = Counter(part for part, layer, _ in events if layer is not None)
    assert passes["compute"] == layers and passes["probe"] == (layers if method == "probe-shift" else 0)


def test_each_passage_adds_one_copy_a_layer_on_an_accelerator(stored, monkeypatch):
    """There calls take longer than the device: what was copied is unpacked for all passages together."""
    monkeypatch.setattr(stored.engine.runtime, "transfers", StagedTransfers())
    layers, calls = stored.engine.runtime.decoder.geometry.layers, []
    stored.engine.prefill(chat(stored, TEXTS), method="reuse")  # the first builds what is kept
    for texts in (TEXTS[:2], TEXTS):
        with Work() as work:
            stored.engine.prefill(chat(stored, texts), method="reuse")
        calls.append(work.calls)
    assert (calls[1] - calls[0]) / len(TEXTS[2:]) <= layers + CALLS_ONCE
