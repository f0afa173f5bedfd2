"""The metrics of a replica, measured from its events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.waits import is_wait
from meshpoint.ports.observer import SelectiveObserver

_MAX_PEERS = 100
"""Maximum peers with a label of their own. Agent code chooses their names."""
OTHER_PEER = "other"

PAUSED_AT = "meshpoint.paused_at"
"""When the task was paused, in seconds since the epoch; stored with its trace context."""
PAUSED_BY = "meshpoint.paused_by"
"""The replica that paused it; stored likewise."""


class Kind(StrEnum):
    """What a metric does with its values."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, with its name in Prometheus. `buckets` are the upper bounds of a histogram."""

    name: str
    kind: Kind
    description: str
    labels: tuple[str, ...] = ("agent",)
    buckets: tuple[float, ...] = ()


_BRIEF = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0)
_LONG = (0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0, 604_800.0, 2_592_000.0)
_BYTES = tuple(float(4**power) for power in range(4, 13))  # 256 bytes to 16 MiB

TASKS_ENDED = Metric(
    "meshpoint_tasks_ended_total",
    Kind.COUNTER,
    "Tasks that ended: completed, or the kind of the failure.",
    ("agent", "outcome"),
)
CALLS = Metric(
    "meshpoint_calls_total",
    Kind.COUNTER,
    "Outcomes of peer calls with which segments resumed.",
    ("agent", "peer", "outcome"),
)
PAUSES = Metric("meshpoint_pauses_total", Kind.COUNTER, "Pauses that were committed.")
RESUMES = Metric(
    "meshpoint_resumes_total",
    Kind.COUNTER,
    "Segments after a pause, by whether the same replica had paused the task or another one.",
    ("agent", "replica"),
)
RESCUES = Metric(
    "meshpoint_rescues_total", Kind.COUNTER, "Tasks rescued after their lease had expired."
)
FENCED_WRITES = Metric(
    "meshpoint_fenced_writes_total",
    Kind.COUNTER,
    "Writes that changed nothing because another replica owns the task.",
)
DUPLICATE_RESPONSES = Metric(
    "meshpoint_duplicate_responses_total",
    Kind.COUNTER,
    "Responses to calls that had an outcome already.",
)
LATE_RESPONSES = Metric(
    "meshpoint_late_responses_total",
    Kind.COUNTER,
    "Responses to calls that no longer existed.",
)
DEAD_LETTERS = Metric("meshpoint_dead_letters_total", Kind.COUNTER, "Dead-lettered messages.")
SEGMENT_DURATION = Metric(
    "meshpoint_segment_duration_seconds",
    Kind.HISTOGRAM,
    "Time that agent code runs in one segment.",
    buckets=_BRIEF,
)
WAIT_DURATION = Metric(
    "meshpoint_wait_duration_seconds",
    Kind.HISTOGRAM,
    "Time from the end of a segment to the start of the task's next segment.",
    buckets=_LONG,
)
RESUME_DELAY = Metric(
    "meshpoint_resume_delay_seconds",
    Kind.HISTOGRAM,
    "Time from the receipt of the last response to the start of the segment, "
    "if a slot was free in the replica that received it.",
    buckets=_BRIEF,
)
CHECKPOINT_DURATION = Metric(
    "meshpoint_checkpoint_duration_seconds",
    Kind.HISTOGRAM,
    "Time to commit a pause, including retries.",
    buckets=_BRIEF,
)
CHECKPOINT_BYTES = Metric(
    "meshpoint_checkpoint_bytes",
    Kind.HISTOGRAM,
    "State and log entries that a pause writes, before compression.",
    buckets=_BYTES,
)
SLOTS_FREE = Metric(
    "meshpoint_slots_free", Kind.GAUGE, "Slots of the replica in which no agent code runs."
)
STORE_UP = Metric(
    "meshpoint_store_up", Kind.GAUGE, "1, or 0 while the agent's database is unavailable."
)
BROKER_UP = Metric("meshpoint_broker_up", Kind.GAUGE, "1, or 0 while the broker is unavailable.")

METRICS = (
    TASKS_ENDED,
    CALLS,
    PAUSES,
    RESUMES,
    RESCUES,
    FENCED_WRITES,
    DUPLICATE_RESPONSES,
    LATE_RESPONSES,
    DEAD_LETTERS,
    SEGMENT_DURATION,
    WAIT_DURATION,
    RESUME_DELAY,
    CHECKPOINT_DURATION,
    CHECKPOINT_BYTES,
    SLOTS_FREE,
    STORE_UP,
    BROKER_UP,
)

