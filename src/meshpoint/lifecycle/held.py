"""Un-acked requests of tasks that wait in memory: a crash gives them back, and they run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address, Message
from meshpoint.ports.broker import Delivery


class Held:
    """Deliveries by task, counted by source queue."""

    def __init__(self) -> None:
        self._by_task: dict[TaskId, list[Delivery]] = {}
        self._counts: Counter[tuple[Address, bool]] = Counter()

    def __len__(self) -> int:
        return len(self._by_task)

    def __contains__(self, task_id: TaskId) -> bool:
        return task_id in self._by_task

    def request(self, task_id: TaskId) -> Message | None:
        """The first request of the task."""
        return next((delivery.message for delivery in self._by_task.get(task_id, ())), None)

    def hold(self, task_id: TaskId, deliveries: Iterable[Delivery]) -> None:
        """Keep `deliveries` un-acked until the task has ended."""
        kept = self._by_task.setdefault(task_id, [])
        for delivery in deliveries:
            kept.append(delivery)
            self._counts[delivery.address, delivery.message.nested] += 1

    def let_go(self, task_id: TaskId) -> list[Delivery]:
        """What was held for the task, to be settled now."""
        released = self._by_task.pop(task_id, [])
        for delivery in released:
            self._counts[delivery.address, delivery.message.nested] -= 1
        return released

    def let_all_go(self) -> list[Delivery]:
        """Everything, to be given back."""
        return [delivery for task_id in list(self._by_task) for delivery in self.let_go(task_id)]

    def count(self, address: Address, *, nested: bool) -> int:
        """Count deliveries from the queue at `address` whose request is nested, or is not."""
        return self._counts[address, nested]
