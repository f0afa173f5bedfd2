"""What is run, and the embedded store it runs on: one SQLite file for the queues and the tasks of all sessions."""

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
"""That a setting can have."""


@dataclass(frozen=True, kw_only=True)
class ExecConfig:
    """What is run: `agent`, with `others` for the calls it makes.

    `store_file` is the embedded store, in a folder that is there. `ttl` is how long a checkpoint is kept.
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
        """All the agents."""
        return [self.agent, *self.others]

    @property
    def agent_name(self) -> AgentName:
        """That of the agent."""
        return AgentName(self.agent.name)

    @property
    def plan(self) -> Plan:
        """That of the agent."""
        return plan_of(self.agent)

    @property
    def retention_seconds(self) -> float:
        """How long the store keeps checkpoints; those of `NO_EXPIRY` are exempt from deletion anyway."""
        return min(self.ttl, _MAX_TTL).total_seconds()

    @property
    def store_url(self) -> str:
        """The embedded store, as broker and as database."""
        return f"sqlite:///{self.store_file}"

    def mesh_settings(self, namespace: str) -> MeshSettings:
        """The settings of a session's mesh."""
        return MeshSettings(namespace=namespace, broker_url=self.store_url)


@asynccontextmanager
async def embedded_store(config: ExecConfig, namespace: str) -> AsyncIterator[CheckpointStore]:
    """The tasks of one session.

    Raises:
        ConfigurationError: another release wrote the file.
        StoreUnavailable: others write to it for too long.
    """
    settings = AgentSettings(
        name=config.agent_name,
        entrypoint="meshpoint.exec:agent",  # it is here already, and is not looked for
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
    """Write a new task, which this process has for a moment; None: there is one with this id."""
    replica = Replica(ReplicaId(new_id()), agent, frozenset(), lease=timedelta(seconds=10))
    command = Begin(Run(task_id, agent, RunId(new_id())), replica, requester, request, operation)
    (result,) = await store.begin([command])
    return result.run if isinstance(result, Begun) else None
