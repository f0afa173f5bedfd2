"""A per-task rate limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from meshpoint.model.ids import TaskId

_MOST_TASKS = 10_000
"""Maximum tasks remembered. The most recent ones are kept."""


@dataclass(slots=True)
class _Budget:
    left: float
    at: datetime
    dropped: int = 0


class Throttle:
    """Allows `rate` events per second for each task, with bursts of the same size."""

    def __init__(self, rate: int, now: Callable[[], datetime]) -> None:
        self._rate, self._now = rate, now
        self._budgets: OrderedDict[TaskId, _Budget] = OrderedDict()

    def lets_through(self, task_id: TaskId) -> bool:
        """Consume one event from the task's budget. Returns `False` if none is left."""
        budget, now = self._budget(task_id), self._now()
        passed = max(now - budget.at, timedelta())  # setting the clock back adds no budget
        budget.left = min(self._rate, budget.left + self._rate * passed.total_seconds())
        budget.at = now
        if budget.left < 1:
            return False
        budget.left -= 1
        return True

    def drop(self, task_id: TaskId) -> int | None:
        """Count a dropped event. Returns the total if it should be reported: 1, 10, 100, ..."""
        budget = self._budget(task_id)
        budget.dropped += 1
        digits = str(budget.dropped)
        return budget.dropped if digits[0] == "1" and not digits[1:].strip("0") else None

    def _budget(self, task_id: TaskId) -> _Budget:
        budget = self._budgets.pop(task_id, None) or _Budget(self._rate, self._now())
        self._budgets[task_id] = budget
        if len(self._budgets) > _MOST_TASKS:
            self._budgets.popitem(last=False)
        return budget
