"""The rate limit per task, and the number of tasks it remembers."""

from __future__ import annotations

from datetime import UTC, datetime

from meshpoint.engine.throttle import Throttle
from meshpoint.model.ids import TaskId

LOUD_TASK = TaskId("loud")


def create_throttle() -> Throttle:
    return Throttle(2, lambda: datetime(2026, 1, 1, tzinfo=UTC))


def test_dropped_events_are_counted_for_each_task() -> None:
    throttle = create_throttle()
    assert [throttle.try_consume(LOUD_TASK) for _ in range(3)] == [True, True, False]
    assert [throttle.count_dropped(LOUD_TASK) for _ in range(10)] == [1, *[None] * 8, 10]
    assert throttle.count_dropped(TaskId("other")) == 1


def test_only_the_most_recent_tasks_are_remembered() -> None:
    throttle = create_throttle()
    throttle.count_dropped(LOUD_TASK)
    for number in range(9_999):
        throttle.count_dropped(TaskId(str(number)))
    assert (
        throttle.count_dropped(LOUD_TASK) is None
    )  # second event of a task that is still remembered
    for number in range(10_000):
        throttle.count_dropped(TaskId(str(number)))
    assert throttle.count_dropped(LOUD_TASK) == 1
