"""The agents to run, and the embedded store that they run on.

The store is one SQLite file with the queues and tasks of all sessions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshpoint.errors import ConfigurationError
from meshpoint.model.checkpoint import Begin, Begun, Replica, Requester, Run
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId, new_id
from meshpoint.model.subtasks import Operation
from meshpoint.ports.agent import DurableAgent, Plan, plan_of
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.settings import AgentSettings, MeshSettings
from meshpoint.wiring import make_store

_MAX_TTL = timedelta(days=3650)
"""Maximum duration that the settings allow."""


@dataclass(frozen=True, kw_only=True)
class ExecConfig:
    """What to run: `agent`, and `others` that it may call.

    `store_file` is the embedded store, in an existing folder. `ttl` is how long checkpoints are
    kept.
    """

    agent: DurableAgent[Any, Any]
    others: Sequence[DurableAgent[Any, Any]] = ()
    store_file: Path
    ttl: timedelta
    secret_keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = [each.name for each in self.agents]
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError("--with", f"two agents are called {duplicate!r}", "name each agent once")

    @property
    def agents(self) -> list[DurableAgent[Any, Any]]:
        """The agent and the others."""
        return [self.agent, *self.others]

    @property
    def agent_name(self) -> AgentName:
        """Name of the agent to run."""
        return AgentName(self.agent.name)

    @property
    def plan(self) -> Plan:
        """Plan of the agent to run."""
        return plan_of(self.agent)

    @property
    def retention_seconds(self) -> float:
        """How long the store keeps checkpoints.

        With `NO_EXPIRY` they are exempt from deletion anyway.
        """
        return min(self.ttl, _MAX_TTL).total_seconds()

    @property
    def store_url(self) -> str:
        """URL of the embedded store, as broker and as database."""
        return f"sqlite:///{self.store_file}"

    def mesh_settings(self, namespace: str) -> MeshSettings:
        """Return the mesh settings of a session."""
        return MeshSettings(namespace=namespace, broker_url=self.store_url)


@asynccontextmanager
async def embedded_store(config: ExecConfig, namespace: str) -> AsyncIterator[CheckpointStore]:
    """Open the store of one session's namespace.

    Raises:
        ConfigurationError: Another release wrote the file.
        StoreUnavailable: Other processes kept the file locked for too long.
    """
    settings = AgentSettings(
        name=config.agent_name,
        entrypoint="meshpoint.exec:agent",  # not used: the agent is passed as an object
        session_service="sql",
        session_db_url=config.store_url,
        checkpoint_ttl_seconds=config.retention_seconds,
        tombstone_ttl_seconds=config.retention_seconds,
    )
    store = make_store(settings, namespace)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def begin_operation(
    store: CheckpointStore,
    task_id: TaskId,
    agent: AgentName,
    requester: Requester,
    request: bytes,
    operation: Operation | None = None,
) -> Run | None:
    """Write the row of a new task and own it for 10 seconds; `None` if the id exists already."""
    replica = Replica(ReplicaId(new_id()), agent, frozenset(), lease=timedelta(seconds=10))
    command = Begin(Run(task_id, agent, RunId(new_id())), replica, requester, request, operation)
    (result,) = await store.begin([command])
    return result.run if isinstance(result, Begun) else None
