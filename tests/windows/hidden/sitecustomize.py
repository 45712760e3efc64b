"""Hides from RAGBlend's modules what Windows does not have, in every Python that has this folder on PYTHONPATH.

They get copies of `os`, `socket` and `signal`; other packages keep the real ones. An open file can be neither deleted
nor replaced. `msvcrt` has locks only, by Linux's own of an open file.
"""

import builtins
import fcntl
import os
import signal
import socket
import struct
import types

from open_files import refusing

MISSING = {"fcntl", "resource", "pwd", "grp", "termios"}
FLAGS = ("O_", "RWF_", "POSIX_", "posix_", "sched_", "SCHED_")
KEPT_FLAGS = {"O_RDONLY", "O_WRONLY", "O_RDWR", "O_APPEND", "O_CREAT", "O_TRUNC", "O_EXCL"}
CALLS = """
    fork forkpty killpg getuid geteuid getgid getegid getpgid getpgrp setsid setpgid fchmod fchown chown lchown pread
    preadv pwrite pwritev readv writev sysconf register_at_fork statvfs fdatasync mkfifo mknod uname nice getloadavg
    sync wait wait3 wait4 WNOHANG sendfile openpty pipe2 set_blocking supports_dir_fd
"""
KEPT_SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
HIDDEN = {
    os: {name for name in vars(os) if name.startswith(FLAGS)} - KEPT_FLAGS | set(CALLS.split()),
    socket: {"AF_UNIX", "SO_PEERCRED", "SCM_RIGHTS", "send_fds", "recv_fds"},
    signal: {each.name for each in signal.Signals} - KEPT_SIGNALS | {"pthread_sigmask", "setitimer", "alarm"},
}


def hold(fd: int, mode: int, nbytes: int) -> None:
    """msvcrt.locking."""
    what = struct.pack("hhqqi4x", mode, os.SEEK_SET, os.lseek(fd, 0, os.SEEK_CUR), nbytes, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, what)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error


def without(module: types.ModuleType, names: set[str]) -> types.ModuleType:
    found = types.ModuleType(module.__name__)
    found.__dict__.update({name: value for name, value in vars(module).items() if name not in names})
    return found


os.unlink = os.remove = refusing(os.unlink, 32)
os.replace, os.rename = refusing(os.replace, 5), refusing(os.rename, 32)
COPIES = {module.__name__: without(module, names) for module, names in HIDDEN.items()}
COPIES["msvcrt"] = types.ModuleType("msvcrt")
vars(COPIES["msvcrt"]).update(locking=hold, LK_NBLCK=fcntl.F_WRLCK, LK_UNLCK=fcntl.F_UNLCK)
real_import = builtins.__import__


def import_as_on_windows(name, given=None, *more, **named):
    if str((given or {}).get("__package__")).startswith("ragblend"):
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in COPIES:
            return COPIES[name]
        if name == "sys" and given["__name__"] == "ragblend.app.linux":
            return types.SimpleNamespace(platform="win32")
    return real_import(name, given, *more, **named)


builtins.__import__ = import_as_on_windows
