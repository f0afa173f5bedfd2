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
from datetime import datetime, timedelta
from typing import Protocol

from meshpoint.model.checkpoint import (
    Arrival,
    Begin,
    BeginResult,
    CallSummary,
    Cancel,
    CancelResult,
    Claim,
    Dispatch,
    Due,
    End,
    EndResult,
    Expired,
    KeepAlive,
    KeepReply,
    Known,
    Pause,
    PauseResult,
    Progress,
    ProgressNoted,
    Release,
    Replica,
    Resumable,
    Run,
    Send,
    TaskState,
    TaskSummary,
)
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.ports.operations import Operations


class Transitions(Protocol):
    """State transitions caused by a message or a run."""

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, Known]:
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
        """

    async def claim(self, claims: Sequence[Claim], replica: Replica, slots: int) -> list[Arrival]:
        """Record one outcome per call, count it on the join, and resume completed joins' tasks.

        The first claim of a call wins. If the join completes while the task waits in the call's
        generation, the task becomes `running` under `replica` (fence + 1, attempt 1, new lease,
        run id = claim id), provided that a slot of `slots` is left and the replica reads its
        `state_format`. Otherwise it becomes `ready`. Pending calls that the join no longer needs
        are closed as `Failed(cancelled)` and left `cancelling`. The claim that completes the join
        returns `AllArrived` or `MadeReady`; earlier claims in the same batch return
        `StillWaiting`. State and outcomes are read after the row is locked.
        """

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """Turn `running` rows with this fence into tombstones that hold their reply.

        State, outcomes, security context and (unless `dead_reason` is set) the request are wiped.
        `done` calls and joins are deleted; `cancelling` calls stay. A pending cancel request does
        not matter: the end that commits first wins.
        """

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        """Make `running` rows with this fence `ready`; they can be acquired after `not_before`.

        A task released as incompatible becomes `parked` once `incompatible_limit` has passed since
        its first such release. `Release.death` is kept until the next pause or end. Returns
        `False` for fenced runs.
        """

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        """Cancel tasks in any state; see `CancelResult`. An unknown task gets a tombstone.

        A task with a parent other than `Cancel.parent` is left unchanged: `CancelStale`. If either
        parent is unknown, the task is cancelled. Repeating a cancel returns `CancelTooLate` with
        the cancelled reply.
        """

    async def requested(self, calls: Sequence[tuple[TaskId, TaskId]]) -> list[Dispatch | None]:
        """The calls' requests as sent, by task id and `sub_task_id`. `None` for a missing call."""

    async def progress(self, updates: Sequence[Progress]) -> list[ProgressNoted | None]:
        """Extend the idle deadline of pending calls and return where to forward each update.

        Never extends beyond the absolute deadline. The result is `None` if there is no such
        pending call or the sender is not the called peer. Extensions shorter than a tenth of the
        idle timeout are not written.
        """


class DueWork(Protocol):
    """Work that becomes due by time alone. Locked rows are skipped."""

    async def due(self, replica: Replica, limit: int) -> Due:
        """Count the due work of each kind for `replica`, each up to `limit`, in one read."""

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[Expired]:
        """Close overdue calls and joins of waiting tasks, and resume tasks whose join completes.

        An overdue call ends as `Failed(timeout)`. An overdue join closes all its open calls as
        `Failed(timeout)` and is complete. Calls that timed out are left `cancelling`. Completed
        joins are handled as in `claim`.
        """

    async def take(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Acquire due `ready` tasks in formats that the replica reads, oldest first.

        They become `running` under `replica`. At most `suspects` of them are suspects, that is,
        were rescued at least `SUSPECT_FROM` times.
        """

    async def take_over(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """Rescue `running` tasks of this agent whose lease has expired.

        They get fence + 1 and rescues + 1, and are owned by `replica`. If `replica` does not
        isolate suspects, they also get attempt + 1, because otherwise no crash would be counted.
        In generation 0 any replica of the agent may rescue them; later, only replicas that read
        the format. Suspects (rescued at least `SUSPECT_FROM` times) beyond the limit `suspects`
        become `ready` without an owner and are not returned.
        """

    async def owned(self, run: Run) -> Resumable | None:
        """The task owned by exactly this run, or `None` if the run lost it.

        Used by the process that runs a task apart from its replica.
        """

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Extend the leases of `running` tasks with exactly these fences.

        Returns the runs that no longer own their task.

        An expired lease is renewed if no replica has rescued its task.
        """

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        """`waiting` and `ready` tasks whose requester is due a keep-alive.

        The time of each task's next keep-alive is set.
        """

    async def purge(self, agent: AgentName, limit: int) -> int:
        """Delete tombstones past `expires_at` whose reply and cancels are sent.

        Returns the number of deleted tombstones.
        """


class Outbox(Protocol):
    """Committed messages that are not sent yet."""

    async def unsent(self, agent: AgentName, limit: int) -> list[Send]:
        """Dispatches, cancel notices and replies that are due.

        Each is leased to the caller and becomes due again after a growing back-off.
        """

    async def keep_replies(self, replies: Sequence[KeepReply]) -> list[bool]:
        """Store undeliverable replies of tasks without a row.

        A task without a row becomes a tombstone (generation 0, fence 0) whose reply is due after
        the dispatch lease. With `KeepReply.again`, an ended task of this agent has its reply due
        again, to the address in `KeepReply.reply`; a reply that is still due to that address keeps
        its schedule.

        Returns:
            For each reply, whether the outbox will send it. `False` means that the id belongs to
            another run's row, which is unchanged.
        """

    async def mark_sent(self, sent: Sequence[Send]) -> None:
        """Record that the broker confirmed these messages.

        If the record is lost, they are sent again under the same ids. A cancel notice's call is
        deleted if its task has ended, paused again or was revived; otherwise it becomes `done`. A
        reply's row stays until `expires_at`. A reply whose `fence` differs from the row's belongs
        to an earlier end and changes nothing.
        """


class Catalog(Protocol):
    """Read access to tasks for operators and scripts."""

    async def tasks(
        self, *, agent: AgentName | None = None, states: Sequence[TaskState] = (), limit: int = 100
    ) -> list[TaskSummary]:
        """Tasks, newest first. Empty `states` matches every state."""

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        """One task and its calls in call order, or `None` if the task does not exist."""


class CheckpointStore(Transitions, DueWork, Outbox, Catalog, Operations, Protocol):
    """The complete store. `durable` says whether tasks kept here outlive the process."""

    @property
    def durable(self) -> bool: ...

    @property
    def present(self) -> datetime | None:
        """The current time by the store's clock, without I/O. `None` if not yet known."""

    async def open(self) -> None:
        """Connect and check the schema.

        Raises:
            ConfigurationError: the database is not migrated; the message names the command to run.
            StoreUnavailable: the database does not answer.
        """

    async def close(self) -> None:
        """Release all connections."""


class StoreTimings(Protocol):
    """Durations and limits that a store applies. `meshpoint.settings` has the defaults."""

    dispatch_lease: timedelta
    tombstone_ttl: timedelta
    incompatible_limit: timedelta
    checkpoint_ttl: timedelta  # for operations that failed or were cancelled
    checkpoint_history: int  # number of most recent checkpoints kept per operation
    checkpoint_archive: bool  # on success, move checkpoints instead of deleting them
