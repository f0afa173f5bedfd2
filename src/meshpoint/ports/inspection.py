"""What `meshpoint doctor` reads of the servers of a mesh. Nothing here changes anything.

All methods raise `Unavailable` if the server cannot be reached, and `ConfigurationError` if it
refuses the login or the URL.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address
from meshpoint.model.replicas import RegisteredReplica
from meshpoint.model.tasks import TaskState


@dataclass(frozen=True, slots=True)
class SchemaFacts:
    """The schema of a database.

    Attributes:
        revision: `None` if it has no tables.
        required: the revision that this release requires.
        creates_itself: whether the first replica creates missing tables.
    """

    revision: str | None
    required: str
    creates_itself: bool

    @property
    def is_missing(self) -> bool:
        """Whether there are no tables."""
        return self.revision is None

    @property
    def is_behind(self) -> bool:
        """Whether the tables are older than this release requires."""
        return self.revision is not None and self.revision < self.required

    @property
    def is_newer(self) -> bool:
        """Whether a later release has upgraded the tables."""
        return self.revision is not None and self.revision > self.required


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """The tasks of one agent that have not ended and are alike.

    Attributes:
        state_format: `None` before their first pause, when any version can run them.
        version: `app_version` at their last pause; `None` if unknown.
        count: number of tasks.
        oldest: when the first of them last paused.
    """

    state: TaskState
    state_format: str | None
    version: str | None
    count: int
    oldest: datetime


@dataclass(frozen=True, slots=True)
class ParkedGroup:
    """Parked tasks of one agent with the same reason, tried by the same versions."""

    reason: str
    tried_versions: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class SuspendedTasks:
    """The suspended tasks of one agent. `oldest`: since when the first of them is suspended."""

    count: int
    oldest: datetime


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """Tasks of one agent that ended as dead for the same reason."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Owner:
    """A replica that runs tasks of an agent. `until` is the end of its latest lease."""

    replica: ReplicaId
    tasks: int
    until: datetime


@dataclass(frozen=True, slots=True)
class AgentTasks:
    """The tasks of one agent in a database.

    Attributes:
        waits: number of tasks that wait for each peer.
        operations: number of unended tasks with subtasks.
        suspended: its unended tasks that a person has suspended; `None` without any.
        key_ids: keys that may have sealed values of the agent.
    """

    groups: tuple[TaskGroup, ...] = ()
    parked: tuple[ParkedGroup, ...] = ()
    dead: tuple[ReasonCount, ...] = ()
    waits: tuple[tuple[AgentName, int], ...] = ()
    owners: tuple[Owner, ...] = ()
    operations: int = 0
    suspended: SuspendedTasks | None = None
    key_ids: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of tasks that have not ended."""
        return sum(group.count for group in self.groups)


@dataclass(slots=True)
class AgentKeys:
    """What is sealed with which key, of one agent.

    Attributes:
        values: The number of sealed values, by key.
        clear: The number of values in the clear in columns that are sealed.
        changed: The number of rows that were changed.
        damaged: The number of values that do not open although their key is there.
        unused: The keys that seal nothing any more, and were removed from the register.
    """

    values: Counter[str] = field(default_factory=Counter)
    clear: int = 0
    changed: int = 0
    damaged: int = 0
    unused: tuple[str, ...] = ()


class DatabaseInspection(Protocol):
    """Facts about a database and its tasks."""

    async def open(self) -> None:
        """Connect. A missing SQLite file is not created."""

    async def close(self) -> None:
        """Disconnect."""

    async def schema(self) -> SchemaFacts:
        """The schema."""

    async def now(self) -> datetime | None:
        """The database's clock; `None` if it is this host's."""

    async def problem(self) -> str | None:
        """Why the login could not serve tasks, such as a missing privilege; else `None`."""

    async def is_disk_full(self) -> bool:
        """Whether the database cannot write to its disk."""

    async def agents(self) -> list[AgentName]:
        """The agents of this namespace that have tasks. Empty without tables."""

    async def replicas(self) -> list[RegisteredReplica]:
        """The registered replicas of this namespace. Empty if the schema has no such table."""

    async def tasks(self, agent: AgentName) -> AgentTasks:
        """The tasks of an agent. Empty without tables; incomplete if the schema is behind."""


class Right(StrEnum):
    """A permission at the broker."""

    CONFIGURE = "configure"
    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class MissingRight:
    """The login lacks a right on an object that replicas of an agent use.

    `is_needed`: a replica cannot start without it.
    """

    right: Right
    object: str
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class OtherArguments:
    """A queue exists with other arguments than a new one would have.

    `policy` is the command that brings it up to date as far as possible, or `None`.
    """

    queue: str
    difference: str
    policy: str | None


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """A queue. `messages` are ready for delivery."""

    messages: int
    consumers: int


class BrokerInspection(Protocol):
    """Facts about the broker of a mesh."""

    async def open(self) -> None:
        """Connect. A missing SQLite file is not created."""

    async def close(self) -> None:
        """Disconnect."""

    async def queue(self, address: Address) -> QueueFacts | None:
        """A queue, or `None` if it does not exist."""

    async def replicas(self, agent: AgentName) -> int:
        """Number of replicas that serve `agent` now."""

    async def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set."""

    async def missing_rights(self, agent: AgentName, shards: int) -> list[MissingRight]:
        """The rights that replicas of `agent` need and this login lacks."""

    async def other_arguments(self, agent: AgentName, shards: int) -> list[OtherArguments]:
        """The queues of `agent` that exist with other arguments."""


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """A Redis.

    Attributes:
        eviction: its `maxmemory-policy`; `None` if the login may not read it.
        is_persistent: whether it writes its data to disk; `None` if the login may not read that.
        now: its clock.
    """

    eviction: str | None
    is_persistent: bool | None
    now: datetime


class CacheInspection(Protocol):
    """Facts about a Redis."""

    async def read(self) -> CacheFacts:
        """Check the login's permissions, and read all facts."""

    async def close(self) -> None:
        """Disconnect."""
