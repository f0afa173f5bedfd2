"""Where tasks are kept: the store, in four small protocols that one adapter implements.

What holds for every method:

- It is one transaction. It locks tasks in order of id, then calls in order of id, so that two replicas cannot
  deadlock.
- Lists in, lists out, results in the order of the arguments.
- It raises `StoreUnavailable` when certainly nothing was written, and `CommitInDoubt` when the answer to
  COMMIT was lost. Repeating a call with the same values is always safe: the repetition finds what the first
  one wrote (by run id or claim id) and returns the same result.
- Deadlines and leases are computed by the store's clock.
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
    """The steps of a task's life that a message or a run causes."""

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, Known]:
        """The rows that exist, by id: one read by primary key."""

    async def begin(self, begins: Sequence[Begin]) -> list[BeginResult]:
        """Write tasks as `running`, generation 0, fence 1, attempt 1, with a lease and the request kept.

        Any other row of that task: `Fenced`; a cancelled one: `CancelFound(None)`. The row keeps `Begin.order`: see
        `revive`. With `Begin.queued`, the row is `ready` at once, with attempt 0 and no owner.
        """

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        """Checkpoint: task row `waiting` (fence kept, or 1 when new; attempt 0; generation + 1), calls, join.

        With `run.fence == 0` the row must not exist; otherwise it must be `running` under exactly this fence.
        Done calls and joins of earlier generations are deleted; `cancelling` calls stay until they are sent.
        A call's deadline is the earlier of now + timeout and the task's deadline. If the join is met at once
        (calls failed before they could be sent), the task is `ready` and calls still pending are closed as
        `Failed(cancelled)` without ever being dispatched. Pending calls carry a dispatch lease: the caller
        sends them now, the outbox offers them again after `dispatch_lease`.
        """

    async def claim(self, claims: Sequence[Claim], replica: Replica, slots: int) -> list[Arrival]:
        """Record outcomes, one winner each; count them on the join; take or release tasks whose join is met.

        A task whose join is met while it waits in the call's generation becomes `running` under `replica`
        (fence + 1, attempt 1, lease set, run id = the claim's id) if one of `slots` is left and its
        `state_format` is one of the replica's; otherwise `ready`. Pending calls the join no longer needs are
        closed as `Failed(cancelled)` and left `cancelling`. The claim that met the join gets
        `AllArrived`/`MadeReady`; earlier ones of the same batch get `StillWaiting`.
        State and outcomes are read after the row is locked.
        """

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """Turn `running` rows of this fence into tombstones with their reply.

        State, outcomes, security context and (unless `dead_reason`) the request are wiped; done calls and
        joins are deleted; `cancelling` calls stay. A raised cancel flag does not matter: the end that
        commits first wins.
        """

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        """Turn `running` rows of this fence into `ready`, not offered before now + `not_before`.

        An incompatible one becomes `parked` when `incompatible_limit` has passed since its first such
        release. `Release.death` is kept until the next pause or end. False: fenced.
        """

    async def cancel(self, cancels: Sequence[Cancel]) -> list[CancelResult]:
        """Cancel tasks whatever their state; see the results. Unknown tasks get a tombstone.

        A task that has another parent than `Cancel.parent` is left as it is: `CancelStale`. Without either, any is
        cancelled.
        A repeated cancel of a task it has cancelled returns `CancelTooLate` with the cancelled reply.
        """

    async def requested(self, calls: Sequence[tuple[TaskId, TaskId]]) -> list[Dispatch | None]:
        """The requests of calls, by task and `sub_task_id`, as sent; `None` for a missing call."""

    async def progress(self, updates: Sequence[Progress]) -> list[ProgressNoted | None]:
        """Extend the idle deadline of pending calls, never past the absolute one, and tell whom to forward to.

        None: no such pending call, or another sender than the called peer. An extension by less than a tenth
        of the idle timeout is not written.
        """


