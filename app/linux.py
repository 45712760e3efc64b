"""Takes rights away from a process that parses untrusted files, by Landlock and seccomp, which only Linux has.

Neither can be undone, and neither needs root. What the kernel does not offer is left out, and `doctor` reports it.
Sources: landlock(7), seccomp(2), and the kernel's uapi/linux/landlock.h.
"""

import ctypes
import errno
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

IS_LINUX = sys.platform == "linux"
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, the same on all processors
RULESET_VERSION, PATH_BENEATH = 1, 1
READ_FILE, READ_DIR, WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
# By version of Landlock: how many rights on files it knows (executing, writing, ..., truncating, device controls).
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
TCP_SINCE, TCP_RIGHTS = 4, 0b11  # to bind and to connect
SCOPES_SINCE, SCOPES = 6, 0b11  # other processes' abstract sockets, and signals to them

NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER_MODE = 38, 22, 2  # of prctl
LOAD, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of classic BPF
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NUMBER_AT, PROCESSOR_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data
FIRST_X32_CALL = 0x40000000  # the x32 ABI's numbers of x86-64's system calls
CLONE3, CLONE_THREAD = 435, 0x10000  # a system call; the flag of clone for a new thread
# For each processor: its number in seccomp's data; the number of clone; the numbers of the refused system calls socket,
# io_uring_setup, execve, execveat, fchmod, fchmodat, fchmodat2, chmod, fork, vfork.
PROCESSORS = {
    "x86_64": (0xC000003E, 56, (41, 425, 59, 322, 91, 268, 452, 90, 57, 58)),
    "aarch64": (0xC00000B7, 220, (198, 425, 221, 281, 52, 53, 452)),
}


def landlock_version() -> int:
    """The version of Landlock that this kernel offers; 0 if none."""
    if not IS_LINUX:
        return 0
    return max(0, _libc().syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(RULESET_VERSION)))


def restrict_process(readable: Iterable[Path | str], writable: Iterable[Path | str] = ()) -> None:
    """Restrict this process to these files and folders with their contents: no other file, no socket, no new process.

    Open files stay open. Paths that do not exist are ignored. Only the calling thread and the threads that it starts
    are restricted, so call it in a process of one thread. On other systems than Linux nothing is restricted.
    """
    if not IS_LINUX:
        return
    libc = _libc()
    # Landlock and seccomp require it, so that no setuid program gets its rights back.
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _restrict_files(libc, readable, writable)
    _restrict_system_calls(libc)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _restrict_files(
    libc: ctypes.CDLL, readable: Iterable[Path | str], writable: Iterable[Path | str]
) -> None:
    version = landlock_version()
    if not version:
        return
    attributes = ruleset_attributes(version)
    ruleset = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    try:
        rules = [(path, READ_FILE | READ_DIR) for path in readable]
        for path, rights in rules + [(path, READ_FILE | WRITE_FILE) for path in writable]:
            with suppress(OSError):
                _allow(libc, ruleset, path, rights)
        libc.syscall(RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def ruleset_attributes(version: int) -> bytes:
    """The rights to take away (on files, of TCP, scopes) as struct landlock_ruleset_attr; version: at least 1."""
    files = max(bits for since, bits in FILE_RIGHTS.items() if version >= since)
    tcp = TCP_RIGHTS if version >= TCP_SINCE else 0
    return struct.pack("QQQ", (1 << files) - 1, tcp, SCOPES if version >= SCOPES_SINCE else 0)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path | str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= ~READ_DIR  # refused for a file
        rule = struct.pack("=Qi", rights, descriptor)
        libc.syscall(ADD_RULE, ruleset, ctypes.c_int(PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def _restrict_system_calls(libc: ctypes.CDLL) -> None:
    if (processor := PROCESSORS.get(platform.machine())) is None:
        return
    program = b"".join(struct.pack("HBBI", *step) for step in filter_steps(*processor))
    buffer = ctypes.create_string_buffer(program)
    libc.prctl(
        SET_SECCOMP, FILTER_MODE, struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)), 0, 0
    )


def filter_steps(processor: int, clone: int, refused: Iterable[int]) -> Iterator[tuple[int, int, int, int]]:
    """A BPF program that refuses these system calls and new processes, as (code, jump if so, jump if not, value)."""
    refuse = (RETURN, 0, 0, FAIL | errno.EACCES)
    yield from ((LOAD, 0, 0, PROCESSOR_AT), (IF_EQUAL, 1, 0, processor), refuse)
    yield from ((LOAD, 0, 0, NUMBER_AT), (IF_AT_LEAST, 0, 1, FIRST_X32_CALL), refuse)
    for number in refused:
        yield from ((IF_EQUAL, 0, 1, number), refuse)
    # A filter cannot see clone3's flags. If clone3 does not exist (ENOSYS), libc uses clone.
    yield from ((IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, FAIL | errno.ENOSYS))
    yield from (
        (IF_EQUAL, 0, 3, clone),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (IF_ANY_BIT, 1, 0, CLONE_THREAD),
        refuse,
    )
    yield (RETURN, 0, 0, ALLOW)
