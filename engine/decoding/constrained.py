"""Constrained decoding: masks tokens that the grammar does not allow, and ends the answer before max_new_tokens."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.decoding.grammar import Grammar, load_llguidance
from ragblend.kvstore.errors import UnsupportedModelError, UsageError

MAX_CLOSING_TOKENS = 512  # an ending is searched for at least this far ahead
# Limits of the search for the end of one value: its length, the states of each length, and the length after which it
# stops if all states allow the same tokens.
MAX_TOKENS, MAX_STATES, GIVE_UP_TOKENS = 64, 8, 4
# Characters that may end a value, the fastest first. Only in a string that cannot be closed yet, a blank is allowed.
_ENDING_CHARS = ' }]",:0123456789ntf-[{'
_CLOSING_CHARS = '"}],'
_FORMAT_CHARS = "1a0@./+=APTZDMSYWzx"  # enough for a value of every format
_PATTERNS = re.compile(r'"pattern": "((?:[^"\\]|\\.)*)"')
_LITERALS = re.compile(r"(?:\\\W|[^\\\[\](){}*+?|^$.]){2,}")
_ALLOWED_BYTE = b"\xc8"  # llguidance's mark of an allowed token


def token_grammars(tokenizer: Any, vocabulary: int, end_ids: list[int]) -> Any:
    """llguidance's tables that turn grammars into masks over this tokenizer's ids. Takes a second, once per model."""
    load_llguidance()
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UnsupportedModelError(
            "the model's tokenizer has no table that a grammar could be compiled for (it is no fast tokenizer); "
            "ask without a schema"
        )
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=end_ids)


class Constraint:
    """Two logits processors for one answer: `mask`, before sampling, and `close`, after it.

    tokens: from `token_grammars`; max_new_tokens: of the answer. Raises UsageError if the shortest answer that was
    found is longer than that. If none was found, no ending is forced, and the answer may be cut at max_new_tokens.
    """

    def __init__(self, grammar: Grammar, tokens: Any, prompt_tokens: int, max_new_tokens: int) -> None:
        # log_level 0, because llguidance would write its warnings to stderr; errors are raised below.
        self._matcher = load_llguidance().LLMatcher(tokens, grammar.text, log_level=0)
        self._eos = tokens.eos_tokens
        self._seen_tokens, self._end_position = prompt_tokens, prompt_tokens + max_new_tokens
        self._raise_if_failed()
        self.was_closed = False
        self._endings = ShortestEnding(tokens, grammar.text)
        self._ending_ids: list[int] | None = None  # tokens that would end the answer from here; None: unknown
        # The state before the last `close`: tokens seen, ending, and whether the answer was closed.
        self._last_close: tuple[int, list[int] | None, bool] = -1, None, False
        if grammar.is_closed:
            self._ending_ids = self._endings.find(self._matcher, max(max_new_tokens, MAX_CLOSING_TOKENS))
        if self._ending_ids is not None and len(self._ending_ids) > max_new_tokens:
            raise UsageError(
                f"the shortest answer of this schema that was found takes {len(self._ending_ids)} tokens, and "
                f"max_new_tokens is {max_new_tokens}: allow more"
            )

    def mask(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (1, vocabulary) with minus infinity for tokens that the grammar does not allow."""
        for token in input_ids[0, self._seen_tokens :].tolist():
            self._matcher.consume_token(token)
            self._raise_if_failed()
        self._seen_tokens = input_ids.shape[1]
        allowed = _allowed_tokens(self._matcher).to(scores.device)
        self._raise_if_failed()
        return scores.masked_fill(~allowed[: scores.shape[1]], -torch.inf)

    def close(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores unchanged if the answer can still end in time after the best token; else allow only the
        next token of a short ending. A second call for the same token (`uncertainty.py`) starts from the same state.
        """
        if self._last_close[0] == self._seen_tokens:
            _, self._ending_ids, self.was_closed = self._last_close
        self._last_close = self._seen_tokens, self._ending_ids, self.was_closed
        left, chosen = self._end_position - self._seen_tokens, int(scores.argmax())
        if self._ending_ids is None or chosen in self._eos:
            return scores
        after = self._matcher.deep_copy()
        after.consume_token(chosen)
        ending = self._ending_after(chosen, after, left - 1)
        if ending is not None:
            self._ending_ids = ending
            return scores
        self.was_closed = True
        only = torch.full_like(scores, -torch.inf)
        only[0, self._ending_ids[0]] = 0.0
        self._ending_ids = self._ending_ids[1:]
        return only

    def _ending_after(self, chosen: int, after: Any, max_tokens: int) -> list[int] | None:
        """An ending after this token. The ending before it is tried first, because it usually still works."""
        assert self._ending_ids is not None
        for known in (self._ending_ids[1:] if self._ending_ids[0] == chosen else None, self._ending_ids):
            if known and len(known) <= max_tokens and self._endings.leads_to_end(after, known):
                return known
        return self._endings.find(after, max_tokens)

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise UsageError(f"the schema is too complex for the grammar compiler: {reason}; simplify it")


class ShortestEnding:
    """Finds short endings from a grammar's state, token by token.

    Values are closed as soon as the grammar allows it. If it does not yet (a pattern, a format, a bound), the states
    that a few characters lead to are searched, breadth first. States that allow the same tokens count as one state,
    because llguidance does not show its own states.
    """

    def __init__(self, tokens: Any, grammar: str) -> None:
        self._tokens, self._eos = tokens, tokens.eos_tokens
        self._closers = {each: tokens.tokenize_str(each)[0] for each in _ENDING_CHARS}
        patterns = [json.loads(f'"{pattern}"') for pattern in _PATTERNS.findall(grammar)]
        runs = [re.sub(r"\\(.)", r"\1", run) for pattern in patterns for run in _LITERALS.findall(pattern)]
        pieces = dict.fromkeys((*_FORMAT_CHARS, *"".join(patterns), *_ENDING_CHARS, *runs))
        # Without the backslash, because a quote after it closes nothing.
        self._pieces = [tuple(tokens.tokenize_str(each)) for each in pieces if each != "\\"]
        blanks = (tokens.tokenize_str(" " * length) for length in (64, 32, 16, 8, 4, 2, 1))
        self._blanks = [ids[0] for ids in blanks if len(ids) == 1]
        # By the mask of allowed tokens; None: nothing was found, as in a string of a minimum length, in which every
        # character does the same.
        self._steps_by_mask = dict[bytes, list[int] | None]()

    def find(self, matcher: Any, max_tokens: int) -> list[int] | None:
        """At most `max_tokens` token ids, up to the end token; None if no ending is found."""
        matcher, ids = matcher.deep_copy(), list[int]()
        while len(ids) < max_tokens:
            step = self._step(matcher)
            ids += step
            if step[-1] in self._eos:
                return ids if len(ids) <= max_tokens else None
            if not matcher.consume_tokens(step) or matcher.is_error():
                return None
        return None

    def leads_to_end(self, matcher: Any, ids: Sequence[int]) -> bool:
        """Whether the grammar allows these tokens, of which the last is the end token."""
        *steps, _ = ids
        after = matcher.deep_copy()
        if after.validate_tokens(steps) < len(steps) or (steps and not after.consume_tokens(steps)):
            return False
        return bool(after.is_stopped() or after.is_accepting())

    def _step(self, matcher: Any) -> list[int]:
        """The next tokens of a short ending."""
        if matcher.is_stopped() or matcher.is_accepting():
            return [int(self._eos[0])]
        if forced := matcher.compute_ff_tokens():
            return [int(token) for token in forced]
        mask = matcher.compute_logit_bias()
        allowed = {each: token for each, token in self._closers.items() if mask[token]}
        if allowed.keys() >= {'"', "]", "}"}:  # only a string allows all of them
            return [allowed['"']]
        is_text = " " in allowed or "n" in allowed
        if '"' in allowed or ({"}", "]", ","} & allowed.keys() and not is_text):
            return [next(iter(allowed.values()))]
        if mask not in self._steps_by_mask:
            self._steps_by_mask[mask] = self._search(matcher, mask)
        known = self._steps_by_mask[mask]
        if known is not None:
            # They were found in a state that allows the same tokens, which need not be this one.
            valid = known[: matcher.validate_tokens(known)]
            return valid or self._search(matcher, mask) or [self._any_allowed_token(mask)]
        return [self._any_allowed_token(mask)]

    def _any_allowed_token(self, mask: bytes) -> int:
        """Some allowed token; if there must be text, many blanks at once."""
        tried = (*self._blanks, *self._closers.values())
        return next((token for token in tried if mask[token]), mask.find(_ALLOWED_BYTE))

    def _search(self, matcher: Any, begin: bytes) -> list[int] | None:
        """The fewest tokens after which the value can be closed."""
        goals = [
            token for each, token in self._closers.items() if each in _CLOSING_CHARS and not begin[token]
        ]
        numbers, searched, known, masks = count(), Counter[int](), set[Any](), {begin}
        # Sorted by length, then by the number of forced tokens: only an unusual value forces many (a leap second).
        states: list[tuple[int, int, int, bool, bytes, Any, tuple[int, ...]]] = [
            (0, 0, 0, False, begin, matcher, ())
        ]
        while states:
            length, forcings, _, is_over, mask, state, path = heappop(states)
            if is_over:
                return list(path)
            searched[length] += 1
            if (
                length > MAX_TOKENS
                or searched[length] > MAX_STATES
                or (length >= GIVE_UP_TOKENS and len(masks) == 1)
            ):
                continue
            for piece in self._allowed_pieces(mask):
                after = state.deep_copy()
                if not (after.validate_tokens(piece) == len(piece) and after.consume_tokens(piece)):
                    continue
                if forced := after.compute_ff_tokens():
                    after.consume_tokens(forced)
                longer, reached = (*path, *piece, *forced), after.compute_logit_bias()
                # A state after a run of characters may allow the same tokens as another, and be nearer to the end.
                key = (len(longer), reached, piece if len(piece) > 1 else ())
                if key not in known:
                    known.add(key)
                    masks.add(reached)
                    is_over = (
                        after.is_accepting()
                        or after.is_stopped()
                        or any(reached[goal] for goal in goals)
                        or '"' in self._tokens.decode_str(forced)
                    )
                    order = len(longer), forcings + len(forced), next(numbers)
                    heappush(states, (*order, is_over, reached, after, longer))
        return None

    def _allowed_pieces(self, mask: bytes) -> list[tuple[int, ...]]:
        found = [piece for piece in self._pieces if mask[piece[0]]]
        return found or [(mask.find(_ALLOWED_BYTE),)]


def _allowed_tokens(matcher: Any) -> Tensor:
    """(vocabulary,) bool."""
    return torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8) > 0
