"""How long prefill takes, by how many tokens are cached and how many are new: a measured grid, interpolated."""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class PrefillProfile:
    """prefill_ms[i][j]: milliseconds to compute new_tokens[j] behind cached_tokens[i]; `about` says where measured.

    RAGCache (arXiv 2404.12457) section 5.1: profiled once, then T(cached, new) is found by bilinear interpolation.
    Raises UsageError for a grid that is none.
    """

    about: str
    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    prefill_ms: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name in ("cached_tokens", "new_tokens"):
            _check_axis(name, getattr(self, name))
        rows, columns = len(self.cached_tokens), len(self.new_tokens)
        if len(self.prefill_ms) != rows or any(len(row) != columns for row in self.prefill_ms):
            raise UsageError(
                f"a prefill profile of {rows} cached_tokens and {columns} new_tokens needs {rows} rows of {columns} "
                "prefill_ms; measure it again"
            )
        for value in (value for row in self.prefill_ms for value in row):
            if not (_is_number(value) and math.isfinite(value) and value >= 0):
                raise UsageError(
                    f"a prefill profile holds {value!r} where milliseconds are due; measure it again"
                )

    @classmethod
    def of(
        cls, about: str, cached: Sequence[int], new: Sequence[int], ms: Callable[[int, int], float]
    ) -> "PrefillProfile":
        """The grid of a function that measures, or computes, ms(cached, new)."""
        return cls(about, tuple(cached), tuple(new), tuple(tuple(ms(c, n) for n in new) for c in cached))

    def ms(self, cached: float, new: float) -> float:
        """Milliseconds to compute `new` tokens behind `cached` ones.

        Beyond the grid its outermost cells go on in a straight line: clamped, a token would cost less and less.
        """
        row, down = _cell(self.cached_tokens, cached)
        column, right = _cell(self.new_tokens, new)
        near, far = self.prefill_ms[row], self.prefill_ms[row + 1]
        at_near = near[column] + right * (near[column + 1] - near[column])
        at_far = far[column] + right * (far[column + 1] - far[column])
        return max(0.0, at_near + down * (at_far - at_near))

    def ms_per_token(self, cached: int, new: int) -> float:
        """T(cached, new) / new: what RAGCache's Algorithm 1 charges each token that a request had to compute."""
        return self.ms(cached, new) / max(new, 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "PrefillProfile":
        """Raises UsageError for anything but what to_json() gives."""
        if not isinstance(value, dict) or set(value) != set(cls.__dataclass_fields__):
            raise UsageError(f"a prefill profile is an object of {', '.join(cls.__dataclass_fields__)}")
        rows = value["prefill_ms"]
        if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) for row in rows):
            raise UsageError("a prefill profile's prefill_ms is a list of rows of milliseconds")
        cached, new = (_axis(name, value[name]) for name in ("cached_tokens", "new_tokens"))
        return cls(str(value["about"]), cached, new, tuple(tuple(row) for row in rows))

    @classmethod
    def read(cls, path: Path) -> "PrefillProfile":
        """From a file of to_json()'s object, or one that has it as `prefill`, as a device's profile does.

        Raises UsageError.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            return cls.from_json(value.get("prefill", value) if isinstance(value, dict) else value)
        except OSError as error:
            raise UsageError(f"reading the prefill profile {path}: {error.strerror}; name another") from error
        except (ValueError, RecursionError) as error:  # UsageError, and what json raises
            raise UsageError(f"reading the prefill profile {path}: {error}") from error


def _cell(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The cell of the axis for that value, and how far into it the value lies: 0 to 1 inside the grid."""
    cell = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])


def _axis(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"a prefill profile's {name} is a list of token counts")
    return tuple(value)


def _check_axis(name: str, axis: tuple[int, ...]) -> None:
    whole = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in axis)
    if not whole or len(axis) < 2 or any(low >= high for low, high in pairwise(axis)):
        raise UsageError(
            f"a prefill profile's {name} must be two or more whole numbers that rise; found {list(axis)}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
