"""Whom to kill, and when: decided by what the replicas tell, never by time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from meshpoint.demo.story import Replica, Story

_FRESH = 0.25
"""Seconds that a segment may have run when its replica is chosen; the agent thinks for at least twice as long."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica to be killed, for the tasks that it paused or runs."""

    replica: str
    task_ids: frozenset[str]
    why: str
    remark: str


class Plot:
    """Two kills: one replica while tasks wait that it paused, then the one that goes on with such a task."""

    def __init__(self, story: Story) -> None:
        self._story = story
        # However the requests are shared out, one of three replicas gets this many.
        self._enough = min(4, ceil(story.requests / len(story.replicas)))
        self.first: Kill | None = None
        self.second: Kill | None = None

    def next_kill(self, now: float) -> Kill | None:
        """The kill whose moment has come, once each."""
        if self.first is None:
            self.first = self._with_paused_tasks()
            return self.first
        if self.second is None:
            self.second = self._in_a_segment(self.first.task_ids, now)
            return self.second
        return None

    def _with_paused_tasks(self) -> Kill | None:
        most = max(self._story.alive, key=lambda replica: len(replica.paused), default=None)
        if most is None or len(most.paused) < self._enough:
            return None
        count = len(most.paused)
        tasks = "1 task" if count == 1 else f"{count} tasks"
        return Kill(most.name, frozenset(most.paused), f"with {tasks} paused by it", f"{tasks} paused")

    def _in_a_segment(self, orphans: frozenset[str], now: float) -> Kill | None:
        for replica in self._story.alive:
            if task_id := _running(replica, orphans, now):
                trip = self._story.trips([task_id])
                return Kill(replica.name, frozenset({task_id}), f"while it runs {trip}", f"in {trip}")
        return None


def _running(replica: Replica, orphans: frozenset[str], now: float) -> str | None:
    for place, since in replica.running.items():
        if place.generation and place.task_id in orphans and now - since < _FRESH:
            return place.task_id
    return None
