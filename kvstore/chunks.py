"""A chunk's KV and its shape.

Letters used everywhere: `L` layers, `H` KV heads, `T` tokens, `D` head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.kvstore.keys import ChunkKey

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Geometry:
    """The shape of one token's KV: the same in every layer.

    layers L; kv_heads H; key_size and value_size D of K and of V; dtype a name in `DTYPES`.
    """

    layers: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: str

    def __post_init__(self) -> None:
        assert self.dtype in DTYPES, f"dtype {self.dtype!r} is not one of {sorted(DTYPES)}"
        assert min(self.layers, self.kv_heads, self.key_size, self.value_size) > 0, self

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return self.kv_heads * (self.key_size + self.value_size) * self.torch_dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.layers * self.layer_token_bytes


@dataclass(frozen=True)
class ChunkKV:
    """One chunk's KV as it is stored: keys already rotated to where the chunk was encoded.

    token_ids: T ids; start: position of the first token when encoded (the encoding prefix's length); keys, values: L
    contiguous tensors each, (H, T, D), of the geometry's dtype, on the CPU. parent: the node of the knowledge tree
    directly after which it was computed; None: it was encoded alone after its prefix. unrotated_keys(layer): the keys
    rotated back to position 0 each, float32, which `int4` packs; None: such a codec's KV is stored raw instead.
    """

    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    parent: ChunkKey | None = None
    unrotated_keys: Callable[[int], Tensor] | None = None

    def __post_init__(self) -> None:
        g, tokens = self.geometry, len(self.token_ids)
        assert len(self.keys) == len(self.values) == g.layers
        for k, v in zip(self.keys, self.values, strict=True):
            assert k.shape == (g.kv_heads, tokens, g.key_size) and k.dtype == g.torch_dtype, k.shape
            assert v.shape == (g.kv_heads, tokens, g.value_size) and v.dtype == g.torch_dtype, v.shape

    @property
    def nbytes(self) -> int:
        return len(self.token_ids) * self.geometry.token_bytes
