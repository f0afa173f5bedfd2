"""The logs that a store has read last, so that a long log is not read again for each segment.

A replica that runs several segments of a task reads only what was appended in between, and the
last entry that it has read before. If that entry is still there, with the same run, then so are
all entries before it: entries never change, a log is only ever deleted as a whole, and no other
run has the id of that run. So no other replica needs to say what it has written.
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
    """The entries of a log up to `seq`, which the run `run_id` has written."""

    entries: Sequence[bytes]
    seq: int
    run_id: str
    size: int

    def extend(self, rows: Sequence[Any]) -> CachedLog | None:
        """Add what was appended since, or return `None` if the log is another one by now.

        `rows` have `seq`, `entry`, and `run_id` in the first and the last row. They are those from
        `seq` on, in order.
        """
        if not rows or (rows[0].seq, rows[0].run_id) != (self.seq, self.run_id):
            return None
        return _join((*self.entries[:-1],), self.size - _size(self.entries[-1:]), rows)


def read_log(rows: Sequence[Any]) -> CachedLog | None:
    """The whole log in `rows`, which are like those of `CachedLog.extend`; `None` without rows."""
    return _join((), 0, rows) if rows else None


def _join(entries: Sequence[bytes], size: int, rows: Sequence[Any]) -> CachedLog:
    added = [row.entry for row in rows]
    return CachedLog([*entries, *added], rows[-1].seq, rows[-1].run_id, size + _size(added))


def _size(entries: Sequence[bytes]) -> int:
    return sum(map(len, entries)) + _ENTRY_BYTES * len(entries)


class LogCache:
    """Logs of at least `min_bytes` that together have at most `max_bytes`, the last used ones.

    Any thread may use it.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES, min_bytes: int = MIN_LOG_BYTES) -> None:
        self._max_bytes, self._min_bytes = max_bytes, min_bytes
        self._logs: dict[str, CachedLog] = {}
        self._size = 0
        self._lock = threading.Lock()

    def find(self, task_id: str) -> CachedLog | None:
        """The log of a task as it was read last. It may have changed since."""
        return self._logs.get(task_id)

    def store(self, task_id: str, log: CachedLog) -> None:
        """Remember a log, and forget those that were not used for longest."""
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
