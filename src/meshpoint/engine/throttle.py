"""Rate limits per task or per sender."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

MAX_STATUSES_PER_SECOND = 20
"""Maximum status updates per second that one task sends, and that are forwarded for it."""
_MAX_KEYS = 10_000
"""Maximum keys whose rate is remembered. The most recent ones are kept."""


@dataclass(slots=True)
class _Budget:
    remaining: float
    updated_at: datetime
    dropped: int = 0


class Throttle:
    """Allows `rate` events per second for each task or sender, with bursts of the same size."""

    def __init__(self, rate: int, now: Callable[[], datetime]) -> None:
        self._rate, self._now = rate, now
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()

    def try_consume(self, key: str) -> bool:
        """Consume one event from the budget of `key`. Returns `False` if none is left."""
        budget, now = self._get_budget(key), self._now()
        elapsed = max(
            now - budget.updated_at, timedelta()
        )  # setting the clock back adds no budget
        budget.remaining = min(self._rate, budget.remaining + self._rate * elapsed.total_seconds())
        budget.updated_at = now
        if budget.remaining < 1:
            return False
        budget.remaining -= 1
        return True

    def count_dropped(self, key: str) -> int | None:
        """Count a dropped event. Returns the total if it should be reported: 1, 10, 100, ..."""
        budget = self._get_budget(key)
        budget.dropped += 1
        digits = str(budget.dropped)
        return budget.dropped if digits[0] == "1" and not digits[1:].strip("0") else None

    def _get_budget(self, key: str) -> _Budget:
        budget = self._budgets.pop(key, None) or _Budget(self._rate, self._now())
        self._budgets[key] = budget
        if len(self._budgets) > _MAX_KEYS:
            self._budgets.popitem(last=False)
        return budget
