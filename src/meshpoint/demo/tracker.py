"""The state and the results of the demo, and the replicas to kill, derived from their events.

Pure: it does not wait, print or kill. Time alone never chooses a replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import ceil
from typing import Any

from meshpoint.model.error_text import quantity
from meshpoint.model.events import Event, Phase, Step

ROOT, PEERS = "travel", ("flights", "hotels", "weather")
"""The replicated agent whose tasks are tracked, and the peers that it waits for."""
_MAX_SEGMENT_AGE = 0.25
"""Maximum seconds that a segment may have run when its replica is chosen for a kill.

The agent thinks for at least twice as long.
"""


class ReplicaState(StrEnum):
    """The state of a replica's process."""

    STARTING = "starting"
    SERVING = "serving"
    KILLED = "killed"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class PausePoint:
    """A pause of a task. `generation` numbers the pause and the segment that resumes from it."""

    task_id: str
    generation: int


@dataclass(slots=True)
class Replica:
    """The displayed state of one process. `running` has the start time of each running segment."""

    name: str
    agents: frozenset[str]
    pid: int = 0
    state: ReplicaState = ReplicaState.STARTING
    started: set[str] = field(default_factory=set)
    running: dict[PausePoint, float] = field(default_factory=dict)
    paused: dict[str, PausePoint] = field(default_factory=dict)
    resumed: int = 0
    rescued: int = 0
    state_note: str = ""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log. `seconds` is the time since the start."""

    seconds: float
    text: str
    sign: str = " "


class TaskTracker:
    """Tracks tasks across replicas.

    Each replica reports its own events in order, but events of different replicas are not ordered.
    So the progress of a task is determined by the number of its pause, not by the latest event.
    """

    def __init__(self, names: Iterable[str], requests: int, started_at: float) -> None:
        self.replicas = {name: Replica(name, frozenset({ROOT})) for name in names}
        self.peers = Replica("peers", frozenset(PEERS))
        self.requests, self.started_at, self.now = requests, started_at, started_at
        self.answers = self.failed = 0
        self.log: list[LogLine] = []
        self._trip_numbers: dict[str, int] = {}
        self._paused_by: dict[PausePoint, str] = {}
        self._segment_replicas: dict[PausePoint, list[str]] = {}
        self._end_counts: Counter[str] = Counter()
        self._resumed_by: dict[str, str] = {}

    def request_sent(self, task_id: str, number: int) -> None:
        """Record that request `number` is about to be sent."""
        self._trip_numbers[task_id] = number

    def answer_received(self, *, failed: bool) -> None:
        """Record an answer."""
        self.answers += 1
        self.failed += failed

    def add_log_line(self, text: str, sign: str = " ") -> None:
        """Add a line to the log."""
        self.log.append(LogLine(self.now - self.started_at, text, sign))

    def handle_event(self, name: str, event: Event, timestamp: float) -> None:
        """Process an event that process `name` emitted at `timestamp`."""
        replica = self.get_process(name)
        if event.step is Step.STARTED:
            replica.started.add(event.agent)
            if replica.started == replica.agents:
                replica.state = ReplicaState.SERVING
        elif event.step in {
            Step.STORE_UNAVAILABLE,
            Step.BROKER_UNAVAILABLE,
            Step.STORE_AVAILABLE,
            Step.DEGRADED,
        }:
            self.add_log_line(
                f"{name} {event.step.value.replace('_', ' ')}: {event.detail.get('error', '')}",
                "!",
            )
        elif event.agent == ROOT:
            self._track_task(replica, event, timestamp)

    def _track_task(self, replica: Replica, event: Event, timestamp: float) -> None:
        generation = event.detail.get("generation")
        pause_points = [
            PausePoint(task_id, generation if isinstance(generation, int) else 0)
            for task_id in event.task_ids
        ]
        match event.step, event.phase:
            case Step.SEGMENT, Phase.BEFORE:
                self._segment_started(replica, pause_points[0], timestamp)
            case Step.SEGMENT, _:
                replica.running.pop(pause_points[0], None)
            case Step.CHECKPOINT, _:
                self._task_paused(replica, pause_points[0])
            case Step.ACK, _:
                for task_id in event.task_ids:
                    self._pause_committed(replica, task_id, 1)
            case Step.RESCUE, _:
                replica.rescued += len(pause_points)
                self.add_log_line(
                    f"{replica.name} rescues {self.describe_trips(event.task_ids)}", "»"
                )
            case Step.END, _:
                self._end_counts.update(event.task_ids)
            case Step.FENCED, _ if event.detail.get("what") == "end":
                self._end_counts.subtract(event.task_ids)

    def _segment_started(
        self, replica: Replica, pause_point: PausePoint, timestamp: float
    ) -> None:
        replica.running[pause_point] = timestamp
        self._segment_replicas.setdefault(pause_point, []).append(replica.name)
        if pause_point.generation:
            replica.resumed += 1
            self._log_first_resume(replica, pause_point)
        for other in self.replicas.values():
            if (
                paused_at := other.paused.get(pause_point.task_id)
            ) and paused_at.generation <= pause_point.generation:
                del other.paused[pause_point.task_id]

    def _log_first_resume(self, replica: Replica, pause_point: PausePoint) -> None:
        """Log the first resume, by another replica, of a task that a killed replica had paused."""
        paused_by = self._paused_by.get(pause_point)
        if (
            paused_by
            and paused_by not in self._resumed_by
            and self.replicas[paused_by].state is ReplicaState.KILLED
        ):
            self._resumed_by[paused_by] = replica.name
            trips = self.describe_trips([pause_point.task_id])
            self.add_log_line(f"{replica.name} resumes {trips}, which {paused_by} had paused", "»")

    def _task_paused(self, replica: Replica, pause_point: PausePoint) -> None:
        self._paused_by[pause_point] = replica.name
        if pause_point.generation > 1:  # the request was acked at the first pause
            self._pause_committed(replica, pause_point.task_id, pause_point.generation)

    def _pause_committed(self, replica: Replica, task_id: str, generation: int) -> None:
        """Record a committed pause: the request is acked, and only the database has the task."""
        pause_point = PausePoint(task_id, generation)
        if (
            self._paused_by.get(pause_point) == replica.name
            and pause_point not in self._segment_replicas
        ):
            replica.paused[task_id] = pause_point

    def get_process(self, name: str) -> Replica:
        """Return a replica, or the process of the peers."""
        return self.peers if name == self.peers.name else self.replicas[name]

    def replica_killed(self, name: str, reason: str, state_note: str) -> None:
        """Record that a replica was sent SIGKILL. `state_note` is displayed next to its state."""
        replica = self.replicas[name]
        replica.state, replica.state_note = ReplicaState.KILLED, state_note
        self.add_log_line(f"SIGKILL to {name} (pid {replica.pid}) {reason}", "✗")

    def process_ended(self, name: str) -> None:
        """Record that a process has ended and all its events were read."""
        replica = self.get_process(name)
        if replica.state is not ReplicaState.KILLED:
            replica.state = ReplicaState.DRAINED

    @property
    def processes(self) -> list[Replica]:
        """The replicas, and the process of the peers."""
        return [*self.replicas.values(), self.peers]

    @property
    def serving_replicas(self) -> list[Replica]:
        """The replicas that are serving."""
        return [
            replica for replica in self.replicas.values() if replica.state is ReplicaState.SERVING
        ]

    @property
    def resumed_elsewhere(self) -> int:
        """Number of tasks paused by one replica and resumed by another."""
        resumed = {
            pause_point.task_id
            for pause_point, names in self._segment_replicas.items()
            if pause_point in self._paused_by
            and any(name != self._paused_by[pause_point] for name in names)
        }
        return len(resumed)

    @property
    def rescued(self) -> int:
        """Number of tasks rescued from replicas that died while running them."""
        return sum(replica.rescued for replica in self.replicas.values())

    @property
    def duplicated(self) -> int:
        """Number of tasks with more than one outcome."""
        return sum(ends > 1 for ends in self._end_counts.values())

    def describe_trips(self, task_ids: Iterable[str]) -> str:
        """Return the names of tasks for display, such as "trips 1, 2"."""
        numbers = sorted(self._trip_numbers.get(task_id, 0) for task_id in task_ids)
        return f"trip{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


MUST_BE_ZERO = ("lost", "failed", "duplicated")
MUST_BE_POSITIVE = ("paused_in_killed", "running_in_killed", "resumed_elsewhere", "rescued")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The final numbers.

    `duplicated` counts tasks with more than one outcome. `repeated` counts answers that were
    delivered again and dropped by the requester: harmless, but shown for completeness.
    """

    requests: int
    answers: int
    failed: int  # answers that are errors
    duplicated: int
    repeated: int
    paused_in_killed: int  # tasks that the first killed replica had paused
    running_in_killed: int  # segments running in the second killed replica
    resumed_elsewhere: int  # tasks paused by one replica and resumed by another
    rescued: int  # tasks whose replica died in the middle of a segment
    seconds: float

    @property
    def lost(self) -> int:
        """Number of requests without an answer."""
        return self.requests - self.answers

    @property
    def failed_checks(self) -> tuple[str, ...]:
        """Names of the numbers that are not as expected."""
        return (
            *(name for name in MUST_BE_ZERO if getattr(self, name) != 0),
            *(name for name in ("requests", *MUST_BE_POSITIVE) if getattr(self, name) < 1),
        )

    @property
    def ok(self) -> bool:
        """Whether all numbers are as expected."""
        return not self.failed_checks

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger for JSON output."""
        counts = asdict(self)
        headline = {name: counts.pop(name) for name in ("requests", "answers")}
        return {
            "ok": self.ok,
            **headline,
            "lost": self.lost,
            **counts,
            "wrong": list(self.failed_checks),
        }


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
