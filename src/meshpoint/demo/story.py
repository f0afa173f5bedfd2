"""What has happened so far, told by the replicas' events. Pure: nothing here waits, prints or kills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from meshpoint.model.events import Phase, Step

ROOT, PEERS = "travel", ("flights", "hotels", "weather")
"""The agent that is replicated and whose tasks are followed, and those that keep it waiting."""


@dataclass(frozen=True, slots=True)
class Told:
    """One event of one replica. `at` is an instant of the clock that all processes of a host share."""

    step: Step
    phase: Phase
    agent: str
    task_ids: Sequence[str]
    detail: Mapping[str, Any]
    at: float


class State(StrEnum):
    """What a replica's process does."""

    STARTING = "starting"
    SERVING = "serving"
    KILLED = "killed"
    ENDED = "drained"


@dataclass(frozen=True, slots=True)
class Pause:
    """The place of a task: its how-manieth pause, from which the segment of that number goes on."""

    task_id: str
    generation: int


@dataclass(slots=True)
class Replica:
    """One process as the picture shows it. `running` holds since when each segment runs."""

    name: str
    agents: frozenset[str]
    pid: int = 0
    state: State = State.STARTING
    started: set[str] = field(default_factory=set)
    running: dict[Pause, float] = field(default_factory=dict)
    paused: dict[str, Pause] = field(default_factory=dict)
    resumed: int = 0
    taken_over: int = 0
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the log. `seconds` are counted from the beginning."""

    seconds: float
    text: str
    sign: str = " "


class Story:
    """Follows tasks through replicas.

    Each replica tells its own events in order; between replicas there is no order, so a task is followed by the
    number of its pause and not by what was heard last.
    """

    def __init__(self, names: Iterable[str], requests: int, began: float) -> None:
        self.replicas = {name: Replica(name, frozenset({ROOT})) for name in names}
        self.peers = Replica("peers", frozenset(PEERS))
        self.requests, self.began, self.now = requests, began, began
        self.answers = self.failed = 0
        self.log: list[Line] = []
        self._numbers: dict[str, int] = {}
        self._paused_by: dict[Pause, str] = {}
        self._run_by: dict[Pause, list[str]] = {}
        self._ends: Counter[str] = Counter()
        self._heirs: dict[str, str] = {}

    # ── what the requester does ────────────────────────────────────────────────────────────────────

    def asked(self, task_id: str, number: int) -> None:
        """Request `number` is about to be sent."""
        self._numbers[task_id] = number

    def answered(self, *, failed: bool) -> None:
        """A request has its answer."""
        self.answers += 1
        self.failed += failed

    def note(self, text: str, sign: str = " ") -> None:
        """Add a line to the log."""
        self.log.append(Line(self.now - self.began, text, sign))

    # ── what the replicas tell ─────────────────────────────────────────────────────────────────────

    def hear(self, name: str, told: Told) -> None:
        """Take in one event of process `name`."""
        replica = self.process(name)
        if told.step is Step.STARTED:
            replica.started.add(told.agent)
            if replica.started == replica.agents:
                replica.state = State.SERVING
        elif told.step in {Step.STORE_AWAY, Step.BROKER_AWAY, Step.STORE_BACK, Step.DEGRADED}:
            self.note(f"{name} {told.step.value.replace('_', ' ')}: {told.detail.get('error', '')}", "!")
        elif told.agent == ROOT:
            self._follow(replica, told)

    def _follow(self, replica: Replica, told: Told) -> None:
        places = [Pause(task_id, int(told.detail.get("generation", 0))) for task_id in told.task_ids]
        match told.step, told.phase:
            case Step.SEGMENT, Phase.BEFORE:
                self._begins(replica, places[0], told.at)
            case Step.SEGMENT, _:
                replica.running.pop(places[0], None)
            case Step.CHECKPOINT, _:
                self._pauses(replica, places[0])
            case Step.ACK, _:
                for task_id in told.task_ids:
                    self._rests(replica, task_id, 1)
            case Step.TAKE_OVER, _:
                replica.taken_over += len(places)
                self.note(f"{replica.name} takes over {self.trips(told.task_ids)}", "»")
            case Step.END, _:
                self._ends.update(told.task_ids)
            case Step.FENCED, _ if told.detail.get("what") == "end":
                self._ends.subtract(told.task_ids)

    def _begins(self, replica: Replica, place: Pause, at: float) -> None:
        replica.running[place] = at
        self._run_by.setdefault(place, []).append(replica.name)
        if place.generation:
            replica.resumed += 1
            self._inherits(replica, place)
        for other in self.replicas.values():
            if (waiting := other.paused.get(place.task_id)) and waiting.generation <= place.generation:
                del other.paused[place.task_id]

    def _inherits(self, replica: Replica, place: Pause) -> None:
        """Log the first task of each killed replica that another one goes on with."""
        paused_by = self._paused_by.get(place)
        if paused_by and paused_by not in self._heirs and self.replicas[paused_by].state is State.KILLED:
            self._heirs[paused_by] = replica.name
            self.note(f"{replica.name} goes on with {self.trips([place.task_id])}, which {paused_by} had paused", "»")

    def _pauses(self, replica: Replica, place: Pause) -> None:
        self._paused_by[place] = replica.name
        if place.generation > 1:  # the request was acked at the first pause
            self._rests(replica, place.task_id, place.generation)

    def _rests(self, replica: Replica, task_id: str, generation: int) -> None:
        """A checkpoint is written and its request acked: from here on only the database knows the task."""
        place = Pause(task_id, generation)
        if self._paused_by.get(place) == replica.name and place not in self._run_by:
            replica.paused[task_id] = place

    # ── what becomes of replicas ───────────────────────────────────────────────────────────────────

    def process(self, name: str) -> Replica:
        """A replica, or the process of the peers."""
        return self.peers if name == self.peers.name else self.replicas[name]

    def killed(self, name: str, why: str, remark: str) -> None:
        """A replica was sent SIGKILL; `remark` stands beside its state."""
        replica = self.replicas[name]
        replica.state, replica.remark = State.KILLED, remark
        self.note(f"SIGKILL to {name} (pid {replica.pid}) {why}", "✗")

    def ended(self, name: str) -> None:
        """A process has ended; all it ever told was heard."""
        replica = self.process(name)
        if replica.state is not State.KILLED:
            replica.state = State.ENDED

    @property
    def processes(self) -> list[Replica]:
        """The replicas, and the process of the peers."""
        return [*self.replicas.values(), self.peers]

    @property
    def alive(self) -> list[Replica]:
        """Replicas that serve."""
        return [replica for replica in self.replicas.values() if replica.state is State.SERVING]

    # ── what it comes to ───────────────────────────────────────────────────────────────────────────

    @property
    def resumed_elsewhere(self) -> int:
        """Tasks that one replica paused and another one went on with."""
        moved = {
            place.task_id
            for place, names in self._run_by.items()
            if place in self._paused_by and any(name != self._paused_by[place] for name in names)
        }
        return len(moved)

    @property
    def taken_over(self) -> int:
        """Tasks taken from replicas that died while they ran them."""
        return sum(replica.taken_over for replica in self.replicas.values())

    @property
    def duplicated(self) -> int:
        """Tasks that came to more than one end."""
        return sum(ends > 1 for ends in self._ends.values())

    def trips(self, task_ids: Iterable[str]) -> str:
        """Tasks as people call them."""
        numbers = sorted(self._numbers.get(task_id, 0) for task_id in task_ids)
        return f"trip{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
