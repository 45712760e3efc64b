"""The connector's scheduler side: decides which prompts are fused, in which step, and keeps their reports."""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from ragblend.integrations.text_index import MIN_TEXT_CHARS
from ragblend.integrations.vllm.finder import Ids, Match, PassageFinder
from ragblend.integrations.vllm.messages import FusionReports, PromptToFuse, StepWork
from ragblend.integrations.vllm.planning import FusionPlan, SaltCache, mark_boundaries
from ragblend.integrations.vllm.runtime import VllmRuntime
from ragblend.integrations.vllm.settings import LABEL, REPORT, ConnectorSettings, RequestOptions, label_of
from ragblend.kvstore.errors import RagBlendError

log = logging.getLogger("ragblend")
MAX_MISSING = 1000  # passages waiting to be encoded
LONGEST_MISSING = 4096  # longest passage that is encoded between requests, which wait for it
TOO_LONG = "fusing would compute %d rows in one step, and `step_tokens` is %d: vLLM computes it in pieces"
MAX_REPORTS = 1000  # reports kept for requests by label


class ConnectorScheduler:
    """The scheduler side.

    count_cached: counts the first tokens of a request that are in vLLM's prefix cache; evict: removes blocks from it.
    refusal: why nothing is fused; None if prompts are.
    """

    count_cached: Callable[[Any], int] = staticmethod(lambda request: 0)
    evict: Callable[[set[int]], None] = staticmethod(lambda blocks: None)

    def __init__(self, runtime: VllmRuntime, settings: ConnectorSettings, block_tokens: int) -> None:
        self._runtime, self._settings, self._block_tokens = runtime, settings, block_tokens
        self._salts = SaltCache()
        self._plans: dict[str, FusionPlan] = {}
        self._given_salts: dict[
            str, str | None
        ] = {}  # the client's own `cache_salt` of requests that got another one
        self._loading: dict[str, set[int]] = {}  # block ids by request, until its report arrives
        self._reports: dict[str, dict[str, Any]] = {}
        self._by_label: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._prompts: list[PromptToFuse] = []  # of this step
        self._salts_in_step: set[str] = set()
        # Passages to encode: node ids by passage, collection and space.
        self._missing: OrderedDict[tuple[Ids, str, str], str] = OrderedDict()
        self.refusal: str | None = "no worker has reported yet"
        # These properties are slow on first use, so they are used now, not by the first request.
        _ = runtime.store, runtime.fingerprint, runtime.canonical_prefix
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

    # --- the stages of a request

    def plan(self, request: Any) -> None:
        """Decide whether to fuse a new request; if so, salt its block hashes, before vLLM looks for cached blocks."""
        try:
            plan = self._plan_of(request)
            if plan is None:
                return
            self._note(request, misses=plan.stored.count(None))
            cached = self.count_cached(request)
            if not self._should_fuse(plan, cached):
                return
            if plan.step_rows > self._settings.step_tokens and not plan.saves_rows(cached):
                self._note(request, warning=TOO_LONG % (plan.step_rows, self._settings.step_tokens))
                return
            self._given_salts[request.request_id] = request.cache_salt
            self._plans[request.request_id] = replace(plan, continued_tokens=self._salt_blocks(request, plan))
        except Exception:
            log.warning("request %s is not fused", request.request_id, exc_info=True)
            self._plans.pop(request.request_id, None)

    def _should_fuse(self, plan: FusionPlan, computed_tokens: int) -> bool:
        return plan.should_fuse(computed_tokens, self._settings.minimum_tokens)

    def _salt_blocks(self, request: Any, plan: FusionPlan) -> int:
        """Hash the request's blocks with a salt; returns the tokens of the earlier prompt that it continues, or 0."""

        def continues(lent_salt: str, tokens: int) -> bool:
            _set_salt(request, lent_salt)
            cached = self.count_cached(request)
            return self._has_blocks_of(tokens, cached) and not self._should_fuse(plan, cached)

        options, model = plan.options, self._runtime.fingerprint.digest
        fused_by = [model, options.method, options.ratio, options.collection, request.cache_salt]
        if plan.to_encode:  # if it reused its own blocks, it would not be sent to the worker, which encodes
            fused_by.append(request.request_id)
        tokens = mark_boundaries(request.prompt_token_ids, plan.matches)
        salt, continued_tokens = self._salts.salt_of(tokens, json.dumps(fused_by), continues)
        if not continued_tokens:
            _set_salt(request, salt)
        return continued_tokens

    def _has_blocks_of(self, tokens: int | None, computed_tokens: int) -> bool:
        """Whether all blocks of a fused prompt with this many tokens are cached (None: fusing it failed)."""
        size = self._block_tokens
        return tokens is not None and computed_tokens >= (tokens - 1) // size * size

    def _plan_of(self, request: Any) -> FusionPlan | None:
        """The plan of a request with known passages; None for one that vLLM computes. Queues passages to encode."""
        ids = request.prompt_token_ids
        if self.refusal is not None:
            self._note(request, warning=self.refusal)
            return None
        is_text = not (request.mm_features or request.prompt_embeds is not None or request.lora_request)
        if not ids or not is_text or request.sampling_params is None:
            return None
        if request.sampling_params.prompt_logprobs is not None:  # they need all tokens to be computed
            return None
        try:
            options = RequestOptions.of(
                self._settings, request.kv_transfer_params, len(ids), request.cache_salt
            )
        except RagBlendError as error:
            log.warning("request %s is computed by vLLM: %.300s", request.request_id, error)
            self._note(request, warning=str(error)[:300])
            return None
        if options.off or (len(ids) <= self._settings.minimum_tokens and not options.encode):
            return None
        matches = self._matches(ids, options)
        if not matches:
            return None
        stored = self._stored(ids, matches, options)
        if options.encode is None and self._settings.encode_missing:
            for match, space in zip(matches, stored, strict=True):
                fits = (
                    MIN_TEXT_CHARS <= len(match.whole) <= LONGEST_MISSING and len(self._missing) < MAX_MISSING
                )
                # Without a node id its KV could not be deleted.
                if space is None and fits and match.node_id is not None:
                    self._missing[match.whole, options.collection, options.space] = match.node_id
        return FusionPlan(options, tuple(matches), stored, len(ids))

    def _matches(self, ids: list[int], options: RequestOptions) -> list[Match]:
        finder = self._finders[options.collection]
        if options.spans is None:
            return finder.find(ids)
        named = [(start, stop, tuple(ids[start:stop])) for start, stop in options.spans]
        return [Match(start, stop, passage, 0, finder.node_id_of(passage)) for start, stop, passage in named]

    def _stored(
        self, ids: list[int], matches: list[Match], options: RequestOptions
    ) -> tuple[str | None, ...]:
        """The space that has each passage's KV, encoded after this prompt's prefix or the canonical one; or None."""
        runtime, spaces = self._runtime, dict.fromkeys((options.collection, options.space))
        prefixes = {tuple(ids[: matches[0].start]), runtime.canonical_prefix}
        keys = {
            (match.whole, space): {runtime.key_of(prefix, match.whole, space) for prefix in prefixes}
            for match in matches
            for space in spaces
        }
        all_keys = {key for candidates in keys.values() for key in candidates}
        found = {key for key in all_keys if runtime.store.contains(key)}
        if runtime.store.remote is not None:
            found |= runtime.store.remote.has(all_keys - found)
        return tuple(
            next((space for space in spaces if keys[match.whole, space] & found), None) for match in matches
        )

    def loadable_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """How many tokens after the computed ones can be loaded; None: retry in the next step.

        A request that would reuse blocks that this step is to fill must wait: if filling them fails, the request that
        owns them computes them, but it may be aborted before.
        """
        if computed_tokens and request.cache_salt in self._salts_in_step:
            return None
        plan = self._plans.get(request.request_id) if self.refusal is None else None
        is_fused = plan is not None and not plan.continued_tokens and plan.tokens - 1 > computed_tokens
        if plan is None or not is_fused:
            method = {} if plan is None else {"method": plan.options.method, "ratio": plan.options.ratio}
            self._note(request, cached_tokens=computed_tokens, **method)
            tokens = None if plan is None else plan.continued_tokens or plan.tokens
            if request.request_id in self._given_salts and not self._has_blocks_of(tokens, computed_tokens):
                _set_salt(
                    request, f"ragblend-{request.request_id}"
                )  # no other request may reuse what vLLM computes now
            return 0
        tokens_in_step = sum(prompt.stop for prompt in self._prompts)
        if tokens_in_step and tokens_in_step + plan.tokens > self._settings.step_tokens:
            return None
        return plan.tokens - 1 - computed_tokens

    def allocated(self, request: Any, blocks: tuple[list[int], ...], loaded_tokens: int) -> None:
        """Fuse the request in this step, into these blocks."""
        plan = self._plans[request.request_id]
        ids, stop = (
            list(request.prompt_token_ids[: plan.tokens]),
            plan.tokens - 1,
        )  # the list grows during a session
        self._loading[request.request_id] = _block_ids(blocks)
        self._salts_in_step.add(request.cache_salt)
        start, salt = stop - loaded_tokens, request.cache_salt
        self._prompts.append(PromptToFuse(request.request_id, ids, plan, salt, blocks, start, stop))

    def take_work(self, is_idle: bool) -> StepWork:
        """Take the work of the step that was just scheduled; in an idle step, a passage to encode."""
        prompts, self._prompts = self._prompts, []
        self._salts_in_step.clear()
        if not (self._missing and is_idle) or prompts:
            return StepWork(prompts)
        (passage, collection, space), node_id = self._missing.popitem(last=False)
        return StepWork(prompts, (passage, collection, space, node_id))

    def handle_reports(self, reports: FusionReports) -> None:
        """Record the worker's reports on a step's prompts, and evict the blocks of failed ones.

        vLLM hashes blocks when it allocates them, and invalidates only those of requests that are still running.
        """
        for request_id, report in reports.prompts.items():
            blocks = self._loading.pop(request_id, set())
            if "error" in report:
                self.evict(blocks)
        known = {name: report for name, report in reports.prompts.items() if name in self._plans}
        self._reports |= known
        for label, report in reports.by_label.items():
            self._add_to_report(label, report)
        for request_id, report in known.items():
            if "error" in report:  # vLLM computes it; fusing is not retried
                self._plans.pop(request_id)

    def stop(self, reason: str) -> None:
        """Fuse and encode nothing from now on."""
        log.warning(
            "RAGBlend fuses nothing here from now on, and vLLM computes all prompts itself: %s", reason
        )
        self.refusal = reason
        self._plans.clear()
        self._missing.clear()

    def finished(self, request: Any, blocks: Iterable[Iterable[int]]) -> dict[str, Any] | None:
        """The report for the response: on its own prompt, or on a labelled one, with the server's properties."""
        plan = self._plans.pop(request.request_id, None)
        if plan is not None and request.status.name == "FINISHED_ERROR":
            # With the salt of a failed prompt, its own blocks may have been computed after invalid ones.
            self.evict(_block_ids(blocks))
        report = self._reports.pop(request.request_id, None)
        if (label := self._label_of(request, REPORT)) is not None:
            report = {  # by these properties a client computes keys of KV, and omits defaults
                "model": asdict(self._runtime.fingerprint),
                "method": self._settings.method,
                "ratio": self._settings.ratio,
                "refusal": self.refusal,
                REPORT: self._by_label.pop(label, None),
            }
        self._given_salts.pop(request.request_id, None)
        return None if report is None else {"ragblend": report}

    def _label_of(self, request: Any, name: str) -> str | None:
        salt = self._given_salts.get(request.request_id, request.cache_salt)
        return label_of(request.kv_transfer_params, name, salt)

    def _note(self, request: Any, **more: Any) -> None:
        """Add to the report that is kept under the request's label."""
        self._add_to_report(self._label_of(request, LABEL), more)

    def _add_to_report(self, label: str | None, more: dict[str, Any]) -> None:
        if label is None:
            return
        self._by_label[label] = self._by_label.get(label, {}) | more
        while len(self._by_label) > MAX_REPORTS:
            self._by_label.popitem(last=False)

    @property
    def has_missing(self) -> bool:
        return bool(self._missing)


def _block_ids(blocks: Iterable[Iterable[int]]) -> set[int]:
    """All block ids of a request except the null block's."""
    return {block for group in blocks for block in group} - {0}


def _set_salt(request: Any, salt: str) -> None:
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
