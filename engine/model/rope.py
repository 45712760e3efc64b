"""RoPE: rotates keys from one position to another.

Scores depend only on the difference of positions, so a key encoded at position p, rotated by delta, is the key at
p + delta. Source: CacheBlend (EuroSys'25), footnote 3 and appendix A; trig and products in float32 are ours.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

HALF, INTERLEAVED, UNROTATED = "half", "interleaved", "unrotated"
LAYOUTS = (HALF, INTERLEAVED, UNROTATED)


@dataclass(frozen=True)
class Rope:
    """The rotation of one layer.

    inv_freq (R/2,) float32, rad per token, on the device; the first R <= D dimensions are rotated (partial rotary).
    layout: which dimensions form a pair: HALF (0, R/2), (1, R/2 + 1), ...; INTERLEAVED (0, 1), (2, 3), ...; UNROTATED
    for a layer without RoPE (SmolLM3 has some).
    """

    inv_freq: Tensor
    layout: str = HALF

    @property
    def size(self) -> int:
        return 2 * self.inv_freq.numel()


def move_keys(keys: Tensor, delta_tokens: int | Tensor, rope: Rope) -> Tensor:
    """Rotate already-rotated keys to new positions.

    keys (..., T, D); delta_tokens: new minus old position, one number or (T,). Returns a tensor of keys' shape and
    dtype; a delta of 0 returns the same bits. YaRN's attention scaling is in the keys already and is not applied again.
    """
    moved = keys.clone()
    if isinstance(delta_tokens, Tensor):
        assert delta_tokens.numel() == keys.shape[-2], "one delta for each token"
    elif delta_tokens == 0:
        return moved
    # cos(0) = 1 and sin(0) = 0 exactly, so rows with delta 0 are unchanged (except -0.0, which compares equal).
    rotate_(moved, *angles(delta_tokens, rope.inv_freq), rope)
    return moved


def angles(delta_tokens: int | Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of a rotation by one number of tokens, (R/2,), or by one for each of T tokens, (T, R/2)."""
    if isinstance(delta_tokens, Tensor):
        angle = delta_tokens[:, None].to(inv_freq) * inv_freq
    else:
        angle = inv_freq * delta_tokens
    return angle.cos(), angle.sin()


def unrotated(keys: Tensor, start: int, rope: Rope) -> Tensor:
    """Keys (..., T, D) of the positions from start on, rotated back to position 0 each: float32."""
    rope = replace(rope, inv_freq=rope.inv_freq.to(keys.device))
    return move_keys(keys.float(), -torch.arange(start, start + keys.shape[-2]), rope)


def rotate_(keys: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> None:
    """Rotate keys (..., T, D) in place by angles given as cos and sin, (T, R/2) or (R/2,) float32."""
    if rope.layout == UNROTATED:
        return
    first, second = _halves(keys, rope)
    a, b = first.float(), second.float()
    new_first = (a * cos).addcmul_(b, sin, value=-1)
    new_second = (b * cos).addcmul_(a, sin)
    first.copy_(new_first)
    second.copy_(new_second)


def rotated(keys: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """`rotate_` into a new tensor, rounding to keys' dtype at each step. keys (..., T, D); cos, sin (T, R/2).

    Exact enough for differences of keys and for fitting; keys that rows attend to need `rotate_`.
    """
    result = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    if rope.layout == UNROTATED:
        return result.copy_(keys)
    if rope.size < keys.shape[-1]:
        result[..., rope.size :] = keys[..., rope.size :]
    (first, second), (new_first, new_second) = _halves(keys, rope), _halves(result, rope)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin)
    return result


def _halves(keys: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    leading = keys[..., : rope.size]
    if rope.layout == INTERLEAVED:
        return leading[..., 0::2], leading[..., 1::2]
    half = rope.size // 2
    return leading[..., :half], leading[..., half:]
