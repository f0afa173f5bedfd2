"""Whom to kill, and when: decided by what the replicas tell, never by time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from meshpoint.demo.story import Replica, TaskTracker

_MAX_SEGMENT_AGE = 0.25
"""Seconds that a segment may have run when its replica is chosen; the agent thinks for at least twice as long."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica to be killed, for the tasks that it paused or runs."""

    replica: str
    task_ids: frozenset[str]
    reason: str
    state_note: str


class KillPlanner:
    """Two kills: one replica while tasks wait that it paused, then the one that goes on with such a task."""

    def __init__(self, tracker: TaskTracker) -> None:
        self._tracker = tracker
        # However the requests are shared out, one of three replicas gets this many.
        self._min_paused = min(4, ceil(tracker.requests / len(tracker.replicas)))
        self.first_kill: Kill | None = None
        self.second_kill: Kill | None = None

    def next_kill(self, now: float) -> Kill | None:
        """The kill whose moment has come, once each."""
        if self.first_kill is None:
            self.first_kill = self._plan_first_kill()
            return self.first_kill
        if self.second_kill is None:
            self.second_kill = self._plan_second_kill(self.first_kill.task_ids, now)
            return self.second_kill
        return None

    def _plan_first_kill(self) -> Kill | None:
        replica = max(self._tracker.serving_replicas, key=lambda replica: len(replica.paused), default=None)
        if replica is None or len(replica.paused) < self._min_paused:
            return None
        count = len(replica.paused)
        tasks = "1 task" if count == 1 else f"{count} tasks"
        return Kill(replica.name, frozenset(replica.paused), f"with {tasks} paused by it", f"{tasks} paused")

    def _plan_second_kill(self, orphans: frozenset[str], now: float) -> Kill | None:
        for replica in self._tracker.serving_replicas:
            if task_id := _fresh_segment(replica, orphans, now):
                trip = self._tracker.describe_trips([task_id])
                return Kill(replica.name, frozenset({task_id}), f"while it runs {trip}", f"in {trip}")
        return None


def _fresh_segment(replica: Replica, orphans: frozenset[str], now: float) -> str | None:
    for pause_point, started_at in replica.running.items():
        if pause_point.generation and pause_point.task_id in orphans and now - started_at < _MAX_SEGMENT_AGE:
            return pause_point.task_id
    return None
