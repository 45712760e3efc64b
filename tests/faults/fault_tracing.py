"""ptrace through ctypes: stop a child at each of its system calls, let it go on, kill it there, or fail the call.

x86_64 Linux only; `unavailable` says why not elsewhere. The child marks where it is to be watched by asking for the
process group of two impossible processes.
"""

import ctypes
import errno
import os
import platform
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_TRACEME, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS = 0, 12, 13, 24, 0x4200
_TRACESYSGOOD, _EXITKILL = 0x1, 0x100000
_STOPPED_AT_CALL = signal.SIGTRAP | 0x80
_BEGIN, _END = 0x7FFF0001, 0x7FFF0002
_GETPGID = 121
_REGISTERS = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base "
    "ds es fs gs"
)

READING = {
    0: "read", 4: "stat", 5: "fstat", 6: "lstat", 8: "lseek", 17: "pread64", 72: "fcntl", 73: "flock",
    89: "readlink", 217: "getdents64", 262: "newfstatat", 295: "preadv", 327: "preadv2", 332: "statx",
}  # fmt: skip
CHANGING = {
    1: "write", 18: "pwrite64", 20: "writev", 74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate",
    82: "rename", 83: "mkdir", 84: "rmdir", 86: "link", 87: "unlink", 90: "chmod", 91: "fchmod", 93: "fchown",
    258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat", 268: "fchmodat", 285: "fallocate",
    296: "pwritev", 316: "renameat2", 328: "pwritev2",
}  # fmt: skip
OPENING = {2: "open", 3: "close", 257: "openat"}
NAMES = {**READING, **CHANGING, **OPENING}
# What a full disk can say; an input/output error can come from any of NAMES.
NEEDS_ROOM = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "fsync", "fdatasync", "ftruncate", "fallocate",
              "rename", "renameat", "renameat2", "link", "linkat", "mkdir", "mkdirat", "open", "openat"}  # fmt: skip


class Registers(ctypes.Structure):
    """user_regs_struct of <sys/user.h>."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in _REGISTERS.split()]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long

KILL = "kill"
Decide = Callable[[int, str], str | int | None]  # (how many calls before, name) -> KILL, an errno, or None


@dataclass
class Traced:
    """What one traced child did: its calls between the marks, how it ended, and which calls were changed."""

    calls: list[str] = field(default_factory=list)
    changed: int = 0
    status: int = 0

    @property
    def killed(self) -> bool:
        return os.WIFSIGNALED(self.status)


def begin() -> None:
    """In the child: from here on every call is shown to `decide`."""
    with suppress(ProcessLookupError):
        os.getpgid(_BEGIN)


def end() -> None:
    """In the child: until here."""
    with suppress(ProcessLookupError):
        os.getpgid(_END)


def trace(child: Callable[[], None], decide: Decide) -> Traced:
    """Fork `child`, which exits 0 unless it raises, and ask `decide` at the entry of each marked call."""
    pid = os.fork()
    if pid == 0:
        _be_traced(child)
    os.waitpid(pid, 0)
    _ptrace(_SETOPTIONS, pid, _TRACESYSGOOD | _EXITKILL)
    traced, entering, watched, fail = Traced(), True, False, 0
    _ptrace(_SYSCALL, pid, 0)
    while True:
        _, traced.status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(traced.status):
            return traced
        if os.WSTOPSIG(traced.status) != _STOPPED_AT_CALL:
            _ptrace(_SYSCALL, pid, os.WSTOPSIG(traced.status))
            continue
        registers = _registers(pid)
        if entering:
            mark = registers.rdi & 0xFFFFFFFF if registers.orig_rax == _GETPGID else 0
            watched = mark == _BEGIN or (watched and mark != _END)
            if watched and not mark:
                fail = _enter(pid, registers, traced, decide)
        elif fail:
            registers.rax = (1 << 64) - fail
            _ptrace(_SETREGS, pid, registers)
            fail = 0
        entering = not entering
        _ptrace(_SYSCALL, pid, 0)


def _enter(pid: int, registers: Registers, traced: Traced, decide: Decide) -> int:
    """Ask, and skip the call in the kernel where it is to fail; the errno to return at its exit."""
    name = NAMES.get(registers.orig_rax, str(registers.orig_rax))
    verdict = decide(len(traced.calls), name)
    traced.calls.append(name)
    if verdict is None:
        return 0
    traced.changed += 1
    registers.orig_rax = (1 << 64) - 1
    _ptrace(_SETREGS, pid, registers)
    if isinstance(verdict, int):
        return verdict
    os.kill(pid, signal.SIGKILL)
    return 0


def _be_traced(child: Callable[[], None]) -> None:
    status = 1
    try:
        _ptrace(_TRACEME, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        child()
        status = 0
    finally:
        os._exit(status)


def _registers(pid: int) -> Registers:
    registers = Registers()
    _ptrace(_GETREGS, pid, registers)
    return registers


def _ptrace(request: int, pid: int, data: int | Registers) -> None:
    argument = ctypes.byref(data) if isinstance(data, Registers) else data
    if _libc.ptrace(request, pid, None, argument) == -1:
        code = ctypes.get_errno()
        if code != errno.ESRCH:  # killed meanwhile: waitpid will tell
            raise OSError(code, f"ptrace {request}: {os.strerror(code)}")


def unavailable() -> str | None:
    """Why nothing can be traced here; None where it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the harness knows Linux on x86_64 only, not {platform.system()} on {platform.machine()}"

    def child() -> None:
        begin()
        os.stat("/")
        end()

    try:
        traced = trace(child, lambda number, name: None)
    except OSError as error:
        return f"ptrace is not allowed: {error}"
    return None if traced.calls and traced.status == 0 else f"ptrace does not work: {traced}"
