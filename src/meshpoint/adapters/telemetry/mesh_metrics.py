"""The metrics of a whole mesh, from what its servers say: `meshpoint metrics` exports them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import TypeAlias

from meshpoint.adapters.telemetry.metrics import Kind, Metric
from meshpoint.model.ids import AgentName
from meshpoint.ports.gauges import AgentGauges, DatabaseGauges, SessionGauges

_BY_SERVER = ("server",)

TASKS = Metric(
    "meshpoint_tasks",
    Kind.GAUGE,
    "Stored tasks; counted up to 1,000,000 in a state, ended ones up to 100,000.",
    ("agent", "state"),
)
SUSPENDED = Metric(
    "meshpoint_suspended_tasks", Kind.GAUGE, "Unended tasks that a person has suspended."
)
DEAD = Metric(
    "meshpoint_dead_tasks", Kind.GAUGE, "Failed tasks that had killed every process that ran them."
)
STRANDED = Metric(
    "meshpoint_stranded_tasks",
    Kind.GAUGE,
    "Tasks that have been ready for a minute, in formats that no registered replica reads.",
)
REPLICAS = Metric(
    "meshpoint_replicas", Kind.GAUGE, "Registered replicas, by state.", ("agent", "state")
)
READY_AGE = Metric(
    "meshpoint_ready_age_seconds",
    Kind.GAUGE,
    "How long the oldest ready task has waited for a replica; 0 without one.",
)
WAITING_OLDEST = Metric(
    "meshpoint_waiting_oldest_seconds",
    Kind.GAUGE,
    "Time since the pause of the task that has waited longest; 0 without one.",
)
OUTBOX_OLDEST = Metric(
    "meshpoint_outbox_oldest_seconds",
    Kind.GAUGE,
    "Age of the oldest stored message that is due and not sent; 0 without one.",
)
QUESTIONS_OPEN = Metric(
    "meshpoint_questions_open", Kind.GAUGE, "Unanswered questions of waiting tasks."
)
QUEUE_MESSAGES = Metric(
    "meshpoint_queue_messages",
    Kind.GAUGE,
    "Messages that wait in the queues of the agent.",
    ("agent", "queue"),
)
SERVER_UP = Metric(
    "meshpoint_server_up",
    Kind.GAUGE,
    "1, or 0 while the server does not answer and its other metrics have their last values.",
    ("role", "server"),
)
READ_DURATION = Metric(
    "meshpoint_server_read_duration_seconds",
    Kind.GAUGE,
    "Time that the last reading of the server took.",
    ("role", "server"),
)
READ_AT = Metric(
    "meshpoint_server_read_timestamp_seconds",
    Kind.GAUGE,
    "When the server was last read, in seconds since the epoch.",
    ("role", "server"),
)
DATABASE_BYTES = Metric(
    "meshpoint_database_bytes", Kind.GAUGE, "Size of the database.", _BY_SERVER
)
CLOCK_OFFSET = Metric(
    "meshpoint_database_clock_offset_seconds",
    Kind.GAUGE,
    "How far the database's clock is ahead of the clock of `meshpoint metrics`. PostgreSQL only.",
    _BY_SERVER,
)
OLDEST_TRANSACTION = Metric(
    "meshpoint_database_oldest_transaction_seconds",
    Kind.GAUGE,
    "Age of the oldest transaction that keeps dead rows from being removed. PostgreSQL only.",
    _BY_SERVER,
)
LONGEST_QUERY = Metric(
    "meshpoint_database_longest_query_seconds",
    Kind.GAUGE,
    "How long the oldest running statement has run. PostgreSQL only.",
    _BY_SERVER,
)
LONGEST_LOCK_WAIT = Metric(
    "meshpoint_database_longest_lock_wait_seconds",
    Kind.GAUGE,
    "Age of the oldest transaction with a lock that a statement waits for. PostgreSQL only.",
    _BY_SERVER,
)

MESH_METRICS = (
    TASKS,
    SUSPENDED,
    DEAD,
    STRANDED,
    REPLICAS,
    READY_AGE,
    WAITING_OLDEST,
    OUTBOX_OLDEST,
    QUESTIONS_OPEN,
    QUEUE_MESSAGES,
    SERVER_UP,
    READ_DURATION,
    READ_AT,
    DATABASE_BYTES,
    CLOCK_OFFSET,
    OLDEST_TRANSACTION,
    LONGEST_QUERY,
    LONGEST_LOCK_WAIT,
)

Sample: TypeAlias = tuple[Metric, tuple[str, ...], float]
"""A metric, the values of its labels, and its value."""


def describe_database(server: str, gauges: DatabaseGauges, now: datetime) -> list[Sample]:
    """The samples of one reading of a database, received at `now` by this host's clock."""
    samples: list[Sample] = [(DATABASE_BYTES, (server,), float(gauges.size))]
    for agent, tasks in gauges.agents.items():
        samples += _describe_agent(agent, tasks)
    if gauges.now is not None:
        samples.append((CLOCK_OFFSET, (server,), (gauges.now - now).total_seconds()))
    if gauges.sessions is not None:
        samples += _describe_sessions(server, gauges.sessions)
    return samples


def _describe_agent(agent: AgentName, gauges: AgentGauges) -> Iterator[Sample]:
    for state, count in gauges.tasks.items():
        yield TASKS, (agent, state.value), float(count)
    for replica_state, count in gauges.replicas.items():
        yield REPLICAS, (agent, replica_state.value), float(count)
    for metric, value in (
        (SUSPENDED, gauges.suspended),
        (DEAD, gauges.dead),
        (STRANDED, gauges.stranded),
        (READY_AGE, gauges.ready_age),
        (WAITING_OLDEST, gauges.waiting_age),
        (OUTBOX_OLDEST, gauges.outbox_age),
        (QUESTIONS_OPEN, gauges.open_questions),
    ):
        yield metric, (agent,), float(value)


def _describe_sessions(server: str, sessions: SessionGauges) -> list[Sample]:
    return [
        (OLDEST_TRANSACTION, (server,), sessions.snapshot_age),
        (LONGEST_QUERY, (server,), sessions.query_age),
        (LONGEST_LOCK_WAIT, (server,), sessions.lock_wait),
    ]


def merge(samples: Iterable[Sample]) -> Mapping[Metric, Mapping[tuple[str, ...], float]]:
    """Combine the samples of several databases: the sum of counts, and the highest of ages."""
    merged: dict[Metric, dict[tuple[str, ...], float]] = defaultdict(dict)
    for metric, labels, value in samples:
        values, is_age = merged[metric], metric.name.endswith("_seconds")
        known = values.get(labels, 0.0 if not is_age else value)
        values[labels] = max(known, value) if is_age else known + value
    return merged
