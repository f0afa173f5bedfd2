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
class Holder:
    """Who holds a lock. `since` is for people."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}"


class FileLock:
    """An exclusive lock on a file. Two of them exclude each other in one process too."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def acquire(cls, path: Path) -> Self:
        """The lock, as soon as nobody else has it."""
        handle = _opened(path)
        _flock(handle, wait=True)
        return cls(handle)

    @classmethod
    def try_acquire(cls, path: Path, *, tell: bool = True) -> Self | None:
        """The lock; None: somebody else has it. `tell` writes into the file who has it."""
        handle = _opened(path)
        if not _flock(handle, wait=False):
            os.close(handle)
            return None
        if tell:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            told = json.dumps(asdict(Holder(os.getpid(), socket.gethostname(), since))).encode()
            os.ftruncate(handle, 0)
            os.pwrite(handle, told, 0)
        return cls(handle)

    def release(self) -> None:
        """Let the next one have it."""
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def holder_of(path: Path) -> Holder | None:
    """Who took the lock at `path` last; None: nobody, or somebody who has not written it yet."""
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # not inheritable: a child must not keep the lock


def _flock(handle: int, *, wait: bool) -> bool:
    if find_spec("fcntl") is None:
        os.close(handle)
        fix = "run it on Linux or macOS, or in WSL"
        raise ConfigurationError("meshpoint exec", "this platform has no fcntl, which locks its sessions", fix)
    fcntl: Any = import_module("fcntl")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
