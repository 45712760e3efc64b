"""The scheduler's side: which prompts are fused, under which salt, how many in a step, and what is said of them."""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from ragblend.engine.prompts.segments import Prompt
from ragblend.integrations.finding import MINIMUM
from ragblend.integrations.vllm.finder import Ids, Match, PassageFinder
from ragblend.integrations.vllm.messages import Fused, Order, Orders
from ragblend.integrations.vllm.planning import Plan, Salts, marked, prompt_of
from ragblend.integrations.vllm.runtime import VllmRuntime
from ragblend.integrations.vllm.settings import LABEL, REPORT, Settings, Wish, label_of, wish_of
from ragblend.kvstore.errors import RagBlendError

log = logging.getLogger("ragblend")
MOST_MISSING = 1000
LONGEST_MISSING = 4096  # tokens of a passage that is encoded between others' requests: they wait for it
TOO_LONG = "it would compute %d rows in one step, and `step_tokens` is %d: vLLM reads it in pieces"
MOST_TOLD = 1000  # reports that nobody has asked for yet


class SchedulerSide:
    """find_cached: how many first tokens of a request vLLM's prefix cache has; evict: take blocks out of it.

    refusal: why nothing is fused, if so.
    """

    find_cached: Callable[[Any], int] = staticmethod(lambda request: 0)
    evict: Callable[[set[int]], None] = staticmethod(lambda blocks: None)

    def __init__(self, runtime: VllmRuntime, settings: Settings) -> None:
        self._runtime, self._settings = runtime, settings
        self._salts = Salts()
        self._plans: dict[str, Plan] = {}
        self._loading: dict[str, set[int]] = {}  # blocks by request, until it is known what became of them
        self._reports: dict[str, dict[str, Any]] = {}
        self._told: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._orders: list[Order] = []
        self._ordered_salts: set[str] = set()  # of this step
        self._missing: OrderedDict[tuple[Ids, str], str] = OrderedDict()  # node ids
        self.refusal: str | None = "no worker has said yet that it can"
        _ = runtime.store, runtime.fingerprint, runtime.canonical_prefix  # not in somebody's first request
        self._finders = {
            name: PassageFinder(runtime.nodes, runtime.scope(name))
            for name in (settings.collection, *settings.collections)
        }
        for finder in self._finders.values():
            finder.find(())
        if runtime.store.remote is not None:
            runtime.store.remote.check()

    def close(self) -> None:
        self._runtime.close()

    # --- a request's way

    def arrived(self, request: Any) -> None:
        """Plan it, and have its blocks hashed under a salt if it will be fused: before vLLM looks for cached blocks."""
        try:
            plan = self._planned(request)
            if plan is None:
                return
            self._tell(request, misses=plan.stored.count(False))
            found = self.find_cached(request)
            if not plan.pays(found, self._settings.minimum_tokens):
                return
            if plan.step_rows > self._settings.step_tokens and not plan.saves(found):
                self._tell(request, warning=TOO_LONG % (plan.step_rows, self._settings.step_tokens))
                return
            wish, model = plan.wish, self._runtime.fingerprint.digest
            said = [model, wish.method, wish.ratio, wish.collection, request.cache_salt]

            def goes_on(lent: str) -> bool:
                _hash_anew(request, lent)
                return not plan.pays(self.find_cached(request), self._settings.minimum_tokens)

            tokens = marked(request.prompt_token_ids, plan.matches)
            salt, is_lent = self._salts.of(tokens, json.dumps(said), goes_on)
            if not is_lent:
                _hash_anew(request, salt)
            self._plans[request.request_id] = replace(plan, goes_on=is_lent)
        except Exception:
            log.warning("request %s is not fused", request.request_id, exc_info=True)
            self._plans.pop(request.request_id, None)

    def _planned(self, request: Any) -> Plan | None:
        ids = request.prompt_token_ids
        if self.refusal is not None:
            self._tell(request, warning=self.refusal)
            return None
        plain = not (request.mm_features or request.prompt_embeds is not None or request.lora_request)
        if not ids or not plain or request.sampling_params is None:
            return None
        if request.sampling_params.prompt_logprobs is not None:  # of every token: all must be computed
            return None
        try:
            wish = wish_of(self._settings, request.kv_transfer_params, len(ids))
        except RagBlendError as error:
            log.warning("request %s is computed by vLLM: %.300s", request.request_id, error)
            self._tell(request, warning=str(error)[:300])
            return None
        if wish.off or (len(ids) <= self._settings.minimum_tokens and not wish.encode):
            return None
        matches = self._matches(ids, wish)
        if not matches:
            return None
        stored = self._stored(prompt_of(ids, matches, wish.collection), wish)
        if wish.encode is None and self._settings.encode_missing:
            for match, there in zip(matches, stored, strict=True):
                fits = MINIMUM <= len(match.whole) <= LONGEST_MISSING and len(self._missing) < MOST_MISSING
                if not there and fits and match.node_id is not None:  # else nobody could delete it again
                    self._missing[match.whole, wish.collection] = match.node_id
        return Plan(wish, tuple(matches), stored, len(ids))

    def _matches(self, ids: list[int], wish: Wish) -> list[Match]:
        finder = self._finders[wish.collection]
        if wish.spans is None:
            return finder.find(ids)
        named = [(start, stop, tuple(ids[start:stop])) for start, stop in wish.spans]
        return [Match(start, stop, passage, 0, finder.name_of(passage)) for start, stop, passage in named]

    def _stored(self, prompt: Prompt, wish: Wish) -> tuple[bool, ...]:
        """Of each passage whether there is KV of it, behind this prompt's beginning or the canonical one."""
        runtime, prefixes = self._runtime, {prompt.prefix_ids, self._runtime.canonical_prefix}
        keys = [
            {runtime.key_of(prefix, chunk.encoded_ids, wish.collection) for prefix in prefixes}
            for chunk in prompt.chunks
        ]
        there = {key for several in keys for key in several if runtime.store.contains(key)}
        if runtime.store.remote is not None:
            there |= runtime.store.remote.has(set().union(*keys) - there)
        return tuple(bool(several & there) for several in keys)

    def matched(self, request: Any, computed_tokens: int) -> int | None:
        """How many tokens behind the computed ones can be loaded; None: ask again in the next step.

        So who would begin in blocks that an order of this step is to fill is told: not filled, they are computed by the
        order's own request, which may end before that.
        """
        if computed_tokens and request.cache_salt in self._ordered_salts:
            return None
        plan = self._plans.get(request.request_id) if self.refusal is None else None
        if plan is None or plan.goes_on or not plan.pays(computed_tokens, self._settings.minimum_tokens):
            fused_before = {} if plan is None else {"method": plan.wish.method, "ratio": plan.wish.ratio}
            self._tell(request, cached_tokens=computed_tokens, **fused_before)
            return 0
        ordered = sum(order.stop for order in self._orders)
        if ordered and ordered + plan.tokens > self._settings.step_tokens:
            return None
        return max(0, plan.tokens - 1 - computed_tokens)

    def allocated(self, request: Any, blocks: tuple[list[int], ...], loaded_tokens: int) -> None:
        """It will be fused in this step, into these blocks."""
        plan = self._plans[request.request_id]
        ids, stop = list(request.prompt_token_ids[: plan.tokens]), plan.tokens - 1  # of a session it grows
        self._loading[request.request_id] = {block for group in blocks for block in group} - {0}
        self._ordered_salts.add(request.cache_salt)
        self._orders.append(Order(request.request_id, ids, plan, blocks, stop - loaded_tokens, stop))

    def orders(self, idle: bool) -> Orders:
        """Those of the step that was scheduled."""
        orders, self._orders = self._orders, []
        self._ordered_salts.clear()
        if not (self._missing and idle) or orders:
            return Orders(orders)
        (passage, collection), node_id = self._missing.popitem(last=False)
        return Orders(orders, (passage, collection, node_id))

    def done(self, fused: Fused) -> None:
        """What the worker made of a step's orders.

        vLLM hashed the blocks when it gave them, and takes back those of requests that are still running alone.
        """
        for request_id, report in fused.prompts.items():
            blocks = self._loading.pop(request_id, set())
            if "error" in report:
                self.evict(blocks)
        known = {request_id: each for request_id, each in fused.prompts.items() if request_id in self._plans}
        self._reports |= known
        for label, report in fused.told.items():
            self._keep(label, report)
        for request_id, report in known.items():
            if "error" in report:  # vLLM computes it: it is not tried again
                self._plans.pop(request_id)
        if fused.refusal is not None:
            self.end(fused.refusal)

    def end(self, why: str) -> None:
        """Fuse and encode nothing from now on."""
        log.warning("RAGBlend fuses nothing here from now on, and all prompts are vLLM's own: %s", why)
        self.refusal = why
        self._plans.clear()
        self._missing.clear()

    def finished(self, request: Any, blocks: Iterable[Iterable[int]]) -> dict[str, Any] | None:
        """What the answer says of how its prompt was read, or another's, with what this server is."""
        plan = self._plans.pop(request.request_id, None)
        if plan is not None and request.status.name == "FINISHED_ERROR":
            # It may have been lent the salt of a prompt that failed: what it computed itself stands behind that.
            self.evict({block for group in blocks for block in group} - {0})
        report = self._reports.pop(request.request_id, None)
        if (label := label_of(request.kv_transfer_params, REPORT)) is not None:
            report = self._about | {REPORT: self._told.pop(label, None)}
        return None if report is None else {"ragblend": report}

    @property
    def _about(self) -> dict[str, Any]:
        """What a client must know to name stored KV, and to say no more than it has to."""
        settings = self._settings
        return {
            "model": asdict(self._runtime.fingerprint),
            "method": settings.method,
            "ratio": settings.ratio,
            "refusal": self.refusal,
        }

    def _tell(self, request: Any, **more: Any) -> None:
        """Note that for whoever asks for this request's report."""
        self._keep(label_of(request.kv_transfer_params, LABEL), more)

    def _keep(self, label: str | None, more: dict[str, Any]) -> None:
        if label is None:
            return
        self._told[label] = self._told.get(label, {}) | more
        while len(self._told) > MOST_TOLD:
            self._told.popitem(last=False)

    @property
    def has_missing(self) -> bool:
        return bool(self._missing)


def _hash_anew(request: Any, salt: str) -> None:
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
