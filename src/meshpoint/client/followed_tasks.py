"""Recently followed tasks, so that a stream can be reopened."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from meshpoint.client.open_task import OpenTask

_Key: TypeAlias = tuple[str, str]
"""The name of an agent, and the id of its task."""

_MAX_TASKS = 1_000
_MAX_BYTES = 16 * 1024 * 1024
"""Maximum bytes of the updates and outcomes of all tasks together."""


class FollowedTasks:
    """Keeps the tasks whose updates were read last, up to a number of tasks and bytes.

    A stream of updates often ends before its task, for example when a browser reconnects. The next
    stream then continues in the same task, and the outcome is not lost meanwhile.
    """

    def __init__(self) -> None:
        self._tasks: OrderedDict[_Key, tuple[OpenTask, int]] = OrderedDict()
        self._bytes = 0

    def keep(self, task: OpenTask) -> None:
        """Keep a task. It is dropped after all others."""
        self.discard(task.agent, task.id)
        self._tasks[task.agent, task.id] = task, task.kept_bytes
        self._bytes += task.kept_bytes
        self._trim()

    def measure(self, task: OpenTask) -> None:
        """Update the size of a task that has received a message, if it is kept."""
        key = task.agent, task.id
        known = self._tasks.get(key)
        if known is not None and known[0] is task:
            self._bytes += task.kept_bytes - known[1]
            self._tasks[key] = task, task.kept_bytes
            self._trim()

    def find(self, agent: str, task_id: str) -> OpenTask | None:
        """The kept task with this id, or `None`."""
        known = self._tasks.get((agent, task_id))
        return None if known is None else known[0]

    def forget(self, task: OpenTask) -> None:
        """Drop this task, but not a later one with the same id."""
        if self.find(task.agent, task.id) is task:
            self.discard(task.agent, task.id)

    def discard(self, agent: str, task_id: str) -> None:
        """Drop the task with this id, if one is kept."""
        _, size = self._tasks.pop((agent, task_id), (None, 0))
        self._bytes -= size

    def _trim(self) -> None:
        while self._tasks and (len(self._tasks) > _MAX_TASKS or self._bytes > _MAX_BYTES):
            self.discard(*next(iter(self._tasks)))
