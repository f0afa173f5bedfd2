"""The replicas that serve agents, for tests: a store in one process has one replica at most."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from meshpoint.adapters.inprocess.rows import Tables
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.replicas import (
    KEPT_WHEN_LOST,
    RegisteredReplica,
    Registration,
    ReplicaState,
)


@dataclass(frozen=True, slots=True)
class _Row:
    registration: Registration
    started_at: datetime
    seen_at: datetime

    @property
    def expires_at(self) -> datetime:
        return self.seen_at + self.registration.valid_for


class InProcessFleet:
    """`meshpoint.ports.task_store.Fleet` in this process; a base class of `InProcessStore`."""

    _tables: Tables
    _registered: dict[tuple[AgentName, ReplicaId], _Row]

    async def register(self, registration: Registration) -> None:
        """Keep the registration, and forget replicas lost long ago."""
        now, key = self._tables.clock.now(), (registration.agent, registration.id)
        known = self._registered.get(key)
        started_at = now if known is None else known.started_at
        self._registered[key] = _Row(registration, started_at, now)
        for other, row in list(self._registered.items()):
            if other[0] == registration.agent and row.expires_at + KEPT_WHEN_LOST <= now:
                del self._registered[other]

    async def unregister(self, agent: AgentName, replica: ReplicaId) -> None:
        """Forget the replica."""
        self._registered.pop((agent, replica), None)

    async def replicas(self, agent: AgentName | None = None) -> list[RegisteredReplica]:
        """The replicas of one agent or of all agents."""
        rows = [row for key, row in self._registered.items() if agent in {None, key[0]}]
        return sorted(map(self._describe, rows), key=lambda each: (each.agent, each.started_at))

    def _describe(self, row: _Row) -> RegisteredReplica:
        each = row.registration
        state = ReplicaState.DRAINING if each.is_draining else ReplicaState.LIVE
        return RegisteredReplica(
            each.id,
            each.agent,
            ReplicaState.LOST if row.expires_at <= self._tables.clock.now() else state,
            each.release,
            each.app_version,
            each.formats,
            each.slots,
            each.host,
            row.started_at,
            row.seen_at,
            each.pid,
        )
