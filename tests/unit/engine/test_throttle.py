"""The rate limit per task, and the number of tasks it remembers."""

from __future__ import annotations

from datetime import UTC, datetime

from meshpoint.engine.throttle import Throttle
from meshpoint.model.ids import TaskId

LOUD = TaskId("loud")


def a_throttle() -> Throttle:
    return Throttle(2, lambda: datetime(2026, 1, 1, tzinfo=UTC))


def test_dropped_events_are_counted_for_each_task() -> None:
    throttle = a_throttle()
    assert [throttle.lets_through(LOUD) for _ in range(3)] == [True, True, False]
    assert [throttle.drop(LOUD) for _ in range(10)] == [1, *[None] * 8, 10]
    assert throttle.drop(TaskId("other")) == 1


def test_only_the_most_recent_tasks_are_remembered() -> None:
    throttle = a_throttle()
    throttle.drop(LOUD)
    for number in range(9_999):
        throttle.drop(TaskId(str(number)))
    assert throttle.drop(LOUD) is None  # second event of a task that is still remembered
    for number in range(10_000):
        throttle.drop(TaskId(str(number)))
    assert throttle.drop(LOUD) == 1
