"""The gate: a self-test that a model must pass before its KV is fused (about a second, once per fingerprint).

It checks the assumptions of fusing: (1) the layer loop over all rows gives the model's own logits, and over some rows
the same rows; (2) keys rotated to another position equal keys computed there, in every layer; (3) editing a later chunk
changes no earlier row; (4) a chunk directly after its encoding prefix is exact; (5) shifted KV is finite. A model that
fails is served by full prefill, with a warning.

It also checks whether attention can be collected, which most policies need, without changing a layer's output. If not,
such policies are replaced by one that needs none.
"""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from ragblend.engine.cache import FusedCache, NewKV, Scatter
from ragblend.engine.config import DEFAULT_METHOD
from ragblend.engine.encode import ChunkEncoder
from ragblend.engine.fusion import fusing
from ragblend.engine.model.attention import CollectAttention
from ragblend.engine.model.decoder import Decoder, RowBlock
from ragblend.engine.model.device import device_name, transfer_stream
from ragblend.engine.model.rope import LAYOUTS, Rope, move_keys
from ragblend.engine.plan import Span, make_plan
from ragblend.engine.selection import ATTENTION_FREE, METHODS, Policy, policy_named
from ragblend.engine.trace import Recorder
from ragblend.kvstore.files import make_private_folder, replace_durably
from ragblend.kvstore.memory import HeldChunk

VERSION = 6  # raise it when the test or attention changes, to invalidate saved verdicts
# Root mean square error allowed, relative to the spread (standard deviation) of what it is compared with. A wrong
# rotation, mask or layout gives 0.3 and more; rounding gives about 1e-6, 2e-3 and 1e-2.
TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.05}
# The tolerance is for this many layers. With more it grows as the square root of their number, to at most twice: at
# least as fast as the error of 8 to 64 random layers in bfloat16. Llama-3-8B's shape with random weights has an error
# of 0.05 on an H100, real models of 24 to 30 layers 0.02 on other kernels, and at least 0.17 with a wrong prefix.
SHALLOW_LAYERS = 16
FAR_TOKENS = 150  # the position that a chunk is moved to; not a multiple of any likely period
GATE_TEXT = (
    "The harbour master kept two ledgers. In the first she wrote the names of the ships, the hour they came and what "
    "they carried; in the second, which nobody was meant to see, the names of those who never came back. When the "
    "storm of the ninth of November broke the northern mole, both ledgers were in the lamp room, and only one was "
    "saved."
)


@dataclass(frozen=True)
class GateCheck:
    """One check of the gate: its relative error, and the allowed error."""

    name: str
    passed: bool
    error: float
    allowed: float


@dataclass(frozen=True)
class GateVerdict:
    """Whether a model's KV may be fused, and the reason if not.

    layouts: the rotary layout of each layer; shows_attention: whether attention can be collected.
    """

    passed: bool
    checks: tuple[GateCheck, ...] = ()
    reason: str | None = None
    layouts: tuple[str, ...] = ()
    shows_attention: bool = True


def run_gate(decoder: Decoder, token_ids: Sequence[int]) -> GateVerdict:
    """Run all checks; also sets each layer's rotary layout, and whether attention can be collected.

    token_ids: a few dozen ids of ordinary text. Raises whatever the layers raise if they cannot be run one by one.
    """
    ids = list(token_ids)
    assert len(ids) >= 24, "the gate needs text to work on"
    test = _SelfTest(decoder, ids)
    moving = test.moving()
    if not (decoder.shows_attention and test.attention_is_shown()):
        decoder.disable_attention_collection()
    checks = (test.all_rows(), test.some_rows(), moving, test.causality(), test.exactness(), test.shifting())
    failed = [f"{c.name}: error {c.error:.2g}, allowed {c.allowed:.2g}" for c in checks if not c.passed]
    return GateVerdict(
        not failed, checks, "; ".join(failed) or None, tuple(decoder.layouts), decoder.shows_attention
    )


