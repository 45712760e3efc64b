"""Constrained decoding: masks tokens that the grammar does not allow, and ends the answer before max_new_tokens."""

from typing import Any

import torch
from torch import Tensor

from ragblend.engine.decoding.grammar import Grammar, load_llguidance
from ragblend.kvstore.errors import UnsupportedModelError, UsageError

MAX_CLOSING_TOKENS = 512  # how far ahead an end is searched for
# In order of how soon they end a value; a blank is allowed only inside a string that cannot be closed yet.
_SOONEST = ' }]",:0123456789ntf-[{'


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

    tokens: from `token_grammars`; max_new_tokens: of the answer. Raises UsageError if the shortest possible answer is
    longer than that, or too long to be found.
    """

    def __init__(self, grammar: Grammar, tokens: Any, prompt_tokens: int, max_new_tokens: int) -> None:
        # llguidance's warnings would go to stderr; ours are errors.
        self._matcher = load_llguidance().LLMatcher(tokens, grammar.text, log_level=0)
        self._tokens, self._seen, self._end = tokens, prompt_tokens, prompt_tokens + max_new_tokens
        self._soonest = [tokens.tokenize_str(each)[0] for each in _SOONEST]
        self._raise_error()
        self.was_closed = False
        self._closes = grammar.is_closed
        shortest = self._distance(self._matcher) if grammar.is_closed else 0
        if shortest is None:
            raise UsageError(
                f"no answer of this schema was found that ends within {MAX_CLOSING_TOKENS} tokens: ask for less at once"
            )
        if shortest > max_new_tokens:
            raise UsageError(
                f"an answer of this schema takes {shortest} tokens at least, and max_new_tokens is {max_new_tokens}: "
                "allow more"
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
        """The same scores while the answer can still end in time after the best token; else only the next token of the
        shortest end.
        """
        left, chosen = self._end - self._seen, int(scores.argmax())
        if not self._closes or chosen in self._tokens.eos_tokens:
            return scores
        after = self._matcher.deep_copy()
        after.consume_token(chosen)
        distance = self._distance(after, left)
        if distance is not None and distance < left:
            return scores
        self.was_closed = True
        only = torch.full_like(scores, -torch.inf)
        only[0, self._next(self._matcher.deep_copy())] = 0.0
        return only

    def _distance(self, matcher: Any, most: int = MAX_CLOSING_TOKENS) -> int | None:
        """Number of tokens up to the end token along those that `_next` returns; None if no end is found."""
        matcher = matcher.deep_copy()
        for count in range(min(most, MAX_CLOSING_TOKENS) + 1):
            token = self._next(matcher)
            if matcher.is_error():
                return None
            if token in self._tokens.eos_tokens:
                return count + 1
            if not matcher.consume_token(token):
                return None
        return None

    def _next(self, matcher: Any) -> int:
        """The next token of the shortest end: the forced one, or the one that closes the open value soonest."""
        if matcher.is_stopped() or matcher.is_accepting():
            return int(self._tokens.eos_tokens[0])
        if forced := matcher.compute_ff_tokens():
            return int(forced[0])
        allowed = _allowed(matcher)
        closing = {each: token for each, token in zip(_SOONEST, self._soonest, strict=True) if allowed[token]}
        if closing.keys() >= {'"', "]", "}"}:  # only a string allows all of them
            return int(closing['"'])
        if closing:
            return int(next(iter(closing.values())))
        return int(allowed.to(torch.uint8).argmax())

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise UsageError(f"the schema is too much for its compiler: {reason}; ask for less at once")


def _allowed(matcher: Any) -> Tensor:
    """(vocabulary,) bool."""
    return torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8) > 0