Labels: TypeAlias = tuple[str, ...]
"""The values of a metric's labels."""
Recorder: TypeAlias = Callable[[float, Labels], None]
"""Records one value, with the values of the metric's labels: adds, observes or sets it."""


class Meter(Protocol):
    """Where metrics go."""

    def recorder(self, metric: Metric) -> Recorder:
        """Create `metric`. Called once for each."""


def scalar_recorder(kind: Kind, values: dict[Labels, float]) -> Recorder:
    """Keep a counter or a gauge in `values`, from which a meter reads it when asked."""

    def add(value: float, labels: Labels) -> None:
        values[labels] = values.get(labels, 0.0) + value

    def replace(value: float, labels: Labels) -> None:
        values[labels] = value

    return add if kind is Kind.COUNTER else replace


def _record_in_all(recorders: Sequence[Recorder]) -> Recorder:
    if len(recorders) == 1:
        return recorders[0]

    def record(value: float, labels: Labels) -> None:
        for each in recorders:
            each(value, labels)

    return record


# A step's events before and after it come from one asyncio task, whose context is copied by the
# asyncio tasks that it starts: a segment sees the claim that resumed it.
_segment_started: ContextVar[float] = ContextVar("meshpoint.segment_started")
_checkpoint_started: ContextVar[float] = ContextVar("meshpoint.checkpoint_started")
_claim_started: ContextVar[float | None] = ContextVar("meshpoint.claim_started", default=None)


