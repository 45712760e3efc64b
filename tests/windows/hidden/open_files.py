"""Windows' refusal to delete or replace a file that is open, for files that this process has open. Not a test file."""

import os
from contextlib import suppress


def refusing(call, winerror: int):
    """os.unlink, os.rename or os.replace, which refuses open files with that error of Windows."""

    def refused(*paths, **how):
        if "dir_fd" not in how and _open_files() & {os.path.realpath(path) for path in paths}:
            error = PermissionError(13, "it is being used by another process", os.fspath(paths[-1]))
            error.winerror = winerror
            raise error
        return call(*paths, **how)

    return refused


def _open_files() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found
