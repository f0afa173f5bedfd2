"""Subtask checkpoints and operations: the part of the store that a task uses within its segments.

What `meshpoint.ports.task_store` says of every method holds here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshpoint.model.checkpoint import BeginResult, L1Snapshot, Save, SaveResult, Track
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operations import OperationStatus, OperationSummary, Revive, ReviveResult
from meshpoint.model.subtasks import AgentCheckpoint


class Operations(Protocol):
    """Operations and the history of their checkpoints.

    A task is an operation from its first subtask on; one that has none writes nothing here. Its state and owner are
    those of the task's row; this part of the store adds what only an operation has.

    What the other transitions do for an operation:

    - `begin` with `Begin.operation` writes it together with the task.
    - `pause` adds `Pause.children` to its children, and writes `Pause.checkpoint`, unless one of that `seq` stands
      there. A pause with a checkpoint of a task that is no operation is `Fenced`: nothing is written.
    - `end` as completed deletes its checkpoints, or moves them to the archive if the store is told to keep one;
      those of a preserved operation stay where they are. As failed or cancelled it keeps the request, writes
      `End.checkpoint` (or its last checkpoint once more, with `End.reason` or `dead_reason`), and keeps all of
      it for `checkpoint_ttl` (a preserved one for ever) instead of `tombstone_ttl`. So does `cancel` of a task that
      waits, with the reason "cancelled on request".
    - `purge` deletes its checkpoints and the operation together with the tombstone.

    Of the working memories that are written with an operation's checkpoints only the newest is kept: a checkpoint
    that brings one takes them from all before it. Until then the checkpoint that has it stays, even if it is too old
    for the history. A checkpoint that is written once more has the hash once more; the memory stays where it is.
    """

    async def track(self, command: Track) -> BeginResult:
        """Make a running task, of exactly this fence, an operation. One that is an operation already: `Begun`.

        Another owner: `Fenced`. A cancel was requested: `CancelFound(run)`.
        """

    async def save(self, command: Save) -> SaveResult:
        """Write a checkpoint of an operation that runs under exactly this fence, and prune its history.

        If the run has `progressed`, its `attempt` begins again at 1; otherwise it stays, so that a task which always
        saves and crashes comes to its last one. A checkpoint whose `seq` stands there already has found itself.
        """

    async def latest(self, task_id: TaskId, agent: AgentName | None = None) -> AgentCheckpoint | None:
        """The operation's checkpoint with the highest `seq`; None: there is none, or it is another agent's."""

    async def l1_snapshot(self, task_id: TaskId, agent: AgentName | None = None) -> L1Snapshot | None:
        """The working memory that was written last with one of its checkpoints, archived ones left out.

        None: there is none, or it is another agent's. Its `seq` may be that of an older checkpoint than the `latest`.
        """

    async def history(self, task_id: TaskId) -> list[AgentCheckpoint]:
        """All its checkpoints that were kept, oldest first; archived ones if there are no others.

        They come as `latest`: without the working memories that were written with them.
        """

    async def revive(self, command: Revive) -> ReviveResult:
        """Make an ended task `ready` again, in generation 0, with its fence raised: its old runs are zombies.

        Its refusals come in the order of `Refusal`. The other active operations of an exclusive agent are counted
        under a lock of that agent, so that of two wishes at the same time only one finds none.

        A wish has found itself when the row's run id is its `token`, or its `order` is the last that the task has
        seen; a smaller one is refused as RUNNING. With an order, a wish of another agent than the one whose task it
        is is refused as NOT_FOUND; a task that nobody waits for is any agent's. A wish without one is refused for
        none of this, and the task still knows the last order.

        Calls and joins of the earlier attempt are deleted, but for `cancelling` calls: they stay until they are sent,
        as those of no pause (generation -1), so that nobody takes their outcomes for his own. A wish without a
        requester leaves the one in place whose reply was not sent, without its deadline.

        With `adopt`, a task that has not ended goes on as it is, for the new requester: `Adopted`.
        """

    async def copy_key(self) -> bytes:
        """The key that authenticates this mesh's copies outside the store: 32 random bytes, made once and kept."""

    async def preserve(self, task_id: TaskId, *, preserve: bool = True) -> bool:
        """Exempt an operation's checkpoints from every deletion, or stop that; whether there is such an operation."""

    async def operation(self, task_id: TaskId) -> OperationSummary | None:
        """One operation."""

    async def operations(
        self, *, agent: AgentName | None = None, statuses: Sequence[OperationStatus] = (), limit: int = 100
    ) -> list[OperationSummary]:
        """Operations, newest first; no statuses mean all."""