class MetricsObserver(SelectiveObserver):
    """Measures the metrics of one process, for all its agents.

    Args:
        meters: Where to record them.
        monotonic: Seconds, for durations within this process.
        now: Seconds since the epoch, for the duration of a pause: another replica may end it.
    """

    def __init__(
        self,
        meters: Sequence[Meter],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._recorders = {
            metric.name: _record_in_all([meter.recorder(metric) for meter in meters])
            for metric in METRICS
        }
        self._monotonic, self._now = monotonic, now
        self._slots: dict[AgentName, int] = {}
        self._running: dict[AgentName, set[TaskId]] = {}
        self._peers: set[str] = set()
        self.handlers = {
            (Step.STARTED, Phase.INFO): self._on_started,
            (Step.SWEEP, Phase.BEFORE): self._on_sweep,
            (Step.SWEEP, Phase.AFTER): self._on_sweep_end,
            (Step.CLAIM, Phase.BEFORE): self._on_claim,
            **dict.fromkeys(
                [(step, Phase.BEFORE) for step in (Step.EXPIRE, Step.ACQUIRE, Step.RESCUE)],
                self._on_search,
            ),
            (Step.SEGMENT, Phase.BEFORE): self._on_segment,
            (Step.SEGMENT, Phase.AFTER): self._on_segment_end,
            (Step.SEGMENT, Phase.FAILED): self._on_segment_end,
            (Step.ISOLATED_PROCESS_DIED, Phase.INFO): self._on_process_died,
            (Step.CHECKPOINT, Phase.BEFORE): self._on_checkpoint,
            (Step.CHECKPOINT, Phase.AFTER): self._on_checkpoint_end,
            (Step.TASK_COMPLETED, Phase.INFO): self._on_completed,
            (Step.TASK_FAILED, Phase.INFO): self._on_failed,
            (Step.RESCUE, Phase.AFTER): self._on_rescue,
            (Step.FENCED, Phase.INFO): self._counting(FENCED_WRITES),
            (Step.DUPLICATE, Phase.INFO): self._counting(DUPLICATE_RESPONSES),
            (Step.LATE, Phase.INFO): self._counting(LATE_RESPONSES),
            (Step.DEAD_LETTER, Phase.INFO): self._counting(DEAD_LETTERS),
            (Step.STORE_UNAVAILABLE, Phase.INFO): self._setting(STORE_UP, 0),
            (Step.STORE_AVAILABLE, Phase.INFO): self._setting(STORE_UP, 1),
            (Step.BROKER_UNAVAILABLE, Phase.INFO): self._setting(BROKER_UP, 0),
            (Step.BROKER_AVAILABLE, Phase.INFO): self._setting(BROKER_UP, 1),
        }

    def _record(self, metric: Metric, value: float, *labels: str) -> None:
        self._recorders[metric.name](value, labels)

    def _counting(self, metric: Metric) -> Callable[[Event], None]:
        return self._setting(metric, 1)

    def _setting(self, metric: Metric, value: float) -> Callable[[Event], None]:
        return lambda event: self._record(metric, value, event.agent)

    def _on_started(self, event: Event) -> None:
        slots = event.detail.get("slots")
        self._slots[event.agent] = slots if isinstance(slots, int) else 0
        self._running.setdefault(event.agent, set())
        self._count_slots(event)
        self._record(STORE_UP, 1, event.agent)
        self._record(BROKER_UP, 1, event.agent)

    def _on_sweep(self, event: Event) -> None:
        self._record(BROKER_UP, int(bool(event.detail.get("broker"))), event.agent)

    def _on_sweep_end(self, event: Event) -> None:
        if event.detail.get("durable"):
            # A task's own process may have reported an outage, and ended since.
            self._record(STORE_UP, 1, event.agent)

    def _on_claim(self, event: Event) -> None:
        _claim_started.set(self._monotonic())

    def _on_search(self, event: Event) -> None:
        _claim_started.set(None)  # what it finds was not resumed by a response

    def _on_segment(self, event: Event) -> None:
        _segment_started.set(self._monotonic())
        self._running.setdefault(event.agent, set()).update(event.task_ids)
        self._count_slots(event)
        if event.detail.get("generation"):
            self._on_resumed(event)

    def _on_resumed(self, event: Event) -> None:
        detail = event.all_details()
        trace: Any = detail.get("trace") or {}
        is_same = trace.get(PAUSED_BY) == event.replica
        self._record(RESUMES, 1, event.agent, "same" if is_same else "other")
        if isinstance(paused_at := trace.get(PAUSED_AT), float):
            # Clocks of replicas may differ.
            self._record(WAIT_DURATION, max(self._now() - paused_at, 0.0), event.agent)
        if (claimed_at := _claim_started.get()) is not None:
            self._record(RESUME_DELAY, self._monotonic() - claimed_at, event.agent)
        answers: Any = detail.get("answers") or ()
        for answer in answers:
            if not is_wait(answer["peer"]):
                peer = self._peer_label(answer["peer"])
                self._record(CALLS, 1, event.agent, peer, answer["outcome"])

    def _peer_label(self, peer: str) -> str:
        if peer not in self._peers:
            if len(self._peers) >= _MAX_PEERS:
                return OTHER_PEER
            self._peers.add(peer)
        return peer

    def _on_segment_end(self, event: Event) -> None:
        if (started_at := _segment_started.get(None)) is not None:
            duration = self._monotonic() - started_at
            self._record(SEGMENT_DURATION, duration, event.agent)
        self._running.setdefault(event.agent, set()).difference_update(event.task_ids)
        self._count_slots(event)
        if event.detail.get("result") == "paused":
            trace: Any = event.all_details().get("trace")
            if trace is not None:
                trace[PAUSED_AT], trace[PAUSED_BY] = self._now(), event.replica

    def _on_process_died(self, event: Event) -> None:
        """Count the slot of a segment whose own process emitted no event at its end."""
        self._running.setdefault(event.agent, set()).difference_update(event.task_ids)
        self._count_slots(event)

    def _count_slots(self, event: Event) -> None:
        if (slots := self._slots.get(event.agent)) is not None:
            free = max(slots - len(self._running[event.agent]), 0)
            self._record(SLOTS_FREE, free, event.agent)

    def _on_checkpoint(self, event: Event) -> None:
        _checkpoint_started.set(self._monotonic())

    def _on_checkpoint_end(self, event: Event) -> None:
        if not event.detail.get("committed"):
            return
        self._record(PAUSES, 1, event.agent)
        if (started_at := _checkpoint_started.get(None)) is not None:
            self._record(CHECKPOINT_DURATION, self._monotonic() - started_at, event.agent)
        if isinstance(size := event.all_details().get("bytes"), int):
            self._record(CHECKPOINT_BYTES, size, event.agent)

    def _on_completed(self, event: Event) -> None:
        self._record(TASKS_ENDED, 1, event.agent, "completed")

    def _on_failed(self, event: Event) -> None:
        if not event.detail.get("refused"):  # a request that began no task
            self._record(TASKS_ENDED, 1, event.agent, str(event.detail.get("kind")))

    def _on_rescue(self, event: Event) -> None:
        if "reason" not in event.detail:  # else it was only released, for another version
            self._record(RESCUES, len(event.task_ids), event.agent)
