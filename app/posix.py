"""Operating-system calls of the app that exist on POSIX only: limits of a process."""

import resource

import psutil  # type: ignore[import-untyped]


def disable_core_dumps() -> None:
    """Write no core dump if this process crashes: it would have the text of documents."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_allocations(more_bytes: int) -> None:
    """Let this process allocate at most so much more than it has now. Enforced on Linux only."""
    if used := getattr(psutil.Process().memory_info(), "data", 0):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + more_bytes, hard))
