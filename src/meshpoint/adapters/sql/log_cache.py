"""The long logs that a store has read recently, so that not every segment reads a whole log.

A replica that runs several segments of a task reads only the new entries and the last cached one.
If that entry still exists, with the same run, all entries before it are unchanged: entries never
change, a log is only deleted as a whole, and run ids are unique. So replicas need not inform each
other of what they write.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MIN_LOG_BYTES = 256 * 1024
"""Smaller logs are read whole, which takes less than a millisecond."""

MAX_CACHE_BYTES = 8 * 1024 * 1024
_ENTRY_BYTES = 64
"""Memory that an entry takes in addition to its bytes."""


@dataclass(frozen=True, slots=True)
class CachedLog:
    """The entries of a log up to number `seq`, which the run `run_id` wrote."""

    entries: Sequence[bytes]
    seq: int
    run_id: str
    size: int

    def extend(self, rows: Sequence[Any]) -> CachedLog | None:
        """Add the new entries, or return `None` if the log has been replaced.

        `rows` are the entries from `seq` on, in order. Each has `seq` and `entry`, and the first
        and the last have `run_id`.
        """
        if not rows or (rows[0].seq, rows[0].run_id) != (self.seq, self.run_id):
            return None
        return _join(self.entries[:-1], self.size - _size(self.entries[-1:]), rows)


def read_log(rows: Sequence[Any]) -> CachedLog | None:
    """The log that consists of `rows`, in the form of `CachedLog.extend`; `None` without rows."""
    return _join((), 0, rows) if rows else None


def _join(entries: Sequence[bytes], size: int, rows: Sequence[Any]) -> CachedLog:
    added = [row.entry for row in rows]
    return CachedLog([*entries, *added], rows[-1].seq, rows[-1].run_id, size + _size(added))


def _size(entries: Sequence[bytes]) -> int:
    return sum(map(len, entries)) + _ENTRY_BYTES * len(entries)


class LogCache:
    """Recently read logs of at least `min_bytes` each and at most `max_bytes` in all.

    Any thread may use it.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES, min_bytes: int = MIN_LOG_BYTES) -> None:
        self._max_bytes, self._min_bytes = max_bytes, min_bytes
        self._logs: dict[str, CachedLog] = {}
        self._size = 0
        self._lock = threading.Lock()

    def find(self, task_id: str) -> CachedLog | None:
        """The log of a task as last read. It may have changed since."""
        return self._logs.get(task_id)

    def store(self, task_id: str, log: CachedLog) -> None:
        """Cache a log, and evict the least recently read logs."""
        with self._lock:
            if (earlier := self._logs.pop(task_id, None)) is not None:
                self._size -= earlier.size
            if not self._min_bytes <= log.size <= self._max_bytes:
                return
            self._logs[task_id] = log
            self._size += log.size
            while self._size > self._max_bytes:
                oldest = next(iter(self._logs))
                self._size -= self._logs.pop(oldest).size
