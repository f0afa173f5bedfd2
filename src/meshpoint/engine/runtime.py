"""State shared by all steps of one worker."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import JsonValue

from meshpoint._version import __version__
from meshpoint.agents.versions import code_version
from meshpoint.engine import presence
from meshpoint.engine.backend import Backend, DatabaseBackend, StartupGrace
from meshpoint.engine.background import BackgroundTasks
from meshpoint.engine.lease_renewer import LeaseRenewer
from meshpoint.engine.presence import Presence
from meshpoint.engine.retry import Retry
from meshpoint.engine.slots import Slots
from meshpoint.errors import StoreUnavailable
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.memory import MemoryRecovery, task_id_of
from meshpoint.model.messages import private_queue, response_queue
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed
from meshpoint.model.peer_directory import PeerDirectory
from meshpoint.model.replicas import Registration
from meshpoint.model.secrets import mask_reason
from meshpoint.model.tasks import Replica, Run
from meshpoint.ports.agent import DurableAgent, list_versions, readable_formats
from meshpoint.ports.broker import Broker
from meshpoint.ports.clock import Clock
from meshpoint.ports.hand_over import HandOverBroker
from meshpoint.ports.isolation import Isolation
from meshpoint.ports.observer import Observer, Steps
from meshpoint.ports.task_store import CheckpointCache, CheckpointStore
from meshpoint.ports.working_memory import SnapshotStore, WorkingMemory
from meshpoint.subtasks.checkpointer import AgentCheckpointer
from meshpoint.working_memory.snapshots import MemoryServices

_T = TypeVar("_T")


@dataclass(slots=True)
class ReplicaRuntime:
    """One agent in one replica: its backends, its broker, its limits.

    Attributes:
        database: The tasks in the database, all of which every replica serves, or `None` with
            `session_service: memory`.
        in_process: The tasks that live in this process.
        l1: The shared working memory, without which tasks cannot run, or `None` if not configured.
        connections: Other connections to close.
        isolation: Runs suspect tasks in their own processes.
        slots: One per running segment.
        suspect_slots: One slot for a suspect, a task that may have killed its owners. It runs
            isolated.
        background: The asyncio tasks of this worker.
        state_format: The format of the states of new tasks.
        agent: The agent served by this worker.
        backends: The backends that may have tasks, the database first.
        directory: The peers that the agent may discover. `None` until a worker has created it.
        resources: What the lifespan of each version of the agent has yielded, by state format.
        hand_over_broker: The broker, once it is known that its queues are in the database, which
            then publishes and acks in its own commits.
        new_task_backend: Where new tasks pause. A task with a row stays where its row is.
        sweep_wakeup: Set to sweep now instead of after the interval.
    """

    replica: Replica
    broker: Broker
    database: DatabaseBackend | None
    in_process: Backend
    l1: WorkingMemory | None
    connections: Sequence[CheckpointCache | SnapshotStore]
    isolation: Isolation | None
    options: Options
    clock: Clock
    slots: Slots
    suspect_slots: Slots
    retry: Retry
    steps: Steps
    background: BackgroundTasks
    state_format: str
    sweep_wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    directory: PeerDirectory | None = None
    hand_over_broker: HandOverBroker | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    agent: AgentName = field(init=False)
    backends: tuple[Backend, ...] = field(init=False)
    new_task_backend: Backend = field(init=False)

    def __post_init__(self) -> None:
        self.agent = self.replica.agent
        self.backends = (
            (self.in_process,) if self.database is None else (self.database, self.in_process)
        )
        is_durable = self.options.stateless_checkpointing and self.database is not None
        self.new_task_backend = self.backends[0] if is_durable else self.in_process

    @property
    def runs_without_database(self) -> bool:
        """Whether new tasks run although the database is unavailable and cannot be asked."""
        return (
            self.database is not None
            and not self.new_task_backend.is_shared
            and self.retry.is_store_unavailable
        )

    async def ask_store(self, backend: Backend, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Run `attempt` on the store of `backend`, again while it is unavailable.

        Raises:
            StoreUnavailable: At once, if new tasks do not need this store: messages about them
                must not wait for it. Try again later.
        """
        if not backend.is_shared or self.new_task_backend.is_shared:
            return await self.retry.until_available(attempt)
        try:
            return await attempt()
        except StoreUnavailable as error:
            self.retry.record_outage(error)
            raise

    def make_presence(self) -> Presence:
        """Describe this replica to others, once it serves."""
        interval = max(presence.MIN_INTERVAL, self.options.renew_interval)
        return Presence(
            Registration(
                self.replica.id,
                self.agent,
                __version__,
                self.options.app_version or "",
                self.replica.formats,
                self.options.max_concurrency,
                socket.gethostname(),
                valid_for=interval * presence.INTERVALS_UNTIL_LOST,
                pid=os.getpid(),
            )
        )

    def release_slots(self, *, is_suspect: bool) -> None:
        """Release the slot of a task and, if it is a suspect, its slot for suspects."""
        self.slots.release()
        self.suspect_slots.release(is_suspect)

    def stop_renewing(self, run: Run) -> None:
        """Stop renewing the lease of `run`, if it was renewed."""
        if self.database is not None and self.database.leases is not None:
            self.database.leases.stop_renewing(run)

    def report_failure(
        self,
        task_id: TaskId,
        failure: Failed,
        raised: Mapping[str, JsonValue] | None = None,
        *,
        refused: bool = False,
    ) -> None:
        """Report that a task has ended without a result, and why, to logs and observers.

        Called once the end is committed. `raised` describes the exception of its code, with
        secrets masked. `refused`: the request ran no code here, because it had expired, for
        example.
        """
        reason = mask_reason(failure.message, self.options.secret_keys)
        detail: dict[str, JsonValue] = {"refused": True} if refused else {}
        if raised is not None:
            detail |= {"error_type": raised["type"], "traceback": raised["traceback"]}
        self.steps.emit(
            Step.TASK_FAILED, task_id, kind=failure.kind.value, reason=reason, **detail
        )

    async def write_first(
        self,
        task_id: TaskId,
        write: Callable[[Backend], Awaitable[_T]],
        *,
        may_degrade: bool = True,
    ) -> tuple[Backend, _T]:
        """Write the first row of a task. Returns the backend it was written to and the result.

        If that is the database, and the write has definitely not committed there within
        `checkpoint_retry_time` and the task `may_degrade`, it is written to memory instead. A
        write in doubt is repeated until the database reports its result.
        """
        backend, policy = self.new_task_backend, self.options.on_checkpoint_failure
        if backend.is_shared and may_degrade and policy == "keep_in_memory":
            try:
                attempt = partial(write, backend)
                return backend, await self.retry.if_available(
                    attempt, self.options.checkpoint_retry_time
                )
            except StoreUnavailable as error:
                self.steps.emit(Step.DEGRADED, task_id, error=str(error))
                backend = self.in_process
        return backend, await self.retry.until_available(partial(write, backend))


