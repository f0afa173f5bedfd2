"""What `meshpoint metrics` reads of a database. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from meshpoint.model.ids import AgentName
from meshpoint.model.replicas import ReplicaState
from meshpoint.model.tasks import TaskState


@dataclass(frozen=True, slots=True)
class AgentGauges:
    """The stored tasks of one agent. Ages are in seconds, 0 if there is no such task.

    Attributes:
        tasks: Number of tasks in each state, up to a limit.
        suspended: Unended tasks that a person has suspended.
        dead: Tasks that ended because they killed their processes.
        stranded: Tasks that have been ready for a minute, in formats that no replica reads.
        ready_age: How long the oldest ready task has been due.
        waiting_age: How long ago the oldest waiting task paused.
        outbox_age: Age of the oldest message that is due and not sent.
        open_questions: Questions that waiting tasks ask.
        replicas: Number of registered replicas in each state.
    """

    tasks: Mapping[TaskState, int]
    suspended: int = 0
    dead: int = 0
    stranded: int = 0
    ready_age: float = 0.0
    waiting_age: float = 0.0
    outbox_age: float = 0.0
    open_questions: int = 0
    replicas: Mapping[ReplicaState, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionGauges:
    """The sessions of a server, as far as the login may see them. Ages are in seconds.

    Attributes:
        snapshot_age: Of the oldest snapshot, which keeps dead rows from being removed.
        query_age: Of the longest running statement.
        lock_wait: How long a transaction has had a lock that another session waits for.
    """

    snapshot_age: float
    query_age: float
    lock_wait: float


@dataclass(frozen=True, slots=True)
class DatabaseGauges:
    """One reading of a database.

    Attributes:
        agents: The agents of the namespace. Empty without tables of tasks.
        size: Of the database, in bytes.
        now: The database's clock, and `sessions`: `None` on SQLite.
    """

    agents: Mapping[AgentName, AgentGauges]
    size: int
    now: datetime | None = None
    sessions: SessionGauges | None = None


class DatabaseGaugeReader(Protocol):
    """Reads a database on one connection."""

    async def read(self) -> DatabaseGauges:
        """Read everything in one read-only transaction. Connects first, if not connected.

        Raises:
            StoreUnavailable: The database does not answer, or its tables are older than this
                release. The next call connects anew.
            ConfigurationError: It refuses the login or the URL.
        """

    async def close(self) -> None:
        """Disconnect."""
