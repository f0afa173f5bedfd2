"""Subtask checkpoints and operations: the part of the store that a task uses within a segment.

The rules in `meshpoint.ports.task_store` apply to these methods too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshpoint.model.checkpoint import BeginResult, L1Snapshot, Save, SaveResult, Track
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operations import OperationStatus, OperationSummary, Revive, ReviveResult
from meshpoint.model.subtasks import AgentCheckpoint


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
      one. A preserved operation keeps them. `end` as failed or cancelled keeps the
      request, writes `End.checkpoint` (or repeats the last checkpoint with `End.reason` or
      `dead_reason`), and keeps all of it for `checkpoint_ttl` instead of `tombstone_ttl`, or
      forever if preserved. `cancel` of a waiting task does the same with the reason "cancelled on
      request".
    - `purge` deletes the operation and its checkpoints together with the tombstone.

    Only the newest working memory stored with an operation's checkpoints is kept: a checkpoint
    that carries a memory removes it from all earlier ones. Until then, the checkpoint that carries
    it is kept even if it is too old for the history. Repeating the last checkpoint copies the
    memory's hash but does not move the memory.
    """

    async def track(self, command: Track) -> BeginResult:
        """Make the running task with exactly this fence an operation.

        Returns:
            `Begun`, also if the task is an operation already; `Fenced` if another run owns the
            task; `CancelFound(run)` if a cancel was requested.
        """

    async def save(self, command: Save) -> SaveResult:
        """Write a checkpoint of the operation running under exactly this fence; prune its history.

        If the run has `progressed`, its `attempt` is reset to 1. Otherwise it is unchanged, so
        that a task that keeps saving and crashing reaches its last attempt. Saving a `seq` that
        already exists changes nothing and succeeds.
        """

    async def latest(self, task_id: TaskId, agent: AgentName | None = None) -> AgentCheckpoint | None:
        """The operation's checkpoint with the highest `seq`.

        Returns `None` if there is no checkpoint or it belongs to another agent.
        """

    async def l1_snapshot(self, task_id: TaskId, agent: AgentName | None = None) -> L1Snapshot | None:
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
        without a `requester` keeps the existing requester, without its deadline, if its reply has
        not been sent.

        With `adopt`, a task that has not ended continues for the new requester and the result is
        `Adopted`.
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
        self, *, agent: AgentName | None = None, statuses: Sequence[OperationStatus] = (), limit: int = 100
    ) -> list[OperationSummary]:
        """Operations, newest first. Empty `statuses` matches every status."""