def build_runtime(
    agent: DurableAgent[Any, Any],
    *,
    broker: Broker,
    memory: CheckpointStore,
    durable: CheckpointStore | None,
    lease_store: Callable[[], CheckpointStore] | None,
    clock: Clock,
    observer: Observer,
    options: Options,
    local: WorkingMemory,
    l1: WorkingMemory | None = None,
    snapshots: SnapshotStore | None = None,
    cache: CheckpointCache | None = None,
    replica_id: ReplicaId | None = None,
    isolation: Isolation | None = None,
) -> ReplicaRuntime:
    """Build the shared state of a worker.

    Args:
        agent: The agent to serve.
        broker: Carries the messages.
        memory: The store of the in-process backend.
        durable: The database, or `None` with `session_service: memory`. The options decide
            whether new tasks pause in it.
        lease_store: Opens a second connection, for the thread that renews leases.
        clock: The time.
        observer: Receives all events.
        options: The limits and durations.
        local: The working memory in this process.
        l1: The working memory that replicas share.
        snapshots: Snapshots of working memories, for tasks in the database.
        cache: Keeps a fast copy of each operation's last checkpoint.
        replica_id: The id of this replica; by default a new one.
        isolation: Runs suspect tasks in their own processes.
    """
    replica = _describe_replica(agent, options, replica_id, isolates=isolation is not None)
    options = replace(options, app_version=options.app_version or replica.version)
    steps = Steps(observer, replica.agent, replica.id)
    retry = Retry(clock, steps)
    grace = partial(StartupGrace, clock, options.settle_time, options.lease)
    database = None
    if durable is not None:
        database = DatabaseBackend(
            durable,
            response_queue(replica.agent),
            AgentCheckpointer(durable, cache, report_problem=_copy_problem_reporter(steps)),
            _build_memory_services(l1 or local, snapshots, options, steps),
            grace(),
            None
            if lease_store is None
            else LeaseRenewer(lease_store, replica, options.renew_interval, steps),
        )
    return ReplicaRuntime(
        replica=replica,
        broker=broker,
        database=database,
        in_process=_build_in_process(memory, local, replica, options, steps, grace()),
        l1=l1,
        connections=[connection for connection in (cache, snapshots) if connection is not None],
        isolation=isolation,
        options=options,
        clock=clock,
        slots=Slots(options.max_concurrency),
        suspect_slots=Slots(1),
        retry=retry,
        steps=steps,
        background=BackgroundTasks(retry, steps),
        state_format=agent.state_format,
    )


