"""The task store, split into small protocols that one adapter implements together.

Rules for every method:

- It runs in one transaction. It locks tasks in order of id, then calls in order of id, so that two
  replicas cannot deadlock.
- A method that takes a list returns a list of results in argument order.
- It raises `StoreUnavailable` if nothing was written, and `CommitInDoubt` if the answer to COMMIT
  was lost. Repeating a call with the same values is always safe: it finds what the first call
  wrote (by run id or claim id) and returns the same result.
- Deadlines and leases are computed with the store's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from meshpoint.errors import Unavailable
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.mailbox import (
    Mailbox,
    MailResult,
    RecordAnswer,
    SendSignal,
    SetValue,
    StoredValue,
    TooManyValues,
)
from meshpoint.model.operations import (
    LastPause,
    OperationStatus,
    OperationSummary,
    Revive,
    ReviveResult,
)
from meshpoint.model.questions import AskedQuestion, QuestionKey
from meshpoint.model.replicas import RegisteredReplica, Registration
from meshpoint.model.subtasks import AgentCheckpoint, Operation
from meshpoint.model.tasks import (
    EVERY_TASK,
    CallSummary,
    Dispatch,
    DueCounts,
    KeepAlive,
    L1Snapshot,
    ListPosition,
    OutboxItem,
    Replica,
    Resumable,
    Run,
    StoredTask,
    TaskFilter,
    TaskState,
    TaskSummary,
)
from meshpoint.model.timeline import TimelineEntry
from meshpoint.model.transitions import (
    Append,
    Attach,
    AttachResult,
    Begin,
    BeginResult,
    Cancel,
    CancelResult,
    Claim,
    ClaimResult,
    End,
    EndResult,
    ExistingTask,
    ExpiryResult,
    Overdue,
    Pause,
    PauseResult,
    Progress,
    ProgressRecorded,
    Release,
    Save,
    SaveResult,
    StoreReply,
    SuspendResult,
    UnroutableCall,
)


class Transitions(Protocol):
    """State transitions caused by a message or a run."""

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, ExistingTask]:
        """The existing rows by task id, in one read by primary key."""

    async def begin(self, begins: Sequence[Begin]) -> list[BeginResult]:
        """Insert tasks as `running`: generation 0, fence 1, attempt 1, leased, with their request.

        If the task already has another row, the result is `Fenced`, or `CancelFound(None)` if that
        row is cancelled. The row stores `Begin.order`, see `revive`. With `Begin.queued` the row
        is `ready` with attempt 0 and no owner.
        """

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        """Write a checkpoint: the task's row as `waiting`, one row per call, and the join.

        The generation is incremented and the attempt reset to 0. The fence is unchanged, or 1 for
        a new row. With `run.fence == 0` the row must not exist; otherwise it must be `running`
        under exactly this fence. `done` calls and joins of earlier generations are deleted;
        `cancelling` calls stay until they are sent. A call's deadline is the earlier of now +
        timeout and the task's deadline. If the join is complete at once because calls failed
        before they could be sent, the task is `ready`, and calls that are still pending are closed
        as `Failed(cancelled)` without being dispatched. Pending calls carry a dispatch lease: the
        caller sends them now, and the outbox returns them again after `dispatch_lease`.

        `Pause.log` changes the task's log, whose entries every later owner gets in
        `Resumable.log`. `Resumable.log_seq` grows by one with each entry and never decreases. If
        it is not `LogChange.after`, the result is `Fenced`.
        """

    async def append(self, appends: Sequence[Append]) -> list[SaveResult]:
        """Append entries to the logs of tasks running under exactly these fences.

        A run appends one change at a time. A paused task's format then says that it has a log. The
        task's `attempt` is reset to 1.

        Returns:
            `Fenced` if another run owns the task, or its log has other entries than `LogChange`
            expects. Otherwise the entries are written, and the result is `CancelFound(run)` if a
            cancel was requested, else `SaveCommitted`.
        """

    async def claim(
        self, claims: Sequence[Claim], replica: Replica, slots: int
    ) -> list[ClaimResult]:
        """Record one outcome per call, count it on the join, and resume completed joins' tasks.

        The first claim of a call wins. If the join completes while the task waits in the call's
        generation, the task becomes `running` under `replica` (fence + 1, attempt 1, new lease,
        run id = claim id), provided that a slot of `slots` is left and the replica reads its
        `state_format`. Otherwise it becomes `ready`. Pending calls that the join no longer needs
        are closed as `Failed(cancelled)` and left `cancelling`. The claim that completes the join
        returns `JoinCompleted` or `TaskReady`; earlier claims in the same batch return
        `StillWaiting`. State and outcomes are read after the row is locked.

        A claim of a call that the mesh has closed adds its tokens to the call's outcome, once, if
        no run has read that outcome. This holds while the task waits, is ready or parked, and for
        an operation that has failed or was cancelled, whose total then includes the tokens.
        """

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """Turn `running` rows with this fence into tombstones that hold their reply.

        State, log, outcomes, security context and (unless `dead_reason` is set) the request are
        wiped.
        `done` calls and joins are deleted; `cancelling` calls stay. A pending cancel request does
        not matter: the end that commits first wins.
        """

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        """Make `running` rows with this fence `ready`; they can be acquired after `Release.delay`.

        With `Release.parked_reason` they become `parked` instead, unless a cancel was requested,
        and `Release.version` is added to the versions that have tried them. A parked task is due
        to be ended at its own deadline, or once `parked_limit` has passed since it was first
        parked. Its next pause forgets all of this. `Release.crash_reason` is kept until the next
        pause or end. Returns `False` for fenced runs.
        """

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        """Cancel tasks in any state; see `CancelResult`. An unknown task gets a tombstone.

        A task with a parent other than `Cancel.parent` is left unchanged: `CancelStale`. If either
        parent is unknown, the task is cancelled. Repeating a cancel returns `CancelTooLate` with
        the cancelled reply.
        """

    async def attach(self, attaches: Sequence[Attach]) -> list[AttachResult]:
        """Add a reply address to tasks of its requester that have not ended.

        The reply is sent to the latest address first. Once that is confirmed, it is due to the
        next, see `Outbox.confirm_sent`. A task of a peer call keeps its first address as the
        first. Repeating an attach changes nothing.
        """

    async def find_dispatches(
        self, calls: Sequence[tuple[TaskId, TaskId]]
    ) -> list[Dispatch | None]:
        """The calls' requests as sent, by task id and `sub_task_id`.

        `None` for a call that is missing or has its outcome.
        """

    async def find_questions(self, keys: Sequence[QuestionKey]) -> list[AskedQuestion | None]:
        """Questions that tasks have asked, with their answers. `None` for any other key.

        A question whose wait has ended without an answer is open until the task ends.
        """

    async def signal(self, signals: Sequence[SendSignal]) -> list[MailResult]:
        """Keep signals until their tasks receive them, in order of acceptance.

        If a task waits for the signal, the first such call gets the oldest one, as `claim` records
        an outcome. A completed join makes the task `ready`. A pause takes kept signals for calls
        that wait for them, in call order, until its join is met. So a signal is received in the
        transaction that stores its value as an outcome.

        A repeated signal, with a known id, is not kept again. A task remembers the latest
        `MAX_SIGNAL_IDS` ids. The tombstone of an early cancel does not count.
        """

    async def answer(self, answers: Sequence[RecordAnswer]) -> list[MailResult]:
        """Record answers of questions that tasks wait for, as `claim` records an outcome.

        An answer that arrives while its task is not waiting for it is kept: the next pause with
        the question takes it, if the prompt and the schema are the same. Otherwise the pause drops
        it, and the question is open again.
        """

    async def set_value(self, command: SetValue) -> SaveResult | TooManyValues:
        """Set a value of the task running under exactly this fence. Repeating it is safe.

        Returns:
            `CancelFound(run)` if the value is set and a cancel was requested.
        """

    async def value(self, task_id: TaskId, agent: AgentName, key: str) -> StoredValue | None:
        """A value of a task, for as long as the task has a row. `None` for an unknown task."""

    async def record_progress(self, updates: Sequence[Progress]) -> list[ProgressRecorded | None]:
        """Extend the idle deadline of pending calls and return where to forward each update.

        Never extends beyond the absolute deadline. The result is `None` if there is no such
        pending call or the sender is not the called peer. Extensions shorter than a tenth of the
        idle timeout are not written.
        """


class DueWork(Protocol):
    """Work that becomes due by time alone. Locked rows are skipped."""

    async def due(self, replica: Replica, limit: int) -> DueCounts:
        """Count the due work of each kind for `replica`, each up to `limit`, in one read."""

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[ExpiryResult]:
        """Close overdue calls and joins of waiting tasks, and resume tasks whose join completes.

        An overdue call ends as `Failed(timeout)`. An overdue join closes all its open calls as
        `Failed(timeout)` and is complete. Calls that timed out are left `cancelling`. Completed
        joins are handled as in `claim`.
        """

    async def acquire(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Acquire due `ready` tasks in formats that the replica reads, oldest first.

        They become `running` under `replica`. At most `suspect_slots` of them are suspects, that
        is, were rescued at least `SUSPECT_AFTER_RESCUES` times.
        """

    async def acquire_parked(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Acquire `parked` tasks that `Replica.version` has not tried, as `acquire` does."""

    async def acquire_overdue(self, replica: Replica, limit: int) -> list[Overdue]:
        """Acquire tasks that only need to be ended, in any format, suspended ones included.

        These are `ready` tasks past their deadline, and `parked` tasks past their deadline or
        `parked_limit`. Their content is not read, because it may be damaged.
        """

    async def unread(self, replica: Replica, age: timedelta) -> dict[str, int]:
        """Count `ready` tasks that were due `age` ago, by the formats `replica` cannot read."""

    async def unpark(self, task_ids: Sequence[TaskId]) -> list[bool]:
        """Make `parked` tasks `ready` and forget which versions have tried them.

        A suspension ends too. Returns `False` for a task that is not parked.
        """

    async def suspend(self, task_ids: Sequence[TaskId]) -> list[SuspendResult]:
        """Suspend `running`, `waiting` and `ready` tasks: no replica acquires them.

        Calls are still sent, outcomes recorded and counted, deadlines enforced and keep-alives
        sent. A run that owns the task continues to its next pause, its end, or its release. Where
        `claim`, `expire` or `rescue` would acquire the task, it becomes `ready` instead. `rescue`
        parks a task again that was parked since its last pause. The run id is the same as without
        the suspension, so repeated transitions find what they wrote.

        A cancel, the end and a new attempt lift the suspension. A pause keeps it, and so does a
        release, even if it parks the task. `parked` and ended tasks, and tasks whose cancel was
        requested, are refused. A repetition keeps the first time.
        """

    async def unsuspend(self, task_ids: Sequence[TaskId]) -> list[bool]:
        """Lift the suspension of tasks. A `ready` one can be acquired at once.

        Returns `False` for a task that is not suspended.
        """

    async def rescue(
        self, replica: Replica, limit: int, suspect_slots: int = 0
    ) -> list[Resumable]:
        """Rescue `running` tasks of this agent whose lease has expired.

        They get fence + 1 and rescues + 1, and are owned by `replica`. If `replica` does not
        isolate suspects, they also get attempt + 1, because otherwise no crash would be counted.
        In generation 0, or once a cancel was requested, any replica of the agent may rescue them;
        otherwise only replicas that read the format. Suspects (rescued at least
        `SUSPECT_AFTER_RESCUES` times) beyond the limit `suspect_slots` become `ready` without an
        owner and are not returned. With `Replica.fails_lost`, operations are rescued in any
        format, beyond `suspect_slots`, and even if suspended.
        """

    async def release_unread(self, replica: Replica, limit: int) -> list[TaskId]:
        """Take tasks that `replica` may not rescue, because of their format, from lost owners.

        These are `running` tasks that no replica has rescued since their lease expired, for as
        long as another lease. They get rescues + 1, and attempt + 1 as in `rescue`. A task that
        was parked since its last pause is `parked` again, and any other becomes `ready`.
        """

    async def find_owned(self, run: Run) -> Resumable | None:
        """The task owned by exactly this run, or `None` if the run lost it.

        Used by the process that runs a task isolated from its replica.
        """

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Extend the leases of `running` tasks with exactly these fences.

        Returns the runs that no longer own their task.

        An expired lease is renewed if no replica has rescued its task.
        """

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        """`waiting`, `ready` and `parked` tasks whose requester is due a keep-alive.

        The time of each task's next keep-alive is set.
        """

    async def purge(self, agent: AgentName, limit: int) -> int:
        """Delete tombstones past `expires_at` whose reply and cancels are sent.

        Returns the number of deleted tombstones.
        """

    async def prune_timelines(self, agent: AgentName, limit: int) -> int:
        """Delete up to `limit` entries of timelines that are older than the store keeps them.

        Returns the number of deleted entries. Does nothing in a store that records none.
        """


class Outbox(Protocol):
    """Committed messages that are not sent yet."""

    async def unsent(self, agent: AgentName, limit: int) -> list[OutboxItem]:
        """Dispatches, cancel notices and replies that are due.

        Each is leased to the caller and becomes due again after a growing back-off.
        """

    async def store_replies(self, replies: Sequence[StoreReply]) -> list[bool]:
        """Store undeliverable replies of tasks without a row.

        A task without a row becomes a tombstone (generation 0, fence 0) whose reply is due after
        the dispatch lease. With `StoreReply.is_redelivery`, an ended task of this agent has its
        reply due again, to the address in `StoreReply.reply`; a reply that is still due to that
        address keeps its schedule.

        Returns:
            For each reply, whether the outbox will send it. `False` means that the id belongs to
            another run's row, which is unchanged.
        """

    async def confirm_sent(self, sent: Sequence[OutboxItem]) -> None:
        """Record that the broker confirmed these messages.

        If the record is lost, they are sent again under the same ids. A cancel notice's call is
        deleted if its task has ended, paused again or was revived; otherwise it becomes `done`. A
        reply's row stays until `expires_at`; if other addresses are attached, its reply is due at
        once to the next of them. A reply whose `fence` differs from the row's belongs
        to an earlier end and changes nothing.
        """

    async def record_unroutable(self, calls: Sequence[UnroutableCall]) -> None:
        """Record that the broker returned requests because their peers have no queues.

        Unsent requests become due after `retry_after`, or earlier if they already are. If the
        record is lost, they stay due after their back-off, and the time starts when the broker
        returns them again. `Dispatch.unroutable_for` counts from the last `UnroutableCall` with
        `starts`. A recorded call that expires before it is sent fails as undeliverable.
        """


class Catalog(Protocol):
    """Read access to tasks for operators and scripts."""

    async def tasks(
        self,
        *,
        agent: AgentName | None = None,
        states: Sequence[TaskState] = (),
        where: TaskFilter = EVERY_TASK,
        limit: int = 100,
        after: ListPosition | None = None,
    ) -> list[TaskSummary]:
        """Tasks by the time of their last pause, newest first.

        Empty `states` matches every state. With `after`, the `position` of a listed task, only
        tasks that follow it. It stays valid when that task pauses again or is deleted.
        """

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        """One task and its calls in call order, or `None` if the task does not exist."""

    async def mailbox(self, task_id: TaskId) -> Mailbox:
        """What is kept for a task besides its checkpoints; empty for an unknown task."""

    async def timeline(
        self, task_id: TaskId, *, after: int = 0, limit: int = 1000
    ) -> list[TimelineEntry]:
        """The changes of a task, oldest first, from the entry after the one with id `after` on.

        Each is written in the transaction that makes the change. A change that is fenced out
        leaves none. They outlive the task. Empty if the store records none.
        """

    async def stored_request(self, task_id: TaskId) -> bytes | None:
        """The encoded request of a task; `None` if missing, as after most ends."""

    async def stored_task(self, task_id: TaskId) -> StoredTask | None:
        """A task that has not ended, with its calls and its log; `None` if there is no such task.

        The parts are consistent, even if the task changes during the read.

        Raises:
            StoreUnavailable: The task changes faster than it can be read.
            ValueError: A value in its row is damaged.
        """


class Operations(Protocol):
    """Operations and their checkpoint histories.

    A task becomes an operation with its first subtask; a task without subtasks writes nothing
    here. An operation's state and owner are stored in the task's row. This part of the store adds
    the data that only operations have.

    The other transitions treat operations as follows:

    - `begin` with `Begin.operation` writes the operation together with the task.
    - `pause` adds `Pause.children` to its children and writes `Pause.checkpoint`, unless a
      checkpoint with that `seq` exists. Pausing with a checkpoint a task that is not an operation
      returns `Fenced` and writes nothing.
    - `end` as completed deletes its checkpoints, or moves them to the archive if the store keeps
      one. A preserved operation keeps them. `end` as failed or cancelled keeps the request, the
      log and the last pause, except the requests of calls that have a result and, unless the store
      keeps it, the security context. It writes `End.checkpoint` (or repeats the last checkpoint
      with `End.reason` or `dead_reason`), and keeps all of it for `checkpoint_ttl` instead of
      `tombstone_ttl`, or forever if preserved. `cancel` of a waiting task does the same with the
      reason "cancelled on request".
    - `purge` deletes the operation and its checkpoints together with the tombstone.

    Only the newest working memory stored with an operation's checkpoints is kept: a checkpoint
    that carries a memory removes it from all earlier ones. Until then, the checkpoint that carries
    it is kept even if it is too old for the history. So is the last checkpoint of each attempt
    (`retry_count`). Repeating the last checkpoint copies the memory's hash but does not move the
    memory.
    """

    async def track(self, run: Run, operation: Operation) -> BeginResult:
        """Make the running task with exactly this fence an operation.

        Returns:
            `BeginCommitted`, also if the task is an operation already; `Fenced` if another run
            owns the task; `CancelFound(run)` if a cancel was requested.
        """

    async def save(self, command: Save) -> SaveResult:
        """Write a checkpoint of the operation running under exactly this fence; prune its history.

        If the run has `progressed`, its `attempt` is reset to 1. Otherwise it is unchanged, so
        that a task that keeps saving and crashing reaches its last attempt. Saving a `seq` that
        already exists changes nothing and succeeds.
        """

    async def latest(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> AgentCheckpoint | None:
        """The operation's checkpoint with the highest `seq`.

        Returns `None` if there is no checkpoint or it belongs to another agent.
        """

    async def l1_snapshot(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> L1Snapshot | None:
        """The newest working memory stored with the operation's checkpoints.

        Archived checkpoints are ignored. Returns `None` if there is no stored memory or it belongs
        to another agent. Its `seq` may be lower than `latest().seq`.
        """

    async def history(self, task_id: TaskId) -> list[AgentCheckpoint]:
        """All stored checkpoints of the operation, oldest first.

        Archived checkpoints are returned only if there are no others. As in `latest`, working
        memories are not included.
        """

    async def revive(self, command: Revive) -> ReviveResult:
        """Make an ended task `ready` again in generation 0 with a higher fence.

        The higher fence turns its old runs into zombies. Checks run in the order of `Refusal`. An
        exclusive agent's other active operations are counted under a lock on that agent, so that
        two concurrent requests cannot both succeed.

        A request counts as repeated, and gets its first result again, if the row's run id is its
        `token` or its `order` is the last one recorded for the task. A lower `order` is refused as
        RUNNING. A request with an `order` from an agent that is not the task's requester is
        refused as NOT_FOUND; a task without a requester can be resumed by any agent. Neither check
        applies to a request without an `order`, which leaves the recorded order unchanged.

        Calls and joins of the earlier attempt are deleted. `cancelling` calls stay until they are
        sent, moved to generation -1 so that no later pause can take their outcomes. A request
        without a `requester` keeps the existing requester, without its deadline, and without its
        idle timeout if its reply has been sent.

        With `pause`, the task is resumed at its last pause instead, in the pause's generation: the
        pause is written again with its calls and its children. A call with an outcome is done,
        and the requests of the others are due at once. If the task has been resumed since the
        pause was read, nothing changes and the request is refused as RUNNING.

        With `adopt`, a task that has not ended continues for the new requester and the result is
        `Adopted`.
        """

    async def last_pause(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> LastPause | None:
        """The last pause of a failed or cancelled operation.

        Returns `None` if the operation has never paused in its last attempt, is active, has
        completed, or belongs to another agent.
        """

    async def copy_key(self) -> bytes:
        """The 32-byte key that authenticates this mesh's copies outside the store.

        It is generated at random once and kept.
        """

    async def preserve(self, task_id: TaskId, *, preserve: bool = True) -> bool:
        """Exempt an operation's checkpoints from every deletion, or end the exemption.

        Returns `False` if there is no such operation.
        """

    async def operation(self, task_id: TaskId) -> OperationSummary | None:
        """One operation, or `None` if the task does not exist or is not an operation."""

    async def operations(
        self,
        *,
        agent: AgentName | None = None,
        statuses: Sequence[OperationStatus] = (),
        limit: int = 100,
    ) -> list[OperationSummary]:
        """Operations, newest first. Empty `statuses` matches every status."""


class Fleet(Protocol):
    """The replicas that serve agents. Each has one row for each agent that it serves."""

    async def register(self, registration: Registration) -> None:
        """Register a replica, or register it again.

        Also forgets replicas of the agent that have been lost for longer than `KEPT_WHEN_LOST`.
        """

    async def unregister(self, agent: AgentName, replica: ReplicaId) -> None:
        """Forget a replica that has stopped."""

    async def replicas(self, agent: AgentName | None = None) -> list[RegisteredReplica]:
        """The replicas of `agent`, or of all agents, in the order of their start."""

    @property
    def clock_offset(self) -> timedelta | None:
        """How far the store's clock is ahead of this host's, without I/O.

        `None` if unknown, or if they are the same.
        """


class CheckpointStore(Transitions, DueWork, Outbox, Catalog, Operations, Fleet, Protocol):
    """The complete store. `durable` says whether tasks kept here outlive the process."""

    @property
    def durable(self) -> bool: ...

    @property
    def current_time(self) -> datetime | None:
        """The current time by the store's clock, without I/O. `None` if not yet known."""

    async def open(self) -> None:
        """Connect and check the schema.

        Raises:
            ConfigurationError: the database is not migrated; the message names the command to run.
            StoreUnavailable: the database does not answer.
        """

    async def close(self) -> None:
        """Release all connections."""


class CacheUnavailable(Unavailable):
    """The cache did not answer in time."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An entry of a checkpoint that is only in the database."""


class CheckpointCache(Protocol):
    """A cache with one entry per operation and agent.

    Keys have the form `checkpoint:{analysis_id}:{agent_type}`.
    """

    async def put(self, checkpoint: AgentCheckpoint) -> None:
        """Replace the cached copy and restart its time to live.

        A cache may leave out a checkpoint most of whose records have not changed, so that all puts
        of an operation together write bytes in proportion to its records.

        Raises:
            CacheUnavailable: the entry may or may not have been written.
            CheckpointError: the checkpoint is too large to cache.
        """

    async def get(
        self, operation_id: TaskId, agent: AgentName
    ) -> AgentCheckpoint | LeftOut | None:
        """Return the cached copy, or `None` if there is no entry.

        Raises:
            CacheUnavailable: the cache did not answer.
            CheckpointError: the entry is not a checkpoint of this operation.
        """

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        """Delete the cached copy.

        Raises:
            CacheUnavailable: the entry may or may not have been deleted.
        """

    async def close(self) -> None:
        """Release all connections."""
