"""Which file system a folder is on, as far as Linux tells: locks and SQLite's log are not reliable on a network's."""

import logging
import re
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "afs",
    "ncpfs",
    "ceph",
    "glusterfs",
    "lustre",
    "beegfs",
    "gpfs",
    "9p",
}
_NETWORK |= {
    f"fuse.{kind}"
    for kind in ("sshfs", "glusterfs", "ceph", "davfs", "s3fs", "rclone", "gcsfuse", "smbnetfs")
}
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in a mount point is \040


def network_file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the network file system that `path` is on; None on a local one, and where nobody can tell."""
    try:
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    folders = {str(folder) for folder in (resolved, *resolved.parents)}
    longest, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]) if len(fields) > 4 else ""
        if point in folders and len(point) >= longest:  # a later mount hides an earlier one on the same point
            longest, kind = len(point), after.split(" ")[0]
    return kind if kind in _NETWORK else None


@cache
def warn_of_network(root: Path) -> None:
    """Say it, once in a process, when `root` is on a network file system."""
    kind = network_file_system(root)
    if kind is not None:
        log.warning(
            "the KV store at %s is on a network file system (%s), where locks and SQLite's log are not reliable: "
            "use it from one machine and one process at a time, or choose a home on a local disk (RAGBLEND_HOME)",
            root,
            kind,
        )
