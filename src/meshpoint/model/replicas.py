"""The replicas that serve an agent, as each registers itself in the database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from meshpoint.model.ids import AgentName, ReplicaId

KEPT_WHEN_LOST = timedelta(hours=1)
"""How long a replica that was not seen again stays registered, so that people can find it."""


class ReplicaState(StrEnum):
    """The state of a registered replica, by the database's clock."""

    LIVE = "live"
    DRAINING = "draining"  # it stops, and takes no further tasks
    LOST = "lost"  # it has not registered again in time: killed, stopped, or cut off


@dataclass(frozen=True, slots=True)
class Registration:
    """What a replica says about itself.

    Attributes:
        release: The version of Meshpoint.
        app_version: The version of the agent's code.
        formats: The state formats that it reads.
        slots: Segments that it runs concurrently.
        pid: Its process on that host, if known.
        valid_for: How long after this registration it is lost, unless it registers again.
    """

    id: ReplicaId
    agent: AgentName
    release: str
    app_version: str
    formats: frozenset[str]
    slots: int
    host: str
    valid_for: timedelta
    is_draining: bool = False
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class RegisteredReplica:
    """A registered replica.

    Attributes:
        seen_at: When it registered last.
        pid: Its process on its host; `None` if a release registered it that did not say so.
    """

    id: ReplicaId
    agent: AgentName
    state: ReplicaState
    release: str
    app_version: str
    formats: frozenset[str]
    slots: int
    host: str
    started_at: datetime
    seen_at: datetime
    pid: int | None = None