class DueWork(Protocol):
    """What time alone makes due. Rows locked by others are skipped."""

    async def due(self, replica: Replica, limit: int) -> Due:
        """Count the work of each kind that is due for `replica`, up to `limit`, in one read without changes."""

    async def expire(self, replica: Replica, limit: int, slots: int) -> list[Expired]:
        """Waiting tasks with calls or a join past their deadline: close those calls, count them, take the task.

        An expired call ends as `Failed(timeout)`; an expired join closes all its open calls as
        `Failed(timeout)` and is met. A timed-out call is left `cancelling`. Same path as `claim`.
        """

    async def take(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """`ready` tasks that are due and whose format the replica reads, oldest first: now `running` here.

        At most `suspects` of them are suspects, that is, rescued `SUSPECT_FROM` times or more.
        """

    async def take_over(self, replica: Replica, limit: int, suspects: int = 0) -> list[Resumable]:
        """`running` tasks of this agent whose lease has expired: fence + 1, rescues + 1, owned by `replica`.

        If `replica` does not isolate suspects, attempt + 1 too, because no deaths are counted otherwise. In
        generation 0 any replica of the agent may take them; later only replicas that read the format. Suspects
        (rescued `SUSPECT_FROM` times or more) beyond the limit `suspects` become `ready` without an owner and are
        not returned.
        """

    async def owned(self, run: Run) -> Resumable | None:
        """Read the task owned by exactly this run, for another process of its owner. `None` if it was lost."""

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Extend the leases of running tasks under exactly these fences; return the runs that lost theirs.

        A lease that has expired, but that nobody took, is renewed.
        """

    async def keep_alives(self, replica: Replica, limit: int) -> list[KeepAlive]:
        """Waiting or ready tasks whose requester is due to hear of them; their next one is set."""

    async def purge(self, agent: AgentName, limit: int) -> int:
        """Delete tombstones past `expires_at` whose reply and cancels are sent; how many."""


class Outbox(Protocol):
    """What was committed and still has to be sent."""

    async def unsent(self, agent: AgentName, limit: int) -> list[Send]:
        """Dispatches, cancel notices and replies that are due; each is leased to the caller with back-off."""

    async def keep_replies(self, replies: Sequence[KeepReply]) -> list[bool]:
        """Keep undeliverable replies of tasks without a row. Returns, for each, whether it will be sent from here.

        A task without a row becomes a tombstone (generation 0, fence 0) whose reply is due after the dispatch lease.
        False: another run's row has the id, and nothing changed. With `KeepReply.again`, an ended task of this agent
        has its reply due again, to the address in `KeepReply.reply`; a reply still due there keeps its turn.
        """

    async def mark_sent(self, sent: Sequence[Send]) -> None:
        """The broker confirmed them. May be lost: they are sent again under the same ids.

        A cancel notice's row is deleted when its task has ended, gone on or was revived; otherwise it becomes `done`.
        A reply's row stays until `expires_at`. The mark of one whose `fence` is not the row's, that of an
        earlier end, changes nothing.
        """


class Catalog(Protocol):
    """Tasks, for people and scripts."""

    async def tasks(
        self, *, agent: AgentName | None = None, states: Sequence[TaskState] = (), limit: int = 100
    ) -> list[TaskSummary]:
        """Tasks, newest first."""

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        """One task and its calls in call order."""


class CheckpointStore(Transitions, DueWork, Outbox, Catalog, Operations, Protocol):
    """All of it. `durable` tells whether a task kept here outlives the process."""

    @property
    def durable(self) -> bool: ...

    @property
    def present(self) -> datetime | None:
        """The current time by the store's clock, without I/O; `None` if unknown."""

    async def open(self) -> None:
        """Connect and check the schema.

        Raises:
            ConfigurationError: the database is not migrated; names the command that does it.
            StoreUnavailable: the database does not answer.
        """

    async def close(self) -> None:
        """Release every connection."""


class StoreTimings(Protocol):
    """Durations a store applies; see `meshpoint.settings` for their defaults."""

    dispatch_lease: timedelta
    tombstone_ttl: timedelta
    incompatible_limit: timedelta
    checkpoint_ttl: timedelta  # of operations that failed or were cancelled
    checkpoint_history: int  # checkpoints of an operation that are kept, the last ones
    checkpoint_archive: bool  # on success, move checkpoints instead of deleting them
