"""The agents to run, and the embedded store that they run on.

The store is one SQLite file with the queues and tasks of all sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshpoint.errors import ConfigurationError, MeshpointError
from meshpoint.model.encryption_keys import to_ring
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId, new_id
from meshpoint.model.options import StoreTimings
from meshpoint.model.subtasks import Operation
from meshpoint.model.tasks import Replica, Requester, Run
from meshpoint.model.transitions import Begin, BeginCommitted
from meshpoint.ports.agent import DurableAgent, Plan, get_plan
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.settings import StoreSettings
from meshpoint.wiring import open_store

_MAX_TTL = timedelta(days=3650)
"""Maximum duration that the settings allow."""


@dataclass(frozen=True, kw_only=True)
class ExecConfig:
    """What to run: `agent`, and `others` that it may call.

    `sources` is the text of their modules. `store_file` is the embedded store, in an existing
    folder. `ttl` is how long checkpoints are kept. `encryption_keys` seal the store.
    """

    agent: DurableAgent[Any, Any]
    others: Sequence[DurableAgent[Any, Any]] = ()
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    store_file: Path
    ttl: timedelta
    secret_keys: Sequence[str] = ()
    encryption_keys: Sequence[str] = field(default=(), repr=False)
    encryption_tenant: str | None = None

    def __post_init__(self) -> None:
        names = [each.name for each in self.agents]
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(
                "--with", f"two agents are called {duplicate!r}", "name each agent once"
            )

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
        return get_plan(self.agent)

    @property
    def retention(self) -> timedelta:
        """How long the store keeps checkpoints.

        With `NO_EXPIRY` they are exempt from deletion anyway.
        """
        return min(self.ttl, _MAX_TTL)

    @property
    def store_url(self) -> str:
        """URL of the embedded store, as broker and as database."""
        return f"sqlite:///{self.store_file}"

    def open_store(self, namespace: str) -> AbstractAsyncContextManager[CheckpointStore]:
        """Open the store of one session's namespace.

        Raises:
            ConfigurationError: Another release wrote the file.
            StoreUnavailable: Other processes kept the file locked for too long.
        """
        timings = StoreTimings(checkpoint_ttl=self.retention, tombstone_ttl=self.retention)
        return open_store(
            StoreSettings.at(
                self.store_url,
                key="--home",
                timings=timings,
                keys=to_ring(self.encryption_keys, self.encryption_tenant),
            ),
            namespace,
        )


async def begin_operation(
    store: CheckpointStore,
    task_id: TaskId,
    agent: AgentName,
    requester: Requester,
    request: bytes,
    operation: Operation | None = None,
) -> Run:
    """Write the row of a new task and own it for 10 seconds.

    Raises:
        MeshpointError: Another agent has a task with this id.
    """
    replica = Replica(ReplicaId(new_id()), agent, frozenset(), lease=timedelta(seconds=10))
    command = Begin(Run(task_id, agent, RunId(new_id())), replica, requester, request, operation)
    (result,) = await store.begin([command])
    if not isinstance(result, BeginCommitted):
        raise MeshpointError(f"operation {task_id} belongs to another agent")
    return result.run
