"""Unacked requests of in-process tasks. After a crash the broker redelivers them to run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum, auto

from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address, Message
from meshpoint.ports.broker import Delivery

_MAX_COPIES = 8
"""Maximum copies held per request. Each raises the prefetch, so a sender needs a limit."""


def may_run_elsewhere(requests: Iterable[Delivery]) -> bool:
    """Whether another replica may run the task: a request was redelivered or lost."""
    return any(delivery.delivery_count > 1 or delivery.lost for delivery in requests)


class UnackedKind(Enum):
    """Why a request is unacked."""

    ROOT = auto()  # the task waits; the request came from outside
    DELAYED = auto()  # delayed, and not yet begun
    NESTED = auto()  # the task waits; the request came from another task
    ENDED = auto()  # the task has ended; the reply waits for its address


class UnackedRequests:
    """Unacked deliveries, counted by source queue.

    `by_task` has the tasks with their deliveries, for reading. The reply of an ended task may wait
    without a delivery.
    """

    def __init__(self) -> None:
        self.by_task: dict[TaskId, list[Delivery]] = {}
        self._ended: set[TaskId] = set()
        self._delayed: set[TaskId] = set()
        self._counts: Counter[tuple[Address, UnackedKind]] = Counter()

    @property
    def delayed(self) -> int:
        """Number of delayed tasks that have not begun."""
        return len(self._delayed)

    @property
    def ended(self) -> int:
        """The number of ended tasks whose reply waits for its address."""
        return len(self._ended)

    def has_ended(self, task_id: TaskId) -> bool:
        """Whether only the reply of the task is missing."""
        return task_id in self._ended

    def first_request(self, task_id: TaskId) -> Message | None:
        """The first request of a task that has not ended."""
        deliveries = self.by_task.get(task_id)
        return deliveries[0].message if deliveries and task_id not in self._ended else None

    def may_run_elsewhere(self, task_id: TaskId) -> bool:
        """Whether another replica may run the task: a request of it was redelivered or lost."""
        return may_run_elsewhere(self.by_task.get(task_id, ()))

    def add(self, task_id: TaskId, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Keep `deliveries` unacked until the task has ended and its reply is confirmed.

        Returns the copies to ack: earlier copies of redelivered requests, and the oldest copies
        beyond the limit.
        """
        unacked = self.by_task.setdefault(task_id, [])
        surplus: list[Delivery] = []
        for delivery in deliveries:
            if (
                earlier := next((copy for copy in unacked if _is_redelivery(copy, delivery)), None)
            ) is not None:
                unacked.remove(earlier)
                surplus.append(earlier)
            unacked.append(delivery)
            self._counts[self._key(task_id, delivery)] += 1
        surplus += unacked[:-_MAX_COPIES]
        unacked[:] = unacked[-_MAX_COPIES:]
        for delivery in surplus:
            self._counts[self._key(task_id, delivery)] -= 1
        return surplus

    def mark_ended(self, task_id: TaskId) -> None:
        """Mark the task as ended: only its reply is missing from now on."""
        deliveries = self.remove(task_id)
        self._ended.add(task_id)
        self.add(task_id, deliveries)

    def mark_delayed(self, task_id: TaskId) -> None:
        """Mark the task as delayed."""
        deliveries = self.remove(task_id)
        self._delayed.add(task_id)
        self.add(task_id, deliveries)

    def mark_begun(self, task_id: TaskId) -> None:
        """Clear the mark of a delayed task that now begins."""
        if task_id in self._delayed:
            self.add(task_id, self.remove(task_id))

    def remove(self, task_id: TaskId) -> list[Delivery]:
        """Remove and return the deliveries held for the task, for the caller to settle."""
        removed = self.by_task.pop(task_id, [])
        for delivery in removed:
            self._counts[self._key(task_id, delivery)] -= 1
        self._ended.discard(task_id)
        self._delayed.discard(task_id)
        return removed

    def remove_requests(self, task_id: TaskId) -> list[Delivery]:
        """Remove and return the requests of an ended task, to be acked while its reply waits."""
        removed = self.remove(task_id)
        self.mark_ended(task_id)
        return removed

    def remove_all(
        self, should_stay: Callable[[TaskId], bool]
    ) -> tuple[list[Delivery], list[TaskId]]:
        """Remove and return the requests to requeue, except for tasks that stay.

        Also returns the tasks without a request, whose replies are lost.
        """
        removed_ids = [task_id for task_id in self.by_task if not should_stay(task_id)]
        lost = [
            task_id
            for task_id in removed_ids
            if task_id in self._ended and not self.by_task[task_id]
        ]
        return [delivery for task_id in removed_ids for delivery in self.remove(task_id)], lost

    def count(self, address: Address, *kinds: UnackedKind) -> int:
        """Count deliveries of these kinds from the queue at `address`."""
        return sum(self._counts[address, kind] for kind in kinds)

    def _key(self, task_id: TaskId, delivery: Delivery) -> tuple[Address, UnackedKind]:
        if task_id in self._ended:
            return delivery.address, UnackedKind.ENDED
        if task_id in self._delayed:
            return delivery.address, UnackedKind.DELAYED
        return (
            delivery.address,
            UnackedKind.NESTED if delivery.message.nested else UnackedKind.ROOT,
        )


def _is_redelivery(earlier: Delivery, later: Delivery) -> bool:
    """Whether `later` is a redelivery of the same message."""
    return (
        later.delivery_count > earlier.delivery_count
        and later.address == earlier.address
        and later.message == earlier.message
    )
