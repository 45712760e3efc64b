"""Counts and sizes as people write them."""


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 passage", "2 passages"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """A number of bytes in a readable unit: "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
