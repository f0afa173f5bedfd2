"""Locks on files: the kernel releases them when their process dies, however it dies."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from meshpoint.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who holds a lock. `since` is for people."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}"


class FileLock:
    """An exclusive lock on a file. Two of them exclude each other in one process too."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, path: Path) -> Self:
        """The lock, as soon as nobody else has it."""
        fd = _open_lock_file(path)
        _flock(fd, wait=True)
        return cls(fd)

    @classmethod
    def try_acquire(cls, path: Path, *, record_holder: bool = True) -> Self | None:
        """The lock; None: somebody else has it. `record_holder` writes into the file who has it."""
        fd = _open_lock_file(path)
        if not _flock(fd, wait=False):
            os.close(fd)
            return None
        if record_holder:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            content = json.dumps(asdict(LockHolder(os.getpid(), socket.gethostname(), since))).encode()
            os.ftruncate(fd, 0)
            os.pwrite(fd, content, 0)
        return cls(fd)

    def release(self) -> None:
        """Let the next one have it."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def read_holder(path: Path) -> LockHolder | None:
    """Who took the lock at `path` last; None: nobody, or somebody who has not written it yet."""
    try:
        return LockHolder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _open_lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # not inheritable: a child must not keep the lock


def _flock(fd: int, *, wait: bool) -> bool:
    if find_spec("fcntl") is None:
        os.close(fd)
        fix = "run it on Linux or macOS, or in WSL"
        raise ConfigurationError("meshpoint exec", "this platform has no fcntl, which locks its sessions", fix)
    fcntl: Any = import_module("fcntl")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
