"""File locks, which the kernel releases when their process dies for any reason."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from meshpoint.errors import ConfigurationError


class FileLock:
    """An exclusive lock on a file. It also excludes other locks in the same process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, path: Path) -> Self:
        """Wait for the lock."""
        fd = _open_lock_file(path)
        _flock(fd, wait=True)
        return cls(fd)

    @classmethod
    def try_acquire(cls, path: Path, *, record_holder: bool = True) -> Self | None:
        """Acquire the lock without waiting; `None` if it is held.

        With `record_holder`, writes this process's details into the file.
        """
        fd = _open_lock_file(path)
        if not _flock(fd, wait=False):
            os.close(fd)
            return None
        if record_holder:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(holder).encode(), 0)
        return cls(fd)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def read_holder(path: Path) -> str | None:
    """Describe the last recorded holder of the lock at `path`; `None` if none is recorded."""
    try:
        holder = json.loads(path.read_bytes())
        return f"pid {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _open_lock_file(path: Path) -> int:
    # Not inheritable: a child must not keep the lock. Not a link: the file is overwritten.
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)


def _flock(fd: int, *, wait: bool) -> bool:
    if find_spec("fcntl") is None:
        os.close(fd)
        fix = "run it on Linux or macOS, or in WSL"
        raise ConfigurationError(
            "meshpoint exec", "this platform has no fcntl, which is needed to lock sessions", fix
        )
    fcntl: Any = import_module("fcntl")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
