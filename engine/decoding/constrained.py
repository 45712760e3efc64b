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

MAX_CLOSING_TOKENS = 512  # an end is searched for at least so far ahead
# Of the search for the end of one value: its length, the states of each length, and when to stop if all are alike.
MOST_TOKENS, MOST_STATES, SAME_TOKENS = 64, 8, 4
# In order of how soon they end a value; a blank is allowed only inside a string that cannot be closed yet.
_SOONEST = ' }]",:0123456789ntf-[{'
_CLOSING = '"}],'
_FORMATS = "1a0@./+=APTZDMSYWzx"  # what formats consist of
_PATTERNS = re.compile(r'"pattern": "((?:[^"\\]|\\.)*)"')
_LITERALS = re.compile(r"(?:\\\W|[^\\\[\](){}*+?|^$.]){2,}")
_ALLOWED = b"\xc8"  # llguidance's bias of an allowed token


def token_grammars(tokenizer: Any, vocabulary: int, end_ids: list[int]) -> Any:
    """llguidance's tables that turn grammars into masks over this tokenizer's ids: takes a second, once per model."""
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
    found is longer than that. If none was found, the answer is never led to an end, and may reach max_new_tokens.
    """

    def __init__(self, grammar: Grammar, tokens: Any, prompt_tokens: int, max_new_tokens: int) -> None:
        # llguidance's warnings would go to stderr; ours are errors.
        self._matcher = load_llguidance().LLMatcher(tokens, grammar.text, log_level=0)
        self._seen, self._end, self._eos = prompt_tokens, prompt_tokens + max_new_tokens, tokens.eos_tokens
        self._raise_error()
        self.was_closed = False
        self._ending = ShortestEnding(tokens, grammar.text)
        self._path: list[int] | None = None
        # Before the last `close`: tokens seen, the way to the end, and whether it was closed.
        self._before: tuple[int, list[int] | None, bool] = -1, None, False
        if grammar.is_closed:
            self._path = self._ending.find(self._matcher, max(max_new_tokens, MAX_CLOSING_TOKENS))
        if self._path is not None and len(self._path) > max_new_tokens:
            raise UsageError(
                f"the shortest answer of this schema that was found takes {len(self._path)} tokens, and "
                f"max_new_tokens is {max_new_tokens}: allow more"
            )

    def mask(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (1, vocabulary) with minus infinity for tokens that the grammar does not allow."""
        for token in input_ids[0, self._seen :].tolist():
            self._matcher.consume_token(token)
            self._raise_error()
        self._seen = input_ids.shape[1]
        allowed = _allowed(self._matcher).to(scores.device)
        self._raise_error()
        return scores.masked_fill(~allowed[: scores.shape[1]], -torch.inf)

    def close(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The same scores while the answer can still end in time after the best token; else only the next token of a
        short end. Called again for the same token (`uncertainty.py`), it starts from the same state.
        """
        if self._before[0] == self._seen:
            _, self._path, self.was_closed = self._before
        self._before = self._seen, self._path, self.was_closed
        left, chosen = self._end - self._seen, int(scores.argmax())
        if self._path is None or chosen in self._eos:
            return scores
        after = self._matcher.deep_copy()
        after.consume_token(chosen)
        found = self._path_after(chosen, after, left - 1)
        if found is not None:
            self._path = found
            return scores
        self.was_closed = True
        only = torch.full_like(scores, -torch.inf)
        only[0, self._path[0]] = 0.0
        self._path = self._path[1:]
        return only

    def _path_after(self, chosen: int, after: Any, most: int) -> list[int] | None:
        """A way to the end after this token: as before it if that still leads there, which is most often so."""
        assert self._path is not None
        for known in (self._path[1:] if self._path[0] == chosen else None, self._path):
            if known and len(known) <= most and self._ending.leads_to_end(after, known):
                return known
        return self._ending.find(after, most)

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise UsageError(f"the schema is too much for its compiler: {reason}; ask for less at once")


class ShortestEnding:
    """Finds short ways from a grammar's state to its end, token by token.

    Values are closed as soon as the grammar allows. Where it does not yet (a pattern, a format, a bound), all states
    that a few characters lead to are searched, breadth first. States that allow the same tokens count as one of them:
    the grammar's own are not to be seen.
    """

    def __init__(self, tokens: Any, grammar: str) -> None:
        self._tokens, self._eos = tokens, tokens.eos_tokens
        self._closers = {each: tokens.tokenize_str(each)[0] for each in _SOONEST}
        patterns = [json.loads(f'"{pattern}"') for pattern in _PATTERNS.findall(grammar)]
        runs = [re.sub(r"\\(.)", r"\1", run) for pattern in patterns for run in _LITERALS.findall(pattern)]
        pieces = dict.fromkeys((*_FORMATS, *"".join(patterns), *_SOONEST, *runs))
        # Not the backslash, behind which a quote closes nothing.
        self._pieces = [tuple(tokens.tokenize_str(each)) for each in pieces if each != "\\"]
        blanks = (tokens.tokenize_str(" " * length) for length in (64, 32, 16, 8, 4, 2, 1))
        self._blanks = [ids[0] for ids in blanks if len(ids) == 1]
        self._found = dict[
            bytes, list[int] | None
        ]()  # None: of a mere length, in which every character does the same

    def find(self, matcher: Any, most: int) -> list[int] | None:
        """Token ids up to the end token, at most `most`; None if no end is found."""
        matcher, path = matcher.deep_copy(), list[int]()
        while len(path) < most:
            step = self._step(matcher)
            path += step
            if step[-1] in self._eos:
                return path if len(path) <= most else None
            if not matcher.consume_tokens(step) or matcher.is_error():
                return None
        return None

    def leads_to_end(self, matcher: Any, path: Sequence[int]) -> bool:
        """Whether the grammar allows these tokens, of which the last is the end token."""
        *steps, _ = path
        after = matcher.deep_copy()
        if after.validate_tokens(steps) < len(steps) or (steps and not after.consume_tokens(steps)):
            return False
        return bool(after.is_stopped() or after.is_accepting())

    def _step(self, matcher: Any) -> list[int]:
        """The next tokens of a short end."""
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
        if mask not in self._found:
            self._found[mask] = self._search(matcher, mask)
        known = self._found[mask]
        if known is not None:
            # The grammar's state may be another one that allows the same.
            return known[: matcher.validate_tokens(known)] or self._search(matcher, mask) or [self._any(mask)]
        return [self._any(mask)]

    def _any(self, mask: bytes) -> int:
        """Some allowed token: many blanks at once, if there must be text."""
        tried = (*self._blanks, *self._closers.values())
        return next((token for token in tried if mask[token]), mask.find(_ALLOWED))

    def _search(self, matcher: Any, begin: bytes) -> list[int] | None:
        """The fewest tokens after which the value can be closed."""
        goals = [token for each, token in self._closers.items() if each in _CLOSING and not begin[token]]
        numbers, seen, known, masks = count(), Counter[int](), set[Any](), {begin}
        # Of ways of equal length those with few forced tokens first: only an unusual value forces many (a leap second).
        states: list[tuple[int, int, int, bool, bytes, Any, tuple[int, ...]]] = [
            (0, 0, 0, False, begin, matcher, ())
        ]
        while states:
            length, forcings, _, is_over, mask, state, path = heappop(states)
            if is_over:
                return list(path)
            seen[length] += 1
            if (
                length > MOST_TOKENS
                or seen[length] > MOST_STATES
                or (length >= SAME_TOKENS and len(masks) == 1)
            ):
                continue
            for piece in self._tried(mask):
                after = state.deep_copy()
                if not (after.validate_tokens(piece) == len(piece) and after.consume_tokens(piece)):
                    continue
                if forced := after.compute_ff_tokens():
                    after.consume_tokens(forced)
                longer, reached = (*path, *piece, *forced), after.compute_logit_bias()
                # What a run of characters leads to may allow the same and be nearer to the end.
                key = (len(longer), reached, piece if len(piece) > 1 else ())
                if key not in known:
                    known.add(key)
                    masks.add(reached)
                    is_over = (
                        after.is_accepting() or after.is_stopped() or any(reached[goal] for goal in goals)
                    )
                    is_over = is_over or '"' in self._tokens.decode_str(forced)
                    order = len(longer), forcings + len(forced), next(numbers)
                    heappush(states, (*order, is_over, reached, after, longer))
        return None

    def _tried(self, mask: bytes) -> list[tuple[int, ...]]:
        found = [piece for piece in self._pieces if mask[piece[0]]]
        return found or [(mask.find(_ALLOWED),)]


def _allowed(matcher: Any) -> Tensor:
    """(vocabulary,) bool."""
    return torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8) > 0