class _SelfTest:
    """The checks, on a prompt that is cut into a prefix, two chunks and a suffix."""

    def __init__(self, decoder: Decoder, ids: list[int]) -> None:
        self.decoder = decoder
        quarter = len(ids) // 4
        self.prefix, self.first = ids[:quarter], ids[quarter : 2 * quarter]
        self.second = ids[2 * quarter : 3 * quarter]
        self.suffix = ids[3 * quarter :]
        self.allowed = TOLERANCE[decoder.geometry.dtype]
        self._encoder = ChunkEncoder(decoder, self.prefix)
        self._encoded = dict[tuple[int, ...], HeldChunk]()

    def all_rows(self) -> GateCheck:
        """Computing every row over loaded KV gives the model's own logits."""
        ids = [*self.prefix, *self.first, *self.second, *self.suffix]
        logits, _ = self._fused("recompute", self.first, self.second)
        error = relative_error(logits, self.decoder.own_logits(ids))
        return self._check("all rows recomputed equals the model", error, self.decoder.error_factor)

    @torch.inference_mode()
    def some_rows(self) -> GateCheck:
        """In each layer, some rows of a sequence get the output that they get among all rows."""
        decoder = self.decoder
        ids = torch.tensor([*self.prefix, *self.first, *self.second, *self.suffix], device=decoder.device)
        every = torch.arange(ids.numel(), device=decoder.device)
        hidden, some, errors = decoder.embed(ids), every[every % 5 > 2], []
        for layer in range(decoder.geometry.layers):
            cache = FusedCache(decoder.geometry, ids.numel(), 0, decoder.device)
            outs = []
            for rows in (every, some):
                cache.step = Scatter(rows)
                inputs = hidden[:, rows]
                block = decoder.row_block(rows, ids.numel(), inputs)
                outs.append(decoder.run_layer(layer, inputs, block, cache))
            errors.append(relative_error(outs[1], outs[0][:, some]))
            hidden = outs[0]
        return self._check("some rows computed equal the same rows among all", max(errors))

    def moving(self) -> GateCheck:
        """In each layer, keys rotated to another position equal keys computed there; sets the layer's layout."""
        errors = []
        for layer in range(self.decoder.geometry.layers):
            near, far = self._keys_at(layer, len(self.prefix)), self._keys_at(layer, FAR_TOKENS)
            inv_freq, delta = self.decoder.rope(layer).inv_freq, FAR_TOKENS - len(self.prefix)
            moved = ((move_keys(near, delta, Rope(inv_freq, layout)), layout) for layout in LAYOUTS)
            error, self.decoder.layouts[layer] = min(
                (relative_error(keys, far), layout) for keys, layout in moved
            )
            errors.append(error)
        return self._check("rotated keys equal keys computed at their position", max(errors))

    @torch.inference_mode()
    def _keys_at(self, layer: int, start: int) -> Tensor:
        """(H, R, D): a layer's keys for the first chunk's embeddings at that position."""
        decoder = self.decoder
        hidden = decoder.embed(torch.tensor(self.first, device=decoder.device))
        rows = torch.arange(start, start + len(self.first), device=decoder.device)
        cache = FusedCache(decoder.geometry, start + len(self.first), 0, decoder.device)
        cache.step = Scatter(rows, peek=True)
        try:
            decoder.run_layer(layer, hidden, decoder.row_block(rows, cache.prompt_tokens, hidden), cache)
        except NewKV as new:
            return new.keys
        raise AssertionError("the layer never called the cache")

    def causality(self) -> GateCheck:
        """Changing the last chunk does not change the KV of the rows before it, in any layer."""
        _, one = self._fused("cacheblend", self.first, self.second)
        _, two = self._fused("cacheblend", self.first, self.second[::-1])
        stop = len(self.prefix) + len(self.first)
        return self._check("editing a later chunk changes no earlier row", _largest_error(one, two, 0, stop))

    def exactness(self) -> GateCheck:
        """The chunk directly after its encoding prefix has full prefill's KV."""
        _, full = self._fused("full", self.first, self.second)
        _, reuse = self._fused("reuse", self.first, self.second)
        start = len(self.prefix)
        error = _largest_error(full, reuse, start, start + len(self.first))
        depth_factor = min(max(1.0, self.decoder.geometry.layers / SHALLOW_LAYERS) ** 0.5, 2.0)
        return self._check("a chunk directly after its prefix is exact", error, depth_factor)

    def shifting(self) -> GateCheck:
        """Policies that shift KV give finite logits, with and without collecting attention."""
        policies = (
            [ATTENTION_FREE, METHODS[DEFAULT_METHOD]] if self.decoder.shows_attention else [ATTENTION_FREE]
        )
        finite = all(
            bool(self._fused(policy, self.first, self.second)[0].isfinite().all()) for policy in policies
        )
        return self._check("shifted KV gives finite logits", 0.0 if finite else math.inf)

    @torch.inference_mode()
    def attention_is_shown(self) -> bool:
        """Whether attention of each layer type can be collected without changing its output."""
        decoder = self.decoder
        ids = torch.tensor([*self.prefix, *self.first, *self.suffix], device=decoder.device)
        hidden, rows = decoder.embed(ids), torch.arange(ids.numel(), device=decoder.device)
        block = decoder.row_block(rows, ids.numel(), hidden, collected=len(self.suffix))
        kinds = {decoder.layer_types[layer] for layer in decoder.attention_layers}
        return all(
            self._layer_shows_attention(decoder.layer_types.index(kind), hidden, block) for kind in kinds
        )

    def _layer_shows_attention(self, layer: int, hidden: Tensor, block: RowBlock) -> bool:
        shown: list[Tensor] = []

        def computed(collect: CollectAttention | None) -> Tensor:
            cache = FusedCache(self.decoder.geometry, hidden.shape[1], 0, self.decoder.device)
            cache.step = Scatter(block.rows)
            return self.decoder.run_layer(layer, hidden, block, cache, collect)

        expected = computed(None)
        try:
            error = relative_error(computed(lambda *given: shown.append(given[-1])), expected)
        except Exception:  # third-party layers may raise anything
            return False
        return len(shown) == 1 and bool(shown[0].isfinite().all()) and error <= self.allowed

    def _check(self, name: str, error: float, factor: float = 1.0) -> GateCheck:
        """The result of a check; factor multiplies the allowed error."""
        allowed = self.allowed * factor
        return GateCheck(name, error <= allowed, error, allowed)  # NaN compares false

    def _fused(self, method: str | Policy, *chunks: list[int]) -> tuple[Tensor, FusedCache]:
        decoder, policy = self.decoder, policy_named(method)
        ids, spans = list(self.prefix), list[Span]()
        for number, chunk in enumerate(chunks):
            spans.append(Span(len(ids), len(chunk), self._kv(chunk), exact=number == 0))
            ids += chunk
        ids += self.suffix
        tokens = torch.tensor(ids, device=decoder.device)
        plan = make_plan(tokens, tuple(spans), decoder.geometry.layers, 0.3, decoder.attention_share)
        transfers = transfer_stream(decoder.device)
        with (
            ThreadPoolExecutor(1) as pool,
            fusing(decoder, plan, policy, transfers, pool, Recorder(transfers)) as fusion,
        ):
            logits, _ = fusion.prefill()
        return logits, fusion.cache

    def _kv(self, chunk: list[int]) -> HeldChunk:
        key = tuple(chunk)
        if key not in self._encoded:
            self._encoded[key] = HeldChunk.of(self._encoder.encode(chunk))
        return self._encoded[key]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square difference, in standard deviations of `expected`."""
    spread = expected.float().std().clamp_min(1e-9)
    return float((found.float() - expected.float()).pow(2).mean().sqrt() / spread)


def _largest_error(one: FusedCache, two: FusedCache, start: int, stop: int) -> float:
    layers = range(one.geometry.layers)
    pairs = [(one.span(i, start, stop), two.span(i, start, stop)) for i in layers]
    return max(relative_error(a, b) for first, second in pairs for a, b in zip(first, second, strict=True))


def cached_verdict(
    folder: Path, fingerprint: str, device: torch.device, layers: int, run_checks: Callable[[], GateVerdict]
) -> GateVerdict:
    """The saved verdict for this model, this device and these versions of the libraries that compute; or a new one,
    which is saved.
    """
    libraries = f"torch{torch.__version__}-transformers{transformers.__version__}"
    file = folder / f"gate-{fingerprint[:32]}-{device_name(device)}-{libraries}-v{VERSION}.json"
    try:
        found = json.loads(file.read_text())
        checks = tuple(GateCheck(**check) for check in found.pop("checks"))
        verdict = GateVerdict(checks=checks, layouts=tuple(found.pop("layouts")), **found)
        if set(verdict.layouts) <= set(LAYOUTS) and len(verdict.layouts) in (0, layers):
            return verdict
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    try:
        verdict = run_checks()
    except Exception as error:  # not saved, because the cause may be temporary, such as a lack of memory
        reason = f"the model's layers cannot be run one by one ({type(error).__name__}: {error})"
        return GateVerdict(False, (), reason)
    with contextlib.suppress(OSError):  # on a full disk the next start repeats the test
        make_private_folder(folder)
        replace_durably(file, json.dumps(asdict(verdict), indent=1, sort_keys=True))
    return verdict
