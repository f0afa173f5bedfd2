"""What other sessions were seen to hold, so that nobody waits for it again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

_WAITED = 10.0  # seconds
_HELD = 10.0  # seconds
_MOST = 10_000


class HeldRows:
    """Remembers for a few seconds that a lock was not free in time, and which tasks were left out for one."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._waited_until = float("-inf")
        self._tasks: dict[str, float] = {}

    @property
    def skipping(self) -> bool:
        """Whether to skip rows that others hold instead of waiting for them."""
        return self._clock() < self._waited_until

    def waited(self) -> None:
        """A statement waited in vain."""
        self._waited_until = self._clock() + _WAITED

    def note(self, task_ids: Iterable[str]) -> None:
        """These were left out."""
        now = self._clock()
        self._tasks = {task_id: until for task_id, until in self._tasks.items() if until > now}
        if len(self._tasks) < _MOST:
            self._tasks.update(dict.fromkeys(task_ids, now + _HELD))

    def among(self, task_ids: Iterable[str]) -> set[str]:
        """Those that were left out a moment ago: they take a path on which they hold up nobody else."""
        if not self._tasks:
            return set()
        now = self._clock()
        return {task_id for task_id in task_ids if self._tasks.get(task_id, now) > now}
