"""Compile-time constants of the kernels that pass over rows of keys and values, some of them rotated."""

import triton

from ragblend.engine.model.rope import INTERLEAVED, UNROTATED, Rope

TILE_ROWS, WARPS = 16, 4


def row_constants(size: int, value_size: int, rope: Rope) -> dict[str, int]:
    """The constants for keys and values of these sizes. PAIRS of dimensions are rotated; K2, V2 and P2 are the next
    powers of two of SIZE, VALUE_SIZE and PAIRS.
    """
    pairs = 0 if rope.layout == UNROTATED else rope.size // 2
    return {
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "PAIRS": pairs,
        "INTERLEAVED": rope.layout == INTERLEAVED,
        "M": TILE_ROWS,
        "K2": triton.next_power_of_2(size),
        "V2": triton.next_power_of_2(value_size),
        "P2": triton.next_power_of_2(max(pairs, 1)),
        "num_warps": WARPS,
    }
