"""Choose the replicas to kill, based on their events and never on time alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from meshpoint.demo.tracker import Replica, TaskTracker
from meshpoint.model.error_text import quantity

_MAX_SEGMENT_AGE = 0.25
"""Maximum seconds that a segment may have run when its replica is chosen.

The agent thinks for at least twice as long.
"""


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica to kill, and the tasks that it has paused or runs."""

    replica: str
    task_ids: frozenset[str]
    reason: str
    state_note: str


class KillPlanner:
    """Plans two kills.

    The first victim has paused tasks that are waiting, the second runs a task that the first had
    paused.
    """

    def __init__(self, tracker: TaskTracker) -> None:
        self._tracker = tracker
        # With any distribution of the requests, some replica gets at least this many.
        self._min_paused = min(4, ceil(tracker.requests / len(tracker.replicas)))
        self.first_kill: Kill | None = None
        self.second_kill: Kill | None = None

    def next_kill(self, now: float) -> Kill | None:
        """Return a kill that is due; each is returned once."""
        if self.first_kill is None:
            self.first_kill = self._plan_first_kill()
            return self.first_kill
        if self.second_kill is None:
            self.second_kill = self._plan_second_kill(self.first_kill.task_ids, now)
            return self.second_kill
        return None

    def _plan_first_kill(self) -> Kill | None:
        replica = max(
            self._tracker.serving_replicas, key=lambda replica: len(replica.paused), default=None
        )
        if replica is None or len(replica.paused) < self._min_paused:
            return None
        count = len(replica.paused)
        tasks = quantity(count, "task")
        return Kill(
            replica.name,
            frozenset(replica.paused),
            f"with {tasks} paused by it",
            f"{tasks} paused",
        )

    def _plan_second_kill(self, orphans: frozenset[str], now: float) -> Kill | None:
        for replica in self._tracker.serving_replicas:
            if task_id := _fresh_segment(replica, orphans, now):
                trip = self._tracker.describe_trips([task_id])
                return Kill(
                    replica.name, frozenset({task_id}), f"while it runs {trip}", f"running {trip}"
                )
        return None


def _fresh_segment(replica: Replica, orphans: frozenset[str], now: float) -> str | None:
    for pause_point, started_at in replica.running.items():
        if (
            pause_point.generation
            and pause_point.task_id in orphans
            and now - started_at < _MAX_SEGMENT_AGE
        ):
            return pause_point.task_id
    return None
