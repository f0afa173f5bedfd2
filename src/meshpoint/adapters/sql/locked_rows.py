"""Memory of rows that other sessions held recently, to avoid waiting for them repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

_SKIP_SECONDS = 10.0
_LOCKED_SECONDS = 10.0
_MAX_TASKS = 10_000


class LockedRows:
    """Remembers for a few seconds that a lock timed out, and which tasks were skipped."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._skip_until = float("-inf")
        self._tasks: dict[str, float] = {}

    @property
    def skip_locked(self) -> bool:
        """Whether to skip locked rows instead of waiting for them."""
        return self._clock() < self._skip_until

    def record_timeout(self) -> None:
        """Start skipping locked rows, since a statement timed out waiting for one."""
        self._skip_until = self._clock() + _SKIP_SECONDS

    def record_locked(self, task_ids: Iterable[str]) -> None:
        """Remember tasks that were skipped because another session holds a row."""
        now = self._clock()
        self._tasks = {task_id: until for task_id, until in self._tasks.items() if until > now}
        if len(self._tasks) < _MAX_TASKS:
            self._tasks.update(dict.fromkeys(task_ids, now + _LOCKED_SECONDS))

    def recently_locked(self, task_ids: Iterable[str]) -> set[str]:
        """The recently skipped tasks among `task_ids`, to be kept out of batches with others."""
        if not self._tasks:
            return set()
        now = self._clock()
        return {task_id for task_id in task_ids if self._tasks.get(task_id, now) > now}
