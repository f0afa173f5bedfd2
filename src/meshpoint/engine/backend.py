"""Where tasks live between their segments: the database or this process, behind one interface.

The two differ in who may run a task next. Replicas share the database, so any of them resumes a
task stored there, and its requests are acked as soon as it is stored. A task in this process ends
with it, so its requests stay unacked until it ends: after a crash the broker redelivers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from meshpoint.engine.lease_renewer import LeaseRenewer
from meshpoint.engine.retry import Retry
from meshpoint.model.messages import Address
from meshpoint.model.tasks import Run
from meshpoint.ports.clock import Clock
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.subtasks.checkpointer import AgentCheckpointer
from meshpoint.working_memory.snapshots import MemoryServices


class StartupGrace:
    """Two grace periods, in which the sweeper may not enforce deadlines and leases.

    Right after a start or an outage, responses are still queued. Measured by the monotonic clock.
    """

    def __init__(self, clock: Clock, settle_time: timedelta, lease: timedelta) -> None:
        self._clock = clock
        self._settle_time = settle_time.total_seconds()
        self._lease = lease.total_seconds()
        self._settling_since = self._renewing_since = clock.monotonic()

    def restart_all(self) -> None:
        """Restart both periods: no response could be recorded and no lease renewed."""
        self._settling_since = self._renewing_since = self._clock.monotonic()

    def restart(self) -> None:
        """Restart the wait for responses: none could arrive, but leases were renewed."""
        self._settling_since = self._clock.monotonic()

    @property
    def may_expire(self) -> bool:
        """Whether queued responses had time to arrive, so that deadlines may be enforced."""
        return self._clock.monotonic() >= self._settling_since + self._settle_time

    @property
    def may_rescue(self) -> bool:
        """Whether owners had time to renew their leases, so that their tasks may be rescued."""
        return self._clock.monotonic() >= self._renewing_since + self._lease


@dataclass(frozen=True, slots=True)
class Backend:
    """A task store with everything that depends on it. This one is in this process.

    Attributes:
        store: The tasks.
        reply_to: The address for responses to their calls. It always reaches a replica that can
            see the call.
        checkpointer: Writes and restores the checkpoints of operations.
        memory_services: What the tasks' working memory is stored in.
        grace: When deadlines and leases may be enforced.
    """

    is_shared: ClassVar[bool] = False
    """Whether other replicas can resume its tasks, so that stored requests are acked."""

    store: CheckpointStore
    reply_to: Address
    checkpointer: AgentCheckpointer
    memory_services: MemoryServices
    grace: StartupGrace

    @property
    def may_rescue(self) -> bool:
        """Whether tasks whose lease has expired may be rescued now: this process owns all."""
        return False

    def start_renewing(self, run: Run) -> None:
        """Renew the lease of `run` from now on, if its task can have another owner."""

    def record_answer(self, retry: Retry) -> None:
        """Record that the store has answered. After an outage, the grace periods begin again."""


@dataclass(frozen=True, slots=True)
class DatabaseBackend(Backend):
    """Tasks in a database that all replicas share. `leases` is `None` without renewals."""

    is_shared = True

    leases: LeaseRenewer | None

    @property
    def may_rescue(self) -> bool:
        """Whether owners had time to renew their leases."""
        return self.grace.may_rescue

    def start_renewing(self, run: Run) -> None:
        """Renew the lease of `run` from now on."""
        if self.leases is not None:
            self.leases.start_renewing(run)

    def record_answer(self, retry: Retry) -> None:
        """End an outage, and give owners and responses time before anything is enforced."""
        if retry.record_recovery():
            self.grace.restart_all()