def _describe_replica(
    agent: DurableAgent[Any, Any],
    options: Options,
    replica_id: ReplicaId | None,
    *,
    isolates: bool,
) -> Replica:
    return Replica(
        replica_id or ReplicaId(new_id()),
        AgentName(agent.name),
        readable_formats(agent),
        options.lease,
        isolates=isolates,
        version=code_version(list_versions(agent), options.app_version),
        fails_lost=options.on_lost_owner == "fail",
    )


def _build_in_process(
    memory: CheckpointStore,
    local: WorkingMemory,
    replica: Replica,
    options: Options,
    steps: Steps,
    grace: StartupGrace,
) -> Backend:
    return Backend(
        memory,
        private_queue(replica.agent, replica.id),
        AgentCheckpointer(memory),
        # An in-process task would restart from scratch on another replica, where a snapshot of
        # its old memory would get in the way. So it gets no snapshots.
        _build_memory_services(local, None, options, steps),
        grace,
    )


def _copy_problem_reporter(steps: Steps) -> Callable[[TaskId, str, str], None]:
    def report_problem(task_id: TaskId, what: str, why: str) -> None:
        steps.emit(Step.CHECKPOINT_COPY, task_id, what=what, why=why)

    return report_problem


def _build_memory_services(
    l1: WorkingMemory, snapshots: SnapshotStore | None, options: Options, steps: Steps
) -> MemoryServices:
    def report_problem(memory: str, what: str, why: str) -> None:
        steps.emit(Step.MEMORY_PROBLEM, task_id_of(memory), what=what, why=why)

    def report_recovery(memory: str, recovery: MemoryRecovery) -> None:
        behind: dict[str, JsonValue] = (
            {"behind": True, "why": "; ".join(recovery.problems)} if recovery.behind else {}
        )
        steps.emit(
            Step.MEMORY_RECOVERED,
            task_id_of(memory),
            source=recovery.source.value,
            keys=recovery.keys,
            **behind,
        )

    return MemoryServices(
        l1,
        snapshots,
        max_bytes=options.memory_max_bytes,
        keep_completed=options.memory_keep,
        report_problem=report_problem,
        on_recovered=report_recovery,
    )
