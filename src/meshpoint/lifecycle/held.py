"""Un-acked requests of tasks that wait in memory: a crash gives them back, and they run again."""

from __future__ import annotations

from collections.abc import Iterable

from meshpoint.model.ids import TaskId
from meshpoint.ports.broker import Delivery


class Held:
    """Deliveries by task."""

    def __init__(self) -> None:
        self._by_task: dict[TaskId, list[Delivery]] = {}

    def __len__(self) -> int:
        return len(self._by_task)

    def __contains__(self, task_id: TaskId) -> bool:
        return task_id in self._by_task

    def hold(self, task_id: TaskId, deliveries: Iterable[Delivery]) -> None:
        """Keep `deliveries` un-acked until the task has ended."""
        self._by_task.setdefault(task_id, []).extend(deliveries)

    def let_go(self, task_id: TaskId) -> list[Delivery]:
        """What was held for the task, to be settled now."""
        return self._by_task.pop(task_id, [])

    def let_all_go(self) -> list[Delivery]:
        """Everything, to be given back."""
        return [delivery for task_id in list(self._by_task) for delivery in self.let_go(task_id)]

    def room(self, limit: int) -> int:
        """How many tasks to leave room for: doubles as tasks are held, so that prefetch is seldom changed."""
        held = sum(len(deliveries) for deliveries in self._by_task.values())
        return min(1 << held.bit_length(), limit) if held else 0
